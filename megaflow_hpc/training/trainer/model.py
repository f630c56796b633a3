"""The policy in the trainer: log-probabilities and entropies of the tokens of a packed row.

A row contains several sequences without padding, and each sequence attends only to itself
(:mod:`~megaflow_hpc.training.trainer.layers`). Models that mix tokens in other ways, such as by convolutions or state
spaces, would leak one sequence into another. So :func:`load` compares a packed row with the same sequences run one by
one, and rejects the model if the results differ.

Logits are computed in chunks, for the target tokens only, and recomputed in the backward pass. So the logits of a whole
row, such as 32,768 tokens × a vocabulary of 150,000, are never in memory at the same time.

An image-text model gets the pixels of the images in a row (:mod:`~megaflow_hpc.training.trainer.vision`). Its vision
tower keeps its own attention, and only its language model uses the packed attention.

Several ranks (``torchrun``) share parameters and rows as described in :mod:`~megaflow_hpc.training.trainer.sharding`.
Gradients are summed over ranks, because losses divide by the tokens of all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]
from torch.utils.checkpoint import checkpoint  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.layout import Layout
from megaflow_hpc.training.microbatch import ShownImage
from megaflow_hpc.training.trainer import layers
from megaflow_hpc.training.trainer.layers import Packing, RouterReplay
from megaflow_hpc.training.trainer.sharding import Grid, SumOverRanks, divide_adapters, read_sharded
from megaflow_hpc.training.trainer.vision import (
    BadImage,
    NoVision,
    Vision,
    embedding,
    joined,
    kinds_of,
    takes_images,
    vision_parameters,
)

CHUNK_LOGITS = 2**26
"""Number of logits in a chunk, which take 256 MB in float32. The backward pass needs three or four times as much."""
COLLECTIVE_TIMEOUT_S = 3600.0
"""Maximum seconds that a rank waits for other ranks. torch's default of 10 minutes is too short for writing large
versions."""
END_KEY = "megaflow.end"
"""Key in torch's store that makes all ranks end. Its value is their exit status. A rank that cannot continue sets
it."""
END_POLL_S = 1.0
"""Seconds between polls for :data:`END_KEY`."""
AGREE_POLL_S = 0.02
"""Seconds between polls for a value that rank 0 broadcasts."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_PACKING_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Maximum mean difference of log-probabilities between packed and single sequences, by dtype. bfloat16 rounds logits
around 16 by 0.06, so its limit is large."""


@dataclass(frozen=True)
class ProcessGroup:
    """The ranks that train one policy, as seen from one rank."""

    rank: int = 0
    count: int = 1
    device: Any = torch.device("cpu")  # noqa: RUF009
    background: Any = None
    """torch process group of the same ranks on CPUs, for background threads. ``None`` for a single process."""
    watch: EndWatch | None = None
    """Ends this process when another rank has ended. ``None`` for a single process."""

    @property
    def first(self) -> bool:
        """True on rank 0, the only rank that writes shared files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.count > 1:
            dist.barrier()

    def broadcast(self, value: Any) -> Any:
        """Broadcasts the first rank's value to all ranks."""
        box = [value]
        if self.count > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Gathers the values of all ranks on every rank."""
        values = [value]
        if self.count > 1:
            values = [None] * self.count
            dist.all_gather_object(values, value)
        return values

    def end(self, status: int) -> NoReturn:
        """Ends the processes of all ranks immediately, even ranks that are waiting for this rank in a collective
        operation.

        Args:
            status: exit status, unless another rank has already set one.
        """
        _exit(status if self.watch is None else self.watch.tell(status))

    def leave(self) -> None:
        """Waits for all ranks and then leaves the group. If a rank exits without this call, the other ranks fail."""
        if self.count > 1:
            dist.barrier()
            if self.watch is not None:
                self.watch.leave()
            dist.destroy_process_group()


class EndWatch(threading.Thread):
    """Ends this process once another rank has ended with an error.

    This is needed because some collective operations wait forever for a missing rank.

    Args:
        store: torch's key-value store, which all ranks share.
    """

    def __init__(self, store: Any) -> None:
        super().__init__(daemon=True)
        self._store, self._left = store, threading.Event()

    def run(self) -> None:
        while not self._left.wait(END_POLL_S):
            try:
                if self._store.check([END_KEY]):
                    _exit(int(self._store.get(END_KEY)))
            except RuntimeError:  # the store's process has ended, so torchrun will end this process
                return

    def tell(self, status: int) -> int:
        """Makes all ranks end. Returns their common exit status, which the first failing rank determines."""
        try:
            return int(self._store.compare_set(END_KEY, "", str(status)))
        except RuntimeError:  # as above
            return status

    def leave(self) -> None:
        """Stops watching."""
        self._left.set()
        self.join()


def join() -> ProcessGroup:
    """Joins the ranks that torchrun started (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``). A single rank opens no port.

    ``MEGAFLOW_TRAINER_STORE`` may contain the URL at which the ranks meet, as for ``init_process_group``. torch's
    default store listens on all addresses of a node. Ranks on a single node can use a file instead.
    """
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if count > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = os.environ.get("MEGAFLOW_TRAINER_STORE")
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        dist.init_process_group(backend, store, rank=rank, world_size=count, timeout=timeout)
        watch = EndWatch(dist.distributed_c10d._get_default_store())
        watch.start()
        return ProcessGroup(rank, count, device, dist.new_group(backend="gloo", timeout=timeout), watch)
    return ProcessGroup(rank, count, device)


class Meeting:
    """The ranks that torchrun started for a user's trainer, which creates its own process group.

    They exchange values through torch's store, at the same address as in :func:`join`.

    Attributes:
        rank, count: rank of this process, and the number of ranks.
    """

    def __init__(self) -> None:
        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        url = os.environ.get("MEGAFLOW_TRAINER_STORE") or "env://"
        store, _, _ = next(dist.rendezvous(url, self.rank, self.count))
        self._store = dist.PrefixStore("megaflow", store)
        self._values = 0
        self._watch = EndWatch(self._store)
        self._watch.start()

    def broadcast(self, value: Any) -> Any:
        """Broadcasts rank 0's value to all ranks. Uses JSON, because torch's store does not authenticate its
        clients."""
        key, self._values = f"value-{self._values}", self._values + 1
        if not self.rank:
            self._store.set(key, json.dumps(value))
        while not self._store.check([key]):  # ``get`` would block the watch's use of the store
            time.sleep(AGREE_POLL_S)
        text = self._store.get(key)
        if self._store.add(f"{key}.readers", 1) == self.count:  # the last reader
            self._store.delete_key(key)
            self._store.delete_key(f"{key}.readers")
        return json.loads(text)

    def end(self, status: int) -> NoReturn:
        """Ends the processes of all ranks immediately. See :meth:`ProcessGroup.end`."""
        _exit(self._watch.tell(status))


def _exit(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


RowPart = tuple[Any, Any, Sequence[ShownImage]]
"""A sequence in a row: its token ids, the indices of its target tokens, and its images."""


def row_of(parts: Sequence[RowPart], policy: PolicyModel) -> tuple[Any, ...]:
    """Returns the inputs of :meth:`PolicyModel.forward` for a row of sequences.

    If there are no sequences, the row is a single token to ignore, because every rank must take part in each pass.

    Raises:
        BadImage: an image cannot be decoded.
        ConfigError: the model takes no images, or does not reproduce the placeholders of an image.
    """
    device = policy.ranks.device
    if not parts:
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        return nothing, nothing, [0, 1], nothing[:0]
    sequences = [(np.asarray(tokens), np.asarray(targets)) for tokens, targets, _ in parts]
    shown = [images for _, _, images in parts]
    offsets = [0, *accumulate(len(tokens) for tokens, _ in sequences)]
    columns = (
        [tokens for tokens, _ in sequences],
        [begin + targets for begin, (_, targets) in zip(offsets, sequences, strict=False)],
    )
    tokens, where = (torch.from_numpy(np.concatenate(column).astype(np.int64)).to(device) for column in columns)
    if policy.vision is None:
        if any(shown):
            raise policy.text_only or NoVision(
                f"{policy.source}: takes text only, but rollouts show it images; train the image-text model that the "
                "engine serves (training.policies.*.base)"
            )
        positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(offsets)]).to(device)
        return tokens, positions, offsets, where
    places, of_images = [], list[dict[str, Any]]()
    for number, ((each, _), images) in enumerate(zip(sequences, shown, strict=True)):
        try:
            of_images += policy.vision.inputs(images)
            places.append(policy.vision.positions(each, images))
        except BadImage as error:
            error.sequence = number
            raise
    pixels = {name: value.to(device) for name, value in joined(of_images).items()}
    if pixels:
        pixels["input_ids"] = policy.vision.marked(tokens, shown, offsets)
    return tokens, torch.cat(places, 1).to(device), offsets, where, None, pixels


class PolicyModel(torch.nn.Module):
    """A causal language model that processes packed rows. Created by :func:`load`.

    Attributes:
        causal: the transformers model, with LoRA layers if configured.
        adapter: the peft model that wraps ``causal``, or ``None``.
        stored: dtype of the weights in the model directory and in published versions.
        temperature: sampling temperature, by which logits are divided.
        ranks: all ranks.
        context: process group of the ranks that share each row, or ``None``.
        router: replays the experts that the engine chose.
        vision: computes the pixel inputs of an image-text model. ``None`` if the model takes text only.
        text_only: error that states why a model with a vision part takes text only, or ``None``.
    """

    def __init__(self, causal: Any, source: Path, ranks: ProcessGroup | None = None) -> None:
        super().__init__()
        self.ranks = ranks or ProcessGroup()
        self.causal = causal
        self.source = source
        self.words = int(causal.get_input_embeddings().weight.shape[0])
        self.stored = causal.dtype
        self.temperature = 1.0
        self.context: Any = None
        self.router = RouterReplay(causal)
        self.vision: Vision | None = None
        self.text_only: NoVision | None = None
        # The tuple hides the adapter from torch, which would otherwise register the parameters of ``causal`` twice.
        self._adapter: tuple[Any, ...] = ()

    @property
    def adapter(self) -> Any:
        return self._adapter[0] if self._adapter else None

    @property
    def routing(self) -> tuple[int, int, int] | None:
        """Numbers of layers, of experts per token, and of experts. ``None`` if the model is not a mixture of
        experts."""
        return self.router.shape

    def forward(
        self,
        tokens: Any,
        positions: Any,
        offsets: Sequence[int],
        where: Any,
        experts: Any = None,
        pixels: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Any]:
        """Returns log-probabilities and entropies, each float32 (T). They are 0 except for the target tokens.

        Args:
            tokens: int64 (T), the concatenated sequences.
            positions: int64 (T) or (1, T), starting at 0 in each sequence. (3, T) if positions have three dimensions.
            offsets: (S + 1), start of each sequence.
            where: int64 (N), indices of the target tokens. The first token of a sequence cannot be a target.
            experts: int16 (T, layers, experts per token), experts that the routers must use. -1 lets the router choose.
            pixels: the model's inputs for the row's images, and ``input_ids`` (T), in which placeholders mark the
                images.
        """
        lengths = [end - begin for begin, end in pairwise(offsets)]
        total, begin, mine = len(tokens), 0, where
        if self.context is not None:  # use this rank's part of the row, which is padded
            size = -(-total // dist.get_world_size(self.context))
            begin = size * dist.get_rank(self.context)
            missing = size * dist.get_world_size(self.context) - total
            lengths += [missing] if missing else []
            filler = torch.arange(missing, device=tokens.device)
            inputs, positions = torch.cat([tokens, filler * 0]), torch.cat([positions, filler])
            inputs, positions = (row[begin : begin + size] for row in (inputs, positions))
            if experts is not None:
                experts = torch.nn.functional.pad(experts, (0, 0, 0, 0, 0, missing), value=-1)[begin : begin + size]
            mine = where[(where > begin) & (where <= begin + size)]
        else:
            inputs = tokens
        packing = Packing.of(lengths, tokens.device, self.context)
        self.router.replay(experts)
        inner = self.causal.base_model
        given = dict(pixels or {})
        ids = given.pop("input_ids", inputs)[None]
        positions = positions[:, None] if positions.ndim == 2 and len(positions) > 1 else positions.reshape(1, -1)
        with embedding(self.causal, inputs[None]) if given else nullcontext():
            out = inner(input_ids=ids, position_ids=positions, use_cache=False, packing=packing, **given)
        hidden = out.last_hidden_state[0]
        picked, wanted = hidden[mine - 1 - begin], tokens[mine]
        size = max(1, CHUNK_LOGITS // self.words)
        parts = [
            checkpoint(self._score, h, w, use_reentrant=False, preserve_rng_state=False)
            for h, w in zip(picked.split(size), wanted.split(size), strict=True)
        ]
        # A rank with only masked tokens must still take part in the backward pass.
        nothing = hidden.sum(dtype=torch.float32) * 0.0
        if self.vision is not None and not given and self.ranks.count > 1:  # FSDP's collectives need all ranks
            blank = {name: value.to(tokens.device) for name, value in self.vision.blank().items()}
            features = inner.get_image_features(**blank, return_dict=True).pooler_output
            nothing = nothing + sum(part.sum(dtype=torch.float32) for part in features) * 0.0
        logprobs, entropies = (
            (torch.zeros(total, device=tokens.device) + nothing).index_copy(0, mine, torch.cat(column))
            for column in zip(*parts, strict=True)
        )
        if self.context is not None:
            logprobs, entropies = (SumOverRanks.apply(column, self.context) for column in (logprobs, entropies))
        return logprobs, entropies

    def _score(self, hidden: Any, tokens: Any) -> tuple[Any, Any]:
        """Returns the log-probabilities of ``tokens`` (n) given ``hidden`` (n, H), and the entropies of their
        distributions."""
        logits = self.causal.get_output_embeddings()(hidden).float()
        config = self.causal.config.get_text_config()
        logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        if cap:
            logits = cap * torch.tanh(logits / cap)
        every = torch.log_softmax(logits / self.temperature, -1)
        return every.gather(-1, tokens[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def trained(self) -> Iterator[tuple[str, Any]]:
        """Yields the name and value of each trained parameter, in a fixed order."""
        return ((name, p) for name, p in self.named_parameters() if p.requires_grad)

    def shares(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this rank's shares of unsharded tensors, without copying. ``tensors`` are named and sharded like the
        parameters."""
        return dict(tensors)

    def logprobs_alone(self, tokens: Any, **given: Any) -> Any:
        """Returns the log-probabilities (T - 1) of a sequence's tokens (T) except the first. Uses the model's own
        forward method and head."""
        logits = self.causal(input_ids=tokens[None], use_cache=False, **given).logits[0].float()
        return torch.log_softmax(logits[:-1], -1).gather(-1, tokens[1:, None])[:, 0]


Reader = Callable[[Path, str, ProcessGroup, Layout], PolicyModel]
"""Function that loads this rank's share of a model, given the directory, dtype, ranks and layout."""


def load(
    path: str | os.PathLike[str],
    dtype: str = "bfloat16",
    ranks: ProcessGroup | None = None,
    *,
    lora: int | None = None,
    recompute: bool = False,
    parallel: Mapping[str, int] | None = None,
    frozen_vision: bool = False,
    read: Reader | None = None,
) -> PolicyModel:
    """Loads a causal language model or an image-text model from a Hugging Face directory onto the ranks' devices.
    Never uses the network.

    Each rank reads only its own share of the parameters. All ranks must call it.

    Args:
        path: the directory.
        dtype: ``float32`` or ``bfloat16`` for computing. The optimizer keeps trained parameters in float32.
        ranks: all ranks; by default, a single rank on the CPU.
        lora: rank of adapters to train instead of all parameters. Needs peft.
        recompute: recompute layers in the backward pass instead of storing their activations.
        parallel: ``replicas``, ``context``, ``tensor`` and ``expert``, as in the campaign file.
        frozen_vision: do not train the vision part of an image-text model.
        read: creates and shards the model. By default, transformers creates the model and this package shards it.

    Raises:
        ConfigError: the directory is not a model, peft is missing, the model cannot be divided according to
            ``parallel``, or its sequences cannot be packed.
    """
    from transformers.utils.logging import disable_progress_bar  # type: ignore[import-not-found]

    disable_progress_bar()
    source, ranks = Path(path), ranks or ProcessGroup()
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"{source}: has no config.json; give the directory of a Hugging Face model on this file system"
        )
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    layout = Layout(ranks.count, **(parallel or {}))
    policy = (read or _read)(source, dtype, ranks, layout)
    causal = policy.causal
    _check_positions(source, causal)
    causal.requires_grad_(lora is None)  # before the first pass, in which FSDP decides which gradients it reduces
    if frozen_vision:
        _freeze_vision(policy)
    for module in causal.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # the engine samples without dropout
    about = json.loads((source / "config.json").read_text())
    stored = about.get("dtype") or about.get("torch_dtype")
    policy.stored = getattr(torch, str(stored)) if stored in DTYPES or stored == "float16" else DTYPES[dtype]
    policy.to(ranks.device)
    policy.router.attach(causal)
    alone = _alone(policy)
    layers.register()
    if policy.vision is None:
        causal.set_attn_implementation(layers.ATTENTION_NAME)
    else:  # the patches of an image attend to each other in both directions
        causal.set_attn_implementation({"": layers.ATTENTION_NAME, "text_config": layers.ATTENTION_NAME})
    _check_packing(policy, alone, DTYPES[dtype])
    if lora is not None:
        policy._adapter = (_with_lora(causal, lora),)
        divide_adapters(causal)
        policy.to(ranks.device)
        for _, parameter in policy.trained():
            if ranks.count > 1:
                dist.broadcast(parameter.data, 0)
    if recompute:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
        if lora is not None:
            causal.enable_input_require_grads()
    return policy.train()


def _read(source: Path, dtype: str, ranks: ProcessGroup, layout: Layout) -> PolicyModel:
    """Reads this rank's share of the model."""
    from transformers import (  # type: ignore[import-not-found]
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    vision, text_only = _vision(source, MODEL_FOR_CAUSAL_LM_MAPPING)
    if vision is not None and layout.copies > 1:
        raise ConfigError(
            f"{source}: parallel.context and parallel.tensor cannot divide an image-text model; leave them out (FSDP "
            "divides its parameters)"
        )
    kind, kinds = AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING
    if vision is not None:
        kind, kinds = AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    options = {"dtype": DTYPES[dtype], "local_files_only": True}
    divided: list[PolicyModel] = []
    grid = Grid(layout, ranks.device.type) if ranks.count > 1 else None

    def shard(causal: Any) -> None:
        assert grid is not None
        policy = PolicyModel(causal, source, ranks)
        policy.context = grid.context
        grid.shard(policy, causal)
        divided.append(policy)

    try:
        # Set trust_remote_code, because transformers would otherwise ask on the terminal whether to run the model's
        # code.
        if grid is None:
            causal = kind.from_pretrained(source, trust_remote_code=False, **options)
        else:
            causal = read_sharded(source, kinds, shard, **options)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{source}: its config.json names its own Python code (auto_map), which is not run; train a model "
                "that transformers has a class for"
            ) from None
        raise ConfigError(f"{source}: cannot be loaded as a causal language model: {error}") from None
    _copy(causal)
    policy = divided[0] if divided else PolicyModel(causal, source, ranks)
    policy.vision, policy.text_only = vision, text_only
    if vision is not None:
        vision.attach(causal)
    return policy


def _vision(source: Path, text_kinds: Any) -> tuple[Vision | None, NoVision | None]:
    """Returns the :class:`Vision` of a model with a vision part, or the reason why the model takes text only.

    Args:
        text_kinds: transformers' mapping of configurations that can be loaded without a vision part.

    Raises:
        NoVision: the model can be loaded neither with images nor without.
    """
    from transformers import AutoConfig

    if not takes_images(source):
        return None, None
    try:
        return Vision.read(source), None
    except NoVision as reason:
        try:
            config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError):
            raise reason from None
        if type(config) not in text_kinds:
            raise
        return None, reason


def _freeze_vision(policy: PolicyModel) -> None:
    if policy.vision is None:
        raise ConfigError(f"{policy.source}: vision: frozen: this model has no vision part; leave the key out")
    for _, parameter in vision_parameters(policy.causal):
        parameter.requires_grad_(False)


@torch.no_grad()
def _copy(causal: Any) -> None:
    """Copies parameters into memory that are mapped from the model's files, because another process may replace a
    file."""
    copies: dict[int, Any] = {}
    for module in causal.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in copies:
                copies[id(parameter)] = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            setattr(module, name, copies[id(parameter)])


def _row(policy: PolicyModel) -> list[RowPart]:
    """Returns a row of short sequences that fit the model's vocabulary. All tokens except the first of each sequence
    are targets."""
    tokens = np.arange(1, 15) * 7 % policy.words
    parts: list[RowPart] = [(part, np.arange(1, len(part)), ()) for part in np.split(tokens, [5, 6])]
    if policy.vision is not None:
        parts += [(tokens, np.arange(1, len(tokens)), shown) for tokens, shown in policy.vision.example()]
    return parts


@torch.no_grad()
def _alone(policy: PolicyModel) -> Any:
    """Returns the log-probabilities of the tokens in :func:`_row`, with each sequence run separately.

    Uses the model's own forward method and head. With several ranks, only one layer is gathered at a time, never the
    whole model.
    """
    policy.eval()
    logprobs = []
    for part in _row(policy):
        tokens, _, _, _, *more = row_of([part], policy)
        given = dict(more[1]) if more else {}
        if given:
            del given["input_ids"]
            given["mm_token_type_ids"] = torch.from_numpy(kinds_of(len(tokens), part[2])).to(tokens.device)[None]
        logprobs.append(policy.logprobs_alone(tokens, **given))
    return torch.cat(logprobs)


def _check_positions(source: Path, causal: Any) -> None:
    """Rejects models in which a token's result depends on the longest sequence of its row, or on the borders of chunks.

    The sequences in :func:`_check_packing` are too short to detect this.
    """
    config = causal.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, Mapping)]
    for kind in (*kinds, *(getattr(config, "layer_types", None) or ())):
        if kind in ("dynamic", "longrope", "chunked_attention"):
            raise ConfigError(
                f"{source}: {type(causal).__name__} computes a token differently in long rows ({kind}), so sequences "
                "cannot be packed; train another model"
            )


@torch.no_grad()
def _check_packing(policy: PolicyModel, alone: Any, dtype: Any) -> None:
    row = row_of(_row(policy), policy)
    where = row[3]
    kind = type(policy.causal).__name__
    try:
        packed = policy(*row)[0][where]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{policy.source}: {kind} cannot be trained on packed sequences: {error}") from error
    if not (off := float((packed - alone).abs().mean())) <= MAX_PACKING_ERROR[dtype]:
        raise ConfigError(
            f"{policy.source}: {kind} gives different log-probabilities for packed and for single sequences (mean "
            f"difference {off:.2g}): its layers mix tokens in ways that this trainer does not support, or its head "
            "scales logits; train a model with softmax attention, or use another trainer"
        )


def _with_lora(causal: Any, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(f"lora: needs peft in the trainer's environment (pip install peft): {error}") from None
    # Engines load adapters of the language model only.
    vision = {name.rpartition(".")[0] for name, _ in vision_parameters(causal)}
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        exclude_modules=sorted(vision) or None,
        # Fused experts are three-dimensional parameters, not linear modules.
        target_parameters=sorted(name for name, p in causal.named_parameters() if p.ndim == 3),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with _whole_shapes(causal):
        # Keep the model's dtype. The optimizer holds float32 copies.
        return get_peft_model(causal, config, autocast_adapter_dtype=False)


@contextmanager
def _whole_shapes(causal: Any) -> Iterator[None]:
    """Temporarily replaces sharded parameters with placeholders of the unsharded shapes, because peft derives the
    shapes of adapters from them."""
    divided = [
        (module, name, parameter)
        for module in causal.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if hasattr(parameter, "to_local")
    ]
    for module, name, parameter in divided:
        shape = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        module._parameters[name] = torch.nn.Parameter(shape, requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in divided:
            module._parameters[name] = parameter
