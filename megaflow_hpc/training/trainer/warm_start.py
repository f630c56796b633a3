"""Trains a model on demonstrations before any rollout exists: supervised fine-tuning (SFT).

    python -m megaflow_hpc.training.trainer.warm_start MODEL DEMONSTRATIONS.jsonl OUT --lr 1e-5 --epochs 2

Run it in an environment with torch and transformers, or by torchrun on several GPUs. Each line of DEMONSTRATIONS is a
conversation, {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}. The loss is the
mean negative log-likelihood of the tokens in the assistant's messages. OUT is a model directory with the tokenizer of
MODEL, for `model.path` of a campaign. A model without demonstrations seldom earns a reward by chance, and then learns
nothing.

An image-text model takes images too. A message's content is then a list of parts, {"type": "text", "text": "…"} and
{"type": "image_url", "image_url": {"url": "…"}}. The URL is a data: URL, or a file name relative to DEMONSTRATIONS.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError, MegaflowError
from megaflow_hpc.texts import printable
from megaflow_hpc.training.microbatch import ShownImage
from megaflow_hpc.trajectory import Image, ImageSpan, image_parts

WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")
"""File name endings of weight files. All other files are copied from the base model."""
Example = tuple[list[int], list[int], list[ShownImage]]
"""Token ids of a conversation, the indices of the tokens that the assistant wrote, and the images."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megaflow_hpc.training.trainer.warm_start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("demonstrations", type=Path, metavar="DEMONSTRATIONS")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--lr", type=float, default=1e-5, help="learning rate at the start; it falls to 0 (default 1e-5)"
    )
    parser.add_argument("--epochs", type=int, default=1, help="passes over the demonstrations (default 1)")
    parser.add_argument("--batch", type=int, default=32, help="conversations in an update (default 32)")
    parser.add_argument("--microbatch", type=int, default=32768, help="tokens in a forward pass (default 32768)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args(argv)
    try:
        _train(arguments)
    except MegaflowError as error:
        print(printable(f"warm_start: {error}"), file=sys.stderr)
        return error.exit_status
    return 0


def _train(arguments: argparse.Namespace) -> None:
    if arguments.out.exists():
        raise ConfigError(f"{arguments.out}: exists already; choose another name")
    folder = arguments.out.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; choose another place for OUT") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder}: you may not write there; choose another place for OUT")
    # Import torch only after the check, because it takes seconds to load.
    import torch  # type: ignore[import-not-found]

    from megaflow_hpc.training.microbatch import rows_in_order
    from megaflow_hpc.training.trainer import checkpoint
    from megaflow_hpc.training.trainer.model import join, load, row_of
    from megaflow_hpc.training.trainer.optimizer import Optimizer

    ranks = join()
    demonstrations = examples(arguments.model, arguments.demonstrations)
    torch.manual_seed(0)
    policy = load(arguments.model, arguments.dtype, ranks, recompute=True)
    optimizer = Optimizer(policy, arguments.lr)
    batches = [
        batch for epoch in range(arguments.epochs) for batch in _shuffled(demonstrations, arguments.batch, epoch)
    ]
    for number, batch in enumerate(batches):
        count = sum(len(example[1]) for example in batch)
        mine = batch[ranks.rank :: ranks.count]
        rows = list(rows_in_order((len(example[0]) for example in mine), arguments.microbatch))
        rows += [[]] * (max(ranks.gather(len(rows))) - len(rows))
        total = 0.0
        for row in rows:
            logprobs = policy(*row_of([mine[index] for index in row], policy))[0]
            nll = -logprobs.sum() / count
            nll.backward()
            total += float(nll.detach())
        if not math.isfinite(optimizer.step(arguments.lr * (1 - number / len(batches)))):
            raise ConfigError(f"update {number + 1}: the gradient is not finite; use a lower --lr; nothing was written")
        loss = sum(ranks.gather(total))
        if ranks.first:
            print(json.dumps({"update": number + 1, "updates": len(batches), "loss": loss}), flush=True)
    staged = arguments.out.absolute().with_name(f".{arguments.out.name}.{ranks.broadcast(os.getpid())}")
    checkpoint.export(staged, policy, ranks)
    if ranks.first:
        for path in arguments.model.iterdir():
            if path.is_file() and not path.name.endswith(WEIGHTS) and not (staged / path.name).exists():
                shutil.copyfile(path, staged / path.name)
        staged.rename(arguments.out)
    ranks.leave()


def examples(model: Path, demonstrations: Path) -> list[Example]:
    """Returns the conversations, encoded with the model's chat template.

    If the template changes earlier messages when a message is added, each later answer becomes a separate example.

    Raises:
        ConfigError: a line is not a conversation, or the template does not append an answer to its prompt.
    """
    from transformers import AutoTokenizer  # type: ignore[import-not-found]

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)

    images = _Images(model, demonstrations)

    def encode(messages: Sequence[Any], prompt: bool, where: str) -> tuple[list[int], list[ShownImage]]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return images.placed(list(tokenizer(text, add_special_tokens=False)["input_ids"]), messages, where)

    encoded: list[Example] = []
    for number, line in enumerate(demonstrations.read_text(encoding="utf-8").splitlines(), 1):
        try:
            messages = json.loads(line)["messages"]
            roles = [message["role"] for message in messages]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'{demonstrations}:{number}: {error!r}; expected {{"messages": [{{"role": …}}]}}'
            ) from None
        tokens: list[int] = []
        for index in (i for i, role in enumerate(roles) if role == "assistant"):
            where = f"{demonstrations}:{number}"
            before, _ = encode(messages[:index], True, where)
            tokens_so_far, shown = encode(messages[: index + 1], False, where)
            if tokens_so_far[: len(before)] != before or len(tokens_so_far) == len(before) or not before:
                raise ConfigError(
                    f"{demonstrations}:{number}: message {index}: the chat template of {model} does not add the answer "
                    "to its prompt; leave thoughts out of the demonstrations, or use a template that keeps them"
                )
            written = list(range(len(before), len(tokens_so_far)))
            if tokens and before[: len(tokens)] == tokens:
                written = encoded.pop()[1] + written
            tokens = tokens_so_far
            encoded.append((tokens_so_far, written, shown))
    if not encoded:
        raise ConfigError(f"{demonstrations}: has no message of an assistant; there is nothing to learn")
    return encoded


class _Images:
    """Inserts the placeholders for images in demonstrations, as the model's image processor requires."""

    def __init__(self, model: Path, demonstrations: Path) -> None:
        self._model, self._folder = model, demonstrations.parent
        self._vision: Any = None

    def placed(self, tokens: list[int], messages: Sequence[Any], where: str) -> tuple[list[int], list[ShownImage]]:
        """Returns the tokens, with the right number of placeholders for each image's size, and the images.

        Raises:
            ConfigError: an image is missing or damaged, the model takes no images, or the template renders a different
                number of images.
        """
        urls = [part["image_url"]["url"] for message in messages for part in image_parts(message)]
        if not urls:
            return tokens, []
        if self._vision is None:
            from megaflow_hpc.training.trainer.vision import Vision

            self._vision = Vision.read(self._model)
        placeholder = self._vision.placeholder
        if (count := tokens.count(placeholder)) != len(urls):
            raise ConfigError(f"{where}: shows {len(urls)} images, but the chat template of {self._model} {count}")
        placed: list[int] = []
        shown: list[ShownImage] = []
        rest = iter(urls)
        for token in tokens:
            if token != placeholder:
                placed.append(token)
                continue
            image = self._read(next(rest), where)
            shown.append((ImageSpan(len(placed), self._vision.tokens_of(image), image.sha256), image))
            placed += [placeholder] * shown[-1][0].length
        return placed, shown

    def _read(self, url: str, where: str) -> Image:
        from megaflow_hpc.training.trainer.vision import image_of

        try:
            if url.startswith("data:"):
                return image_of(base64.b64decode(url.partition(",")[2], validate=True), where)
            return image_of((self._folder / url).read_bytes(), self._folder / url)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: the image {url[:80]!r} cannot be read: {error}") from None


def _shuffled(demonstrations: Sequence[Example], size: int, epoch: int) -> Iterator[list[Example]]:
    order = list(demonstrations)
    random.Random(epoch).shuffle(order)
    for first in range(0, len(order), size):
        yield order[first : first + size]


if __name__ == "__main__":
    raise SystemExit(main())
