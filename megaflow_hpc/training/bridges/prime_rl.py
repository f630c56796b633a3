"""Feeds prime-rl's trainer from a run, through the files that the trainer otherwise exchanges with prime-rl's
orchestrator.

    python -m megaflow_hpc.training.bridges.prime_rl RUN --policy default --output DIR --ranks 8 --tokens 32768

This process replaces prime-rl's orchestrator. The trainer runs unchanged, with ``output_dir`` DIR and with both
``rollout_transport.type`` and ``weight_broadcast.type`` set to ``filesystem``::

    DIR/rollouts/step_3/rank_0.bin      step 3 for data-parallel rank 0: msgpack of a list of :class:`PrimeMicroBatch`
    DIR/broadcasts/step_3/              the weights after it, complete once the file STABLE exists

Each step of the dataflow is one step of prime-rl, which is one optimizer step. prime-rl's loss uses the plan's
advantages and weights, and the engine's log-probabilities. ``loss``, ``importance`` and ``optimizer`` in the campaign
file are ignored. ``--tokens`` must not exceed prime-rl's ``model.seq_len``.

Both processes can be killed and restarted independently. A step's files depend only on its plan, byte for byte, and
they are kept. So a trainer that resumes from an earlier checkpoint finds them again. The bridge waits for a step's
weights, publishes them and commits the step before it takes the next step.

(prime-rl 0.8.1.dev67, commit 559b44772e471d1538537b8805cc77f3824a5e64: ``src/prime_rl/transports/rollouts/types.py``
and ``filesystem.py``, ``trainer/batch.py`` for padding and zeros, ``trainer/rl/train.py`` for the order of calls,
``transports/weights/filesystem.py`` and ``utils/weights.py`` for broadcasts.)
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megaflow_hpc.errors import ConfigError, MegaflowError
from megaflow_hpc.host.atomic import make_directory, write_atomic, write_json
from megaflow_hpc.host.files import read_regular, remove_tree
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.safetensors import read_directory
from megaflow_hpc.training import microbatch
from megaflow_hpc.training.dataflow import KEPT_VERSIONS, Dataflow, Step

POLL_INTERVAL_S = 0.5
"""Seconds between polls for a broadcast."""
SAY_INTERVAL_S = 30.0
"""Seconds between log lines while waiting."""
UNCHANGED_S = 60.0
"""A broadcast that has not changed for this many seconds is accepted even if a file appears newer than STABLE. The
clocks of the trainer's nodes may differ."""
PAD_TOKEN = 1
"""Padding token used by prime-rl (``pad_micro_batch``)."""
NOTE_FILE = "prime_rl.json"
"""File in ``RUN/training/<policy>/checkpoints/<step>`` that identifies the prime-rl trainer that made the step."""


class PrimeMicroBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """prime-rl's ``MicroBatch``, encoded as an array in field order. It contains S sequences with T tokens in total."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    """The engine's log-probability of each token, shape (T). 0 if not sampled."""
    position_ids: list[int]
    sequence_lengths: list[int]
    """Number of tokens in each sequence, shape (S)."""
    temperatures: list[float]
    env_names: list[str]
    """Environment of each token, shape (T), for prime-rl's metrics. Always the campaign's name."""
    seq_lens: list[int]
    """Number of tokens in each sequence, shape (S). Same as ``sequence_lengths``, but used by prime-rl's attention."""
    ref_logprobs: list[float] | None = None
    routed_experts: Any = None
    mm_kwargs: Any = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    """Loss factor of each token, shape (T). Tokens with factor 0 are not counted. ``None`` means that all factors are
    1."""
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


def grid(step: Step, tokens: int, ranks: int, name: str) -> list[list[msgspec.Raw]]:
    """Returns the encoded micro-batches of each rank. Every rank gets the same number, at least one.

    Each forward pass is a collective operation, so the numbers must be equal. Each micro-batch is encoded immediately,
    because Python lists of all tokens in a large step would take several gigabytes.

    Args:
        step: a step of a dataflow with one rank.
        tokens: maximum number of tokens in a micro-batch.
        ranks: number of prime-rl's data-parallel ranks.
        name: environment name for prime-rl's metrics.

    Raises:
        ConfigError: a sequence has more than ``tokens`` tokens, or contains an image.
    """
    encoded = [_encoded(_micro_batch(batch, name, step.temperature)) for batch in step.minibatch().microbatches(tokens)]
    encoded += [_encoded(_empty_batch(name))] * (max(-(-len(encoded) // ranks), 1) * ranks - len(encoded))
    return [encoded[rank::ranks] for rank in range(ranks)]


def _encoded(batch: PrimeMicroBatch) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(batch))


def _micro_batch(batch: microbatch.MicroBatch, name: str, temperature: float) -> PrimeMicroBatch:
    if batch.images:
        raise ConfigError("rollouts show images, which this bridge does not carry; use this package's trainer")
    total, lengths = len(batch.tokens), np.diff(batch.offsets).tolist()
    counted = batch.weights[batch.mask == 1]
    return PrimeMicroBatch(
        input_ids=batch.tokens.tolist(),
        loss_mask=batch.mask.astype(bool).tolist(),
        advantages=batch.advantages.tolist(),
        inference_logprobs=batch.logprobs.tolist(),
        position_ids=batch.positions.tolist(),
        sequence_lengths=lengths,
        temperatures=[temperature] * total,
        env_names=[name] * total,
        seq_lens=lengths,
        rl_weights=None if (counted == 1).all() else batch.weights.tolist(),
    )


def _empty_batch(name: str) -> PrimeMicroBatch:
    """Returns a batch of two masked tokens. With a single token, ``squeeze`` in prime-rl's loss would drop the
    dimension."""
    zeros = [0.0, 0.0]
    return PrimeMicroBatch([PAD_TOKEN] * 2, [False] * 2, zeros, zeros, [0, 1], [2], [1.0, 1.0], [name] * 2, [2])


def hand_over(output: Path, number: int, batches: Sequence[Sequence[msgspec.Raw]]) -> None:
    """Writes the files of a step, each by an atomic rename. Keeps files that already exist.

    Raises:
        ConfigError: a file for a different step with this number exists, or the parent directory of ``output`` is
            missing.
    """
    if not output.parent.is_dir():
        raise ConfigError(f"{output.parent}: is not a directory; create the parent directory of --output")
    folder = output / "rollouts" / f"step_{number}"
    for directory in (output, folder.parent, folder):
        make_directory(directory)
    for rank, mine in enumerate(batches):
        path, data = folder / f"rank_{rank}.bin", msgspec.msgpack.encode(mine)
        if not path.exists():
            write_atomic(path, data)
        elif read_regular(path) != data:
            raise ConfigError(
                f"{path}: holds step {number} of another run; give each run its own --output, and continue "
                "with the same --ranks and --tokens"
            )


class Broadcast:
    """The weights that prime-rl's trainer writes to disk after one step.

    The trainer writes the file STABLE last. A restarted trainer that repeats the step writes its files next to the old
    STABLE. So a broadcast is complete only if STABLE is the newest file and no file changes during the copy.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: _State | None = None
        self._since = 0.0

    def take(self, target: Path) -> bool:
        """Copies the weights to the new directory ``target``. Returns false if they are missing or incomplete."""
        state = _state(self._folder)
        if state != self._seen:
            self._seen, self._since = state, time.monotonic()
        if state is None or not (_marked_last(state) or time.monotonic() - self._since > UNCHANGED_S):
            return False
        remove_tree(target)
        make_directory(target)
        try:
            for name in state:
                if name != "STABLE":
                    shutil.copyfile(self._folder / name, target / name)
            return _state(self._folder) == state and _is_complete(target)
        except FileNotFoundError:  # the trainer removed its directory, or a later bridge removed ``target``
            return False


_State = dict[str, tuple[int, int, int]]
"""Maps file names to (inode, size, modification time in nanoseconds)."""


def _state(folder: Path) -> _State | None:
    """Returns the state of a broadcast's files, or ``None`` if the broadcast is not complete."""
    try:
        states = {}
        for entry in os.scandir(folder):
            about = entry.stat()
            states[entry.name] = (about.st_ino, about.st_size, about.st_mtime_ns)
    except FileNotFoundError:
        return None
    return states if "STABLE" in states and not any(name.startswith("tmp-rank") for name in states) else None


def _marked_last(state: _State) -> bool:
    return state["STABLE"][2] >= max(changed for _, _, changed in state.values())


def _is_complete(folder: Path) -> bool:
    """Returns whether every tensor file matches its header and every file listed in the index exists."""
    try:
        return bool(read_directory(folder))
    except ConfigError:
        return False


class PrimeBridge:
    """Sends the steps of a dataflow to prime-rl's trainer, and publishes the weights that the trainer broadcasts.

    Args:
        flow: a dataflow with one rank.
        output: ``output_dir`` of prime-rl's trainer.
        ranks: number of data-parallel ranks of prime-rl's trainer.
        tokens: maximum number of tokens in a micro-batch.
        say: receives progress lines.

    Raises:
        ConfigError: the campaign file sets several optimizer steps per step, or another trainer made earlier steps of
            this run.
    """

    def __init__(self, flow: Dataflow, output: Path, ranks: int, tokens: int, say: Callable[[str], None]) -> None:
        self._flow, self._output, self._ranks, self._tokens, self._say = flow, output, ranks, tokens, say
        self._note = {"output": str(output), "ranks": ranks, "tokens": tokens}
        loss = flow.settings.loss
        if loss.epochs != 1 or loss.minibatch is not None:
            raise ConfigError(
                f"{flow.run}: training.policies.{flow.policy}.loss: prime-rl makes one optimizer step of each step; "
                "leave out epochs and minibatch, and set batch to the size of one optimizer step"
            )
        if (last := flow.restore()) is not None:
            self._check(flow.checkpoint(last) / NOTE_FILE)
            self._remove_notes(below=last.step)  # left by a bridge that was killed after its last commit

    def _check(self, path: Path) -> None:
        try:
            owner = json.loads(read_regular(path))
        except FileNotFoundError:
            owner = "another trainer's"
        if owner != self._note:
            raise ConfigError(
                f"{self._flow.run}: its last step was made with {owner}, not {self._note}; prime-rl's trainer would "
                "lack the earlier steps: continue with the same settings, or plan a new campaign"
            )

    def run(self) -> int:
        """Serves steps until training ends. Returns the number of committed steps."""
        done = 0
        for step in self._flow.steps():
            hand_over(self._output, step.number, grid(step, self._tokens, self._ranks, self._flow.record.config.name))
            self._say(f"step {step.number}: {len(step.plan.rollouts)} rollouts handed over")
            began = time.monotonic()
            stage = self._flow.files.checkpoints / f".broadcast.{secrets.token_hex(4)}"
            for left in stage.parent.glob(".broadcast.*"):  # left by a killed bridge
                remove_tree(left, ignore_errors=True)
            try:
                if not self._wait(step.number, stage):
                    break
                version = step.publish(stage, move=True, keep=KEPT_VERSIONS)
                self._say(f"step {step.number}: published as version {version.version}")
            finally:
                remove_tree(stage, ignore_errors=True)
            self._commit(step, time.monotonic() - began)
            done += 1
        return done

    def _wait(self, number: int, stage: Path) -> bool:
        """Waits for the weights of a step and copies them. Returns false if the user cancelled the campaign first."""
        folder = self._output / "broadcasts" / f"step_{number}"
        broadcast, marks, reported_at = Broadcast(folder), Marks(self._flow.run), time.monotonic()
        while not broadcast.take(stage):
            self._flow.check()
            if marks.cancelled:
                return False
            if time.monotonic() - reported_at > SAY_INTERVAL_S:
                reported_at = time.monotonic()
                self._say(f"step {number} waits for {folder / 'STABLE'}; is prime-rl's trainer running?")
            time.sleep(POLL_INTERVAL_S)
        return True

    def _commit(self, step: Step, waited: float) -> None:
        """Commits a step with a small file as its checkpoint, because prime-rl's trainer keeps the real checkpoint in
        its own directory."""
        folder = self._flow.files.checkpoints / str(step.number)
        make_directory(folder)
        write_json(folder / NOTE_FILE, self._note)
        step.commit(folder, {"trainer_s": waited})
        self._remove_notes(below=step.number)

    def _remove_notes(self, below: int) -> None:
        """Removes the checkpoint files of earlier steps, including files that a killed bridge left."""
        for path in self._flow.files.checkpoints.iterdir():
            earlier = path.name.isdecimal() and int(path.name) < below
            if earlier and ((path / NOTE_FILE).exists() or all(NOTE_FILE in half.name for half in path.iterdir())):
                remove_tree(path, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program with command-line arguments. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megaflow_hpc.training.bridges.prime_rl",
        description="Send a campaign's rollouts to prime-rl's trainer, and its weights to the campaign's engines.",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--policy", help="policy to train; optional if only one is trained")
    parser.add_argument("--output", type=Path, required=True, help="output_dir of prime-rl's trainer")
    parser.add_argument("--ranks", type=int, default=1, help="its data-parallel ranks (default: 1)")
    parser.add_argument("--tokens", type=int, help="tokens of a micro-batch (default: the policy's microbatch)")
    options = parser.parse_args(arguments)

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    try:
        if options.ranks < 1:
            raise ConfigError(f"--ranks {options.ranks}: expected 1 or more")
        flow = Dataflow(options.run, options.policy, say=say)
        try:
            tokens = options.tokens or flow.settings.microbatch
            done = PrimeBridge(flow, options.output.absolute(), options.ranks, tokens, say).run()
        finally:
            flow.leave()
    except MegaflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    say(f"done: {done} steps")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
