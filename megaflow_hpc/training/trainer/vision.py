"""Computes the pixel inputs and token positions of images for an image-text model in the trainer.

A rollout's record contains each image file and the span of placeholder tokens that the image replaced in the engine.
The image processor in the model directory converts the file to pixels in the same way as the engine did, so trainer and
engine see the same numbers. Images are placed by the recorded spans, never by token ids, because a model may sample a
placeholder token itself.

Supported models have a processor that splits images into a grid of patches (``image_grid_thw``), merges each square of
patches into one token, and marks all of these tokens with the same placeholder: Qwen2-VL and its successors, GLM-4V,
PaddleOCR-VL and others. The model's own ``get_rope_index`` computes the positions, one sequence at a time, because they
depend on the row and column of a patch (multi-dimensional rotary embeddings: Wang et al. 2024, Qwen2-VL, arXiv
2409.12191).
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.microbatch import ShownImage
from megaflow_hpc.trajectory import Image, ImageSpan

GRID = "image_grid_thw"
"""Name of the model input that gives each image's number of patches as frames, rows and columns."""
MAX_CACHED_BYTES = 2**29
"""Maximum size in bytes of the cache of processed images. A step reads an image in each epoch and for each sequence
that contains it."""


class BadImage(ConfigError):
    """An image of a rollout cannot be decoded.

    Attributes:
        sequence: index of the sequence with the image in its row.
    """

    sequence = 0


class NoVision(ConfigError):
    """The model cannot take images. The message states the reason and the remedy."""


class Vision:
    """Computes the inputs of one image-text model. Created by :meth:`read`.

    Attributes:
        placeholder: id of the token that stands for a part of an image.
        options: options that replace those of the model's image processor, as in vLLM's ``mm-processor-kwargs``.
    """

    def __init__(self, source: Path, processor: Any, placeholder: int) -> None:
        self.source, self._processor, self.placeholder = source, processor, placeholder
        self.options: Mapping[str, Any] = {}
        self._model: Any = None
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._kept_bytes = 0

    @classmethod
    def read(cls, source: Path) -> Vision:
        """Reads the image processor of a model directory.

        Raises:
            NoVision: the directory has no image processor, or an unsupported one.
        """
        from transformers import AutoConfig, AutoImageProcessor  # type: ignore[import-not-found]

        try:
            config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
            processor = AutoImageProcessor.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise NoVision(
                f"{source}: has no image processor that transformers can load ({str(error).partition(chr(10))[0]:.200})"
                "; copy preprocessor_config.json, or processor_config.json, from the original model"
            ) from None
        placeholder = getattr(config, "image_token_id", None)
        if GRID not in processor.model_input_names or placeholder is None or not hasattr(processor, "merge_size"):
            raise NoVision(
                f"{source}: the image processor {type(processor).__name__} does not cut images into grids of patches "
                f"({GRID}); this trainer takes images with Qwen2-VL and models like it, and others as text only"
            )
        return cls(source, processor, int(placeholder))

    def attach(self, causal: Any) -> None:
        """Computes positions with this model. Otherwise, a model without weights is created to compute them."""
        self._model = causal
        for module in causal.modules():
            if type(module).__name__ == "PaddleOCRVisionEmbeddings":  # as in vLLM 0.32, unlike transformers 5.19
                module.interpolation_align_corners = False

    def _rope_index(self) -> Callable[..., Any] | None:
        if self._model is None:
            from transformers import AutoConfig, AutoModelForImageTextToText

            config = AutoConfig.from_pretrained(self.source, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                self._model = AutoModelForImageTextToText.from_config(config)
        return getattr(self._model.base_model, "get_rope_index", None)

    # --- images ---

    def tokens_of(self, image: Image) -> int:
        """Returns the number of placeholder tokens that the model's processor uses for an image.

        Raises:
            BadImage: the image cannot be decoded.
        """
        return self._tokens(self._pixels(image))

    def _tokens(self, pixels: Mapping[str, Any]) -> int:
        return int(pixels[GRID].prod()) // int(self._processor.merge_size) ** 2

    def _pixels(self, image: Image) -> dict[str, Any]:
        """Returns the model's inputs for one image."""
        if image.sha256 in self._kept:
            self._kept.move_to_end(image.sha256)
            return self._kept[image.sha256]
        opened = decoded(image)
        try:
            made = self._processor(images=[opened], return_tensors="pt", **self.options)
        except ValueError as error:  # for example, for an image that is too narrow
            raise BadImage(f"the image {image.sha256[:12]}… cannot be processed: {error}") from None
        pixels = {name: made[name] for name in self._processor.model_input_names if name in made}
        self._kept[image.sha256] = pixels
        self._kept_bytes += _bytes(pixels)
        while self._kept_bytes > MAX_CACHED_BYTES and len(self._kept) > 1:
            self._kept_bytes -= _bytes(self._kept.popitem(last=False)[1])
        return pixels

    def inputs(self, shown: Sequence[ShownImage]) -> list[dict[str, Any]]:
        """Returns the pixel inputs for each image in a sequence.

        Raises:
            BadImage: an image cannot be decoded.
            ConfigError: the processor uses a different number of tokens for an image than the engine did.
        """
        parts = []
        for span, image in shown:
            pixels = self._pixels(image)
            if (count := self._tokens(pixels)) != span.length:
                raise ConfigError(
                    f"{self.source}: its image processor gives the image {image.sha256[:12]}… of {image.width} × "
                    f"{image.height} pixels {count} tokens, but the engine gave it {span.length}: serve and train "
                    "with the same processor files and mm-processor-kwargs; no step was taken"
                )
            parts.append(pixels)
        return parts

    # --- placeholders ---

    def positions(self, tokens: Any, shown: Sequence[ShownImage]) -> Any:
        """Returns the positions of a sequence's tokens, int64 (3, T), or (1, T) if the model's positions have one
        dimension.

        Args:
            tokens: token ids (T).
            shown: the sequence's images, sorted by their start.

        Raises:
            BadImage: an image cannot be decoded.
            ConfigError: a span contains tokens other than placeholders, or is adjacent to another span.
        """
        length = len(tokens)
        plain = torch.arange(length)[None]
        for before, after in pairwise([span for span, _ in shown]):
            if before.end >= after.start:  # the model would see a single image
                raise ConfigError(
                    f"{self.source}: no token is between the images at tokens {before.start} and {after.start}: use a "
                    "chat template that marks where an image begins; no step was taken"
                )
        for span, _ in shown:
            if not 0 <= span.start < span.end <= length or (tokens[span.start : span.end] != self.placeholder).any():
                raise ConfigError(
                    f"{self.source}: tokens {span.start} to {span.end} of {length} are not the placeholders of an "
                    f"image ({self.placeholder}): the rollouts come from another model; no step was taken"
                )
        rope_index = self._rope_index()
        if rope_index is None:
            return plain
        if not shown:
            return plain.expand(3, -1)
        grids = torch.cat([self._pixels(image)[GRID] for _, image in shown])
        ids, kinds = torch.as_tensor(tokens)[None].long(), torch.from_numpy(kinds_of(length, shown))[None]
        return rope_index(input_ids=ids, mm_token_type_ids=kinds, **{GRID: grids})[0][:, 0]

    def marked(self, tokens: Any, sequences: Sequence[Sequence[ShownImage]], offsets: Sequence[int]) -> Any:
        """Returns a row's token ids (T), with placeholders only for images. Other placeholders become 0, because the
        model would insert an image there."""
        shown = torch.zeros(len(tokens), dtype=torch.bool)
        for begin, images in zip(offsets, sequences, strict=False):
            for span, _ in images:
                shown[begin + span.start : begin + span.end] = True
        stray = (tokens == self.placeholder) & ~shown.to(tokens.device)
        return torch.where(stray, torch.zeros_like(tokens), tokens)

    # --- examples ---

    def example(self) -> list[tuple[Any, list[ShownImage]]]:
        """Returns sequences with one, two and no images, as pairs of int64 tokens (T) and images. They fit any
        vocabulary."""
        first, second = _drawn(2, 3), _drawn(3, 2)
        sequences: list[tuple[Any, list[ShownImage]]] = []
        for images in ([first], [second, first], []):
            tokens, shown = [1, 2], []
            for image in images:
                count = self.tokens_of(image)
                shown.append((ImageSpan(len(tokens), count, image.sha256), image))
                tokens += [self.placeholder] * count + [3, 4]
            sequences.append((np.array(tokens), shown))
        return sequences

    def blank(self) -> dict[str, Any]:
        """Returns the pixel inputs for a small generated image."""
        return dict(self._pixels(_drawn(1, 1)))


def kinds_of(length: int, shown: Sequence[ShownImage]) -> NDArray[np.int32]:
    """Returns ``mm_token_type_ids``: 1 for each image token of a sequence and 0 for all others."""
    kinds = np.zeros(length, np.int32)
    for span, _ in shown:
        kinds[span.start : span.end] = 1
    return kinds


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the pixel inputs of several images for a single call. Returns an empty dict if there are no images."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def image_of(data: bytes, where: object) -> Image:
    """Returns the image in a file.

    Args:
        data: content of the file.
        where: name of the file, for error messages.

    Raises:
        BadImage: Pillow cannot read the file as an image.
    """
    from PIL import Image as Pillow  # type: ignore[import-not-found]

    try:
        with Pillow.open(io.BytesIO(data)) as opened:
            kind, (width, height) = str(opened.format).lower(), opened.size
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise BadImage(f"{where}: is not an image ({error})") from None
    return Image(hashlib.sha256(data).hexdigest(), f"image/{kind}", width, height, data)


def decoded(image: Image) -> Any:
    """Decodes an image as vLLM does: rotated upright, with transparent pixels on white, in RGB. Returns a PIL image.

    Raises:
        BadImage: the file is damaged, not an image, or has more pixels than Pillow allows.
    """
    from PIL import Image as Pillow
    from PIL import ImageOps

    kind = image.media_type.removeprefix("image/").upper()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Pillow.DecompressionBombWarning)
            opened = Pillow.open(io.BytesIO(image.data), formats=[kind])
            opened = ImageOps.exif_transpose(opened)
            if opened.mode == "RGB":  # vLLM ignores a transparent colour in this mode
                opened.load()
                return opened
            if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
                opened = opened.convert("RGBA")
                white = Pillow.new("RGB", opened.size, (255, 255, 255))
                white.paste(opened, mask=opened.getchannel("A"))
                return white
            return opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, KeyError, Pillow.DecompressionBombError, Warning) as error:
        raise BadImage(f"the image {image.sha256[:12]}… ({image.media_type}) cannot be decoded: {error}") from None


@contextmanager
def embedding(causal: Any, tokens: Any) -> Iterator[None]:
    """Makes a model embed these token ids (1, T), whatever ids it is called with."""
    hook = causal.get_input_embeddings().register_forward_pre_hook(lambda module, given: (tokens,))
    try:
        yield
    finally:
        hook.remove()


def processor_options(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the image processor's options from an engine's ``args``.

    Raises:
        ConfigError: the options are not a mapping.
    """
    by_option = {name.replace("_", "-"): value for name, value in args.items()}
    given = by_option.get("mm-processor-kwargs") or {}
    try:
        options = {**(json.loads(given) if isinstance(given, str) else given)}
        of_images = options.pop("images_kwargs", {})
        return {**of_images, **options}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"mm-processor-kwargs: {given!r}: expected a mapping ({error})") from None


def takes_images(source: Path) -> bool:
    """Returns whether a model's configuration has a vision part."""
    try:
        return isinstance(json.loads((source / "config.json").read_text()).get("vision_config"), dict)
    except (OSError, ValueError, AttributeError):
        return False


def vision_parameters(causal: Any) -> list[tuple[str, Any]]:
    """Returns the parameters of the vision tower and its projection, which precede the language model."""
    language: set[int] = set()
    for module in (causal.get_decoder(), causal.get_output_embeddings()):
        language.update(map(id, module.parameters()))
    return [(name, p) for name, p in causal.named_parameters() if id(p) not in language]


def _drawn(rows: int, columns: int) -> Image:
    """Draws a small image of coloured squares."""
    from PIL import Image as Pillow

    numbers = np.arange(rows * columns * 3, dtype=np.uint8).reshape(rows, columns, 3) * 37
    file = io.BytesIO()
    Pillow.fromarray(np.kron(numbers, np.ones((28, 28, 1), np.uint8))).save(file, "PNG")
    return image_of(file.getvalue(), "example")


def _bytes(pixels: Mapping[str, Any]) -> int:
    return sum(value.numel() * value.element_size() for value in pixels.values())
