"""Makes a small random model with a byte-level tokenizer: real weights for a real engine in two seconds.

Run it with the interpreter that has transformers and tokenizers, by path; this package need not be there::

    ENGINE_VENV/bin/python launchers/tiny_model.py OUT [--seed 0] [--layers 2] [--context 16384] [--vision]

``OUT`` becomes a model directory; one that is complete with the same settings is left as it is. Tokens are bytes
(ids 0 to 255) and three special ones, so any text encodes and nothing is learned; random weights never write a command.

The model is a Llama. With ``--vision`` it is a PaddleOCR-VL, which takes images: a vision tower for images of any size,
and positions of three dimensions, as in Qwen2-VL. Unlike that one its processor needs no torchvision. Each square of
28 × 28 pixels becomes one token.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the files made; increase it when a change here makes other files of the same settings."""
HIDDEN, HEADS = 128, 4
"""vLLM's CPU attention takes heads of 32 and more."""
END, START, PAD = "<|end|>", "<|start|>", "<|pad|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
IMAGE_START, IMAGE, IMAGE_END = "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"
"""vLLM expects these names of this model. The placeholder stands for one square of an image."""
VISION_TEMPLATE = TEMPLATE.replace(
    "{{ part['text'] }}",
    f"{{% if part['type'] == 'text' %}}{{{{ part['text'] }}}}"
    f"{{% else %}}{{{{ '{IMAGE_START}{IMAGE}{IMAGE_END}' }}}}{{% endif %}}",
)
PATCH, MERGE = 14, 2
"""Pixels of a patch's side, and patches of a token's side."""
VISION_HIDDEN, VISION_HEADS = 64, 2
MAX_SQUARES = 64
"""Largest number of tokens of an image; larger images are scaled down."""
MARK = "megaflow-tiny.json"


def is_complete(out: Path, settings: Mapping[str, Any]) -> bool:
    """Returns whether ``out`` is a complete model directory of these settings."""
    try:
        return bool(json.loads((out / MARK).read_text()) == settings)
    except (OSError, ValueError):
        return False


def make(out: Path, *, seed: int = 0, layers: int = 2, context: int = 16384, vision: bool = False) -> bool:
    """Makes the model at ``out``, whole or not at all; returns ``False`` if it is there already.

    Args:
        context: longest sequence in tokens.
        vision: make a model that takes images.
    """
    settings: dict[str, Any] = {"format": FORMAT, "seed": seed, "layers": layers, "context": context}
    settings |= {"vision": True} if vision else {}
    if is_complete(out, settings):
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        work.chmod(0o755)
        _write(work, seed, layers, context, vision)
        for file in work.iterdir():
            file.chmod(0o644)
        (work / MARK).write_text(json.dumps(settings))
        if out.exists():
            shutil.rmtree(out)
        os.rename(work, out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return True


def _write(out: Path, seed: int, layers: int, context: int, vision: bool) -> None:
    import torch  # type: ignore[import-not-found]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-not-found]
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # type: ignore[import-not-found]

    alphabet = {letter: number for number, letter in enumerate(_byte_letters())}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special: dict[str, Any] = {"additional_special_tokens": [START]}
    if vision:
        names = {"image_token": IMAGE, "image_start_token": IMAGE_START, "image_end_token": IMAGE_END}
        special = {"extra_special_tokens": {"start_token": START, **names}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        **special,
    )
    tokenizer.chat_template = VISION_TEMPLATE if vision else TEMPLATE
    torch.manual_seed(seed)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": context,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
    }
    if vision:
        _write_vision(out, tokenizer, text, layers)
        return
    tokenizer.save_pretrained(out)
    LlamaForCausalLM(LlamaConfig(**text, torch_dtype="float32")).save_pretrained(out, safe_serialization=True)


def _write_vision(out: Path, tokenizer: Any, text: dict[str, Any], layers: int) -> None:
    from transformers import (
        PaddleOCRVLConfig,
        PaddleOCRVLForConditionalGeneration,
        PaddleOCRVLImageProcessorPil,
        PaddleOCRVLProcessor,
    )

    side = PATCH * MERGE
    images = PaddleOCRVLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        size={"shortest_edge": side * side, "longest_edge": MAX_SQUARES * side * side},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    PaddleOCRVLProcessor(images, tokenizer, chat_template=VISION_TEMPLATE).save_pretrained(out)
    head = HIDDEN // HEADS
    config = PaddleOCRVLConfig(
        text_config={
            **text,
            "head_dim": head,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [head // 2 - 12, 6, 6]},
            "tie_word_embeddings": False,
        },
        vision_config={
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 4 * VISION_HIDDEN,
            "num_hidden_layers": layers,
            "num_attention_heads": VISION_HEADS,
            "patch_size": PATCH,
            "image_size": 8 * PATCH,
            "spatial_merge_size": MERGE,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(IMAGE_START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(IMAGE_END),
        tie_word_embeddings=False,
        dtype="float32",
    )
    PaddleOCRVLForConditionalGeneration(config).save_pretrained(out, safe_serialization=True)


def _byte_letters() -> list[str]:
    """Returns the printable letter for each byte, as in GPT-2's tokenizer: itself, or one from U+0100 on."""
    letters, spare = [], 0x100
    for byte in range(256):
        printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
        letters.append(chr(byte if printable else spare))
        spare += 0 if printable else 1
    return letters


def main() -> int:
    parser = argparse.ArgumentParser(description="makes a small random model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=16384, help="longest sequence in tokens")
    parser.add_argument("--vision", action="store_true", help="make a model that takes images")
    asked = vars(parser.parse_args())
    out = asked.pop("out")
    made = make(out, **asked)
    print(f"{out}: {'made' if made else 'there already'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
