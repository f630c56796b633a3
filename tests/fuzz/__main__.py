"""``python -m tests.fuzz TARGET [options of libFuzzer]``: run one target for long.

The corpus is kept in ``fuzz-out/TARGET``. The first input that is a defect ends the run, and is written there.
Without atheris, hypothesis makes the inputs, unguided; of the options it honours ``-runs``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import sys
from pathlib import Path
from random import Random

LIBRARIES = ("e2b_dockerfile_utils", "pathspec", "tarfile", "tomllib", "yaml")
"""Libraries written in Python. Their coverage guides the search too."""


def main() -> None:
    """Parse the command line and run the target."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="feed a reader with hostile bytes")
    parser.add_argument("target")
    parser.add_argument("-runs", type=int, help="inputs; default: 20,000, or no limit with atheris")
    arguments, options = parser.parse_known_args()
    if importlib.util.find_spec("atheris"):
        _guided(arguments.target, [f"-runs={arguments.runs or -1}", *options])
    else:
        from tests.fuzz.inputs import explore
        from tests.fuzz.targets import TARGETS

        explore(TARGETS[arguments.target], arguments.runs or 20_000, derandomize=False)


def _guided(name: str, options: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["megaflow_hpc", *LIBRARIES], enable_loader_override=False):
        from tests.fuzz.targets import TARGETS
    from tests.fuzz.contract import LONGEST_INPUT
    from tests.fuzz.inputs import with_other_value

    target = TARGETS[name]
    folder = Path("fuzz-out", name)
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for data in (*target.seeds(), *target.known()):
        (corpus / hashlib.sha256(data).hexdigest()).write_bytes(data)
    words = folder / "words"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))

    def mutated(data: bytes, longest: int, seed: int) -> bytes:
        """Change a value of a document half of the time, and bytes otherwise."""
        random = Random(seed)
        if target.form and random.random() < 0.5:
            data = with_other_value(data, target.form, random)[:longest]
        return atheris.Mutate(data, longest)  # type: ignore[no-any-return]

    defaults = [f"-max_len={LONGEST_INPUT}", f"-artifact_prefix={folder}/", "-timeout=120"]
    if target.words:  # an empty file is an error
        defaults.append(f"-dict={words}")
    limits = ["-rss_limit_mb=0", "-detect_leaks=0"]  # the target measures its own memory
    mutator = {"custom_mutator": mutated} if target.form else {}
    atheris.Setup([sys.argv[0], str(corpus), *defaults, *limits, *options], target.feed, **mutator)
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()
