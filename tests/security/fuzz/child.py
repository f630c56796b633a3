"""One target in a process of its own: ``python -m tests.security.fuzz.child TARGET FOLDER …``.

::

    FOLDER/notes                 which input it is at (:mod:`.limits`)
    FOLDER/faults/<key>.input    an input that broke the contract, the first of its kind; <key>.txt says how
    FOLDER/corpus/               inputs that reached new code, for the next start; where atheris is

A kind of fault is the exception's class and the innermost line of the package that it passed through.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import importlib.util
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.security.fuzz.limits import ADDRESS_SPACE, CPU_S, MEMORY, Notes
from tests.security.fuzz.mutation import LARGEST, mutated
from tests.security.fuzz.target import Broken

LIBRARIES = ("e2b_dockerfile_utils", "pathspec", "tarfile", "tomllib", "yaml")
"""Written in Python: their coverage guides the search too."""
OUR_PLACES = ("megaflow_hpc/", "tests/security/fuzz/")


class Feeder:
    """Feeds a target, and keeps the first input of each kind of fault.

    Args:
        feed: the target's.
        folder: as above.
    """

    def __init__(self, feed: Any, folder: Path) -> None:
        self._feed = feed
        self._faults = folder / "faults"
        self._faults.mkdir(parents=True, exist_ok=True)
        self._notes = Notes(folder / "notes")
        self._known = {path.stem for path in self._faults.glob("*.txt")}

    def take(self, data: bytes) -> None:
        """Feeds one input, within the limits."""
        data = data[:LARGEST]
        self._notes.begin(data)
        if found := fault_of(self._feed, data):
            key, text = found
            if key not in self._known:
                self._known.add(key)
                (self._faults / f"{key}.input").write_bytes(data)
                (self._faults / f"{key}.txt").write_text(text, errors="backslashreplace")
        self._notes.end()


def fault_of(feed: Any, data: bytes) -> tuple[str, str] | None:
    """Feeds one input; returns the kind of its fault and a text that explains it, or ``None``."""
    from megaflow_hpc.errors import LONGEST, MegaflowError  # not before its coverage is asked for

    fresh_peak()
    memory, began = resident(), time.process_time()
    try:
        feed(data)
    except MegaflowError as error:
        if len(str(error)) > 2 * LONGEST:
            return "message-too-long", f"an error of {len(str(error))} characters"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return kind_of(error), "".join(traceback.format_exception(error, limit=-30))[-20_000:]
    took, grown = time.process_time() - began, peak() - memory
    if took > CPU_S:
        return "slow", f"{took:.1f} s of processor time for {len(data)} bytes"
    if grown > MEMORY:
        return "memory", f"{grown >> 20} MiB for {len(data)} bytes"
    return None


def kind_of(error: BaseException) -> str:
    """A short name that is the same for faults of one kind."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if any(place in frame.filename for place in OUR_PLACES)]
    place = (ours or frames or [None])[-1]
    where = f"{Path(place.filename).stem}-{place.name}" if place else "nowhere"
    where += f"-{error.kind}" if isinstance(error, Broken) else ""
    name = f"{type(error).__name__}-{where}"
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:100]


def fresh_peak() -> None:
    """Begins anew to measure the largest resident memory."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def resident() -> int:
    """Bytes in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak() -> int:
    """Most bytes in memory since :func:`fresh_peak`; not ``ru_maxrss``, which is that of whoever started us too."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) * 1024


def limit_memory() -> None:
    """Limits the address space from now on."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, mapped + ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def drawn(seeds: Sequence[bytes], form: str, words: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Endless inputs, the same ones for the same ``seed``, made of ``seeds``."""
    draw = random.Random(seed)
    recent = list(seeds)
    while True:
        base = draw.choice(recent if draw.random() < 0.2 else seeds)
        data = mutated(base, draw, seeds, form, words)
        if len(recent) < 500:
            recent.append(data)
        else:
            recent[draw.randrange(len(recent))] = data
        yield data


def main() -> None:
    """Runs until the count, the time, or the end by a limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=0, help="inputs, made without guidance")
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--input", type=Path, help="feed only this file")
    arguments = parser.parse_args()
    faulthandler.enable()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    guided = arguments.seconds and not arguments.input and importlib.util.find_spec("atheris") is not None
    if guided:
        _instrumented()
    from tests.security.fuzz.found import FOUND
    from tests.security.fuzz.targets import TARGETS

    target = TARGETS[arguments.target]
    seeds = [seed[:LARGEST] for seed in target.seeds()]
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_memory()) as scratch, target.opened(Path(scratch)) as feed:
        feeder = Feeder(feed, arguments.folder)
        feed_quietly(feed, seeds[0])  # what is loaded on first use is no input's doing
        limit_memory()
        if arguments.input:
            feeder.take(arguments.input.read_bytes())
        elif guided:
            _guided(target, seeds, feeder, arguments)
        else:
            deadline = time.monotonic() + (arguments.seconds or 1e9)
            for data in (*FOUND.get(target.name, tuple)(), *seeds):
                feeder.take(data)
            for number, data in enumerate(drawn(seeds, target.form, target.words, arguments.seed)):
                if time.monotonic() > deadline or (arguments.count and number >= arguments.count):
                    break
                feeder.take(data)


def _memory() -> str | None:
    """A directory in memory, where there is one: targets write much, and some of them durably."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def feed_quietly(feed: Any, data: bytes) -> None:
    """Feeds an input whatever comes of it."""
    with contextlib.suppress(Exception):
        feed(data)


def _instrumented() -> None:
    """Has all that is imported from now on tell which code was reached."""
    import atheris

    with atheris.instrument_imports(include=["megaflow_hpc", *LIBRARIES], enable_loader_override=False):
        import tests.security.fuzz.targets  # noqa: F401


def _guided(target: Any, seeds: Sequence[bytes], feeder: Feeder, arguments: argparse.Namespace) -> None:
    import atheris

    from tests.security.fuzz.found import FOUND

    corpus = arguments.folder / "corpus"
    if not corpus.is_dir():
        corpus.mkdir(parents=True)
        for seed in (*seeds, *FOUND.get(target.name, tuple)()):
            (corpus / hashlib.sha256(seed).hexdigest()).write_bytes(seed)

    def changed(data: bytes, size: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if draw.random() < 0.35:
            return atheris.Mutate(data, size)  # type: ignore[no-any-return]
        return mutated(data, draw, seeds, target.form, target.words)[:size]

    options = ["fuzz", str(corpus), f"-max_len={LARGEST}", f"-seed={arguments.seed}", "-len_control=0"]
    options += [f"-max_total_time={arguments.seconds}", "-rss_limit_mb=0", "-timeout=100000", "-verbosity=0"]
    options += [f"-handle_{name}=0" for name in ("abrt", "segv", "bus", "ill", "fpe", "term", "int", "xfsz")]
    options += [f"-artifact_prefix={arguments.folder}/", "-detect_leaks=0", "-use_value_profile=0"]
    atheris.Setup(options, feeder.take, custom_mutator=changed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
