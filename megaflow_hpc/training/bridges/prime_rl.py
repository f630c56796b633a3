"""prime-rl: its trainer learns from a run, by the files that it exchanges with its own orchestrator.

    python -m megaflow_hpc.training.bridges.prime_rl RUN --policy default --output DIR --ranks 8 --tokens 32768

stands where prime-rl's orchestrator does. Its trainer runs beside it, unchanged, with ``output_dir`` DIR and both
``rollout_transport.type`` and ``weight_broadcast.type`` ``filesystem``::

    DIR/rollouts/step_3/rank_0.bin      step 3 for data-parallel rank 0: msgpack of a list of :class:`PrimeMicroBatch`
    DIR/broadcasts/step_3/              the weights after it, whole once the file STABLE is there

A step of the dataflow is a step of theirs, which is one optimizer step. Their loss takes the plan's advantages and
weights, and the engine's log-probabilities; ``loss``, ``importance`` and ``optimizer`` of the campaign file are not
theirs, and ``--tokens`` is at most their ``model.seq_len``.

Whoever dies comes back alone. A step's files are made of its plan, byte for byte the same, and stay; a trainer that
resumes from an earlier checkpoint of its own finds them again. The bridge takes what is broadcast for the step that it
waits for, publishes it, and commits; then it asks for the next.

(prime-rl 0.8.1.dev67, commit 559b44772e471d1538537b8805cc77f3824a5e64: ``src/prime_rl/transports/rollouts/types.py``
and ``filesystem.py``, ``trainer/batch.py`` for padding and what is 0, ``trainer/rl/train.py`` for the order of things,
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
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.step import KEPT_VERSIONS, Step

POLL_S = 0.5
"""Seconds between two looks for a broadcast."""
SAID_S = 30.0
"""Seconds between two lines about what is waited for."""
SETTLED_S = 60.0
"""Seconds without a change after which a broadcast counts as whole though a file of it seems younger than its mark: the
clocks of a trainer's nodes may differ."""
PADDING = 1
"""The token that prime-rl pads with (``pad_micro_batch``)."""
NOTE = "prime_rl.json"
"""File in ``RUN/training/<policy>/checkpoints/<step>``: whose step it was."""


class PrimeMicroBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """prime-rl's ``MicroBatch``: its fields are identified by their order. T tokens, S concatenated sequences."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    """(T), the engine's of the token at the same place; 0 where nothing was sampled."""
    position_ids: list[int]
    sequence_lengths: list[int]
    """(S)"""
    temperatures: list[float]
    env_names: list[str]
    """(T), under which it shows metrics; ours is the campaign."""
    seq_lens: list[int]
    """(S), the same again, for attention."""
    ref_logprobs: list[float] | None = None
    routed_experts: Any = None
    mm_kwargs: Any = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    """(T), factors of the loss; a token of 0 is not counted. ``None``: all are 1."""
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


def grid(step: Step, tokens: int, ranks: int, name: str) -> list[list[msgspec.Raw]]:
    """Returns the micro-batches of each rank, equally many and at least one: each pass is a collective operation.

    Each one is encoded as it is made: Python's lists of all tokens of a large step would take several gigabytes.

    Args:
        step: of a dataflow with one rank.
        tokens: most of them in a micro-batch.
        ranks: prime-rl's data-parallel ranks.
        name: of the environment.

    Raises:
        ConfigError: a sequence has more tokens.
    """
    found = [_encoded(_micro_batch(batch, name, step.temperature)) for batch in step.minibatch().microbatches(tokens)]
    found += [_encoded(_nothing(name))] * (max(-(-len(found) // ranks), 1) * ranks - len(found))
    return [found[rank::ranks] for rank in range(ranks)]


def _encoded(batch: PrimeMicroBatch) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(batch))


def _micro_batch(batch: microbatch.MicroBatch, name: str, temperature: float) -> PrimeMicroBatch:
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


def _nothing(name: str) -> PrimeMicroBatch:
    """Two tokens that do not count: of one, ``squeeze`` in their loss would leave no dimension to split."""
    zeros = [0.0, 0.0]
    return PrimeMicroBatch([PADDING] * 2, [False] * 2, zeros, zeros, [0, 1], [2], [1.0, 1.0], [name] * 2, [2])


def hand_over(output: Path, number: int, batches: Sequence[Sequence[msgspec.Raw]]) -> None:
    """Writes the files of a step, each of which appears whole; those that are there stay.

    Raises:
        ConfigError: another step of this number is there, or no directory in which ``output`` could be.
    """
    if not output.parent.is_dir():
        raise ConfigError(f"{output.parent}: is no directory; --output is made in one that is there")
    folder = output / "rollouts" / f"step_{number}"
    for directory in (output, folder.parent, folder):
        make_directory(directory)
    for rank, mine in enumerate(batches):
        path, data = folder / f"rank_{rank}.bin", msgspec.msgpack.encode(mine)
        if not path.exists():
            write_atomic(path, data)
        elif read_regular(path) != data:
            raise ConfigError(
                f"{path}: holds another step {number} than this run's; give each run an --output of its own, and go on "
                "with the same --ranks and --tokens"
            )


class Broadcast:
    """The weights of one step, as they come.

    Their trainer writes STABLE last. One that comes back and does the step again writes over files beside an old mark:
    so the mark must also be the youngest file, and nothing may change while it is copied.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: _State | None = None
        self._since = 0.0

    def take(self, target: Path) -> bool:
        """Copies the weights to the new directory ``target``; returns whether they are there and whole."""
        state = _state(self._folder)
        if state != self._seen:
            self._seen, self._since = state, time.monotonic()
        if state is None or not (_marked_last(state) or time.monotonic() - self._since > SETTLED_S):
            return False
        remove_tree(target)
        make_directory(target)
        try:
            for name in state:
                if name != "STABLE":
                    shutil.copyfile(self._folder / name, target / name)
            return _state(self._folder) == state and _whole(target)
        except FileNotFoundError:  # theirs is being removed, or a later bridge has removed ours
            return False


_State = dict[str, tuple[int, int, int]]
"""File name → inode, size, time of its last change."""


def _state(folder: Path) -> _State | None:
    """Returns what is there, ``None`` unless it is marked as done."""
    try:
        found = {}
        for entry in os.scandir(folder):
            about = entry.stat()
            found[entry.name] = (about.st_ino, about.st_size, about.st_mtime_ns)
    except FileNotFoundError:
        return None
    return found if "STABLE" in found and not any(name.startswith("tmp-rank") for name in found) else None


def _marked_last(state: _State) -> bool:
    return state["STABLE"][2] >= max(changed for _, _, changed in state.values())


def _whole(folder: Path) -> bool:
    """Whether every tensor file is as its header says, and those of the index are there."""
    try:
        return bool(read_directory(folder))
    except ConfigError:
        return False


class PrimeBridge:
    """Brings the steps of a dataflow to prime-rl's trainer, and its weights back.

    Args:
        flow: of one rank.
        output: the ``output_dir`` of their trainer.
        ranks: their data-parallel ranks.
        tokens: most of them in a micro-batch.
        say: gets a line about what happens.

    Raises:
        ConfigError: the campaign file asks for several optimizer steps in a step, or earlier steps of the run were
            another trainer's.
    """

    def __init__(self, flow: Dataflow, output: Path, ranks: int, tokens: int, say: Callable[[str], None]) -> None:
        self._flow, self._output, self._ranks, self._tokens, self._say = flow, output, ranks, tokens, say
        self._note = {"output": str(output), "ranks": ranks, "tokens": tokens}
        loss = flow.settings.loss
        if loss.epochs != 1 or loss.minibatch is not None:
            raise ConfigError(
                f"{flow.run}: training.policies.{flow.policy}.loss: prime-rl makes one optimizer step of each step; "
                "leave out epochs and minibatch, and set batch.tasks to what one optimizer step shall see"
            )
        if (last := flow.restore()) is not None:
            self._check(flow.checkpoint(last) / NOTE)
            self._forget(below=last.step)  # a bridge that died after the last step had no time to

    def _check(self, path: Path) -> None:
        try:
            found = json.loads(read_regular(path))
        except FileNotFoundError:
            found = "another trainer's"
        if found != self._note:
            raise ConfigError(
                f"{self._flow.run}: its last step was made with {found}, not {self._note}; prime-rl's trainer would "
                "lack what came before: go on as it was begun, or plan a new campaign"
            )

    def run(self) -> int:
        """Serves steps until the training ends; returns how many it committed."""
        done = 0
        for step in self._flow.steps():
            hand_over(self._output, step.number, grid(step, self._tokens, self._ranks, self._flow.record.config.name))
            self._say(f"step {step.number}: {len(step.plan.rollouts)} rollouts handed over")
            began = time.monotonic()
            stage = self._flow.files.checkpoints / f".broadcast.{secrets.token_hex(4)}"
            for left in stage.parent.glob(".broadcast.*"):  # by a bridge that died
                remove_tree(left, ignore_errors=True)
            try:
                if not self._wait(step.number, stage):
                    break
                self._publish(step, stage)
            finally:
                remove_tree(stage, ignore_errors=True)
            self._commit(step, time.monotonic() - began)
            done += 1
        return done

    def _wait(self, number: int, stage: Path) -> bool:
        """Waits for the weights after a step, and copies them; returns whether they came before a cancel."""
        folder = self._output / "broadcasts" / f"step_{number}"
        broadcast, marks, said = Broadcast(folder), Marks(self._flow.run), time.monotonic()
        while not broadcast.take(stage):
            self._flow.check()
            if marks.cancelled:
                return False
            if time.monotonic() - said > SAID_S:
                said = time.monotonic()
                self._say(f"step {number} waits for {folder / 'STABLE'}; is prime-rl's trainer running?")
            time.sleep(POLL_S)
        return True

    def _publish(self, step: Step, stage: Path) -> None:
        version = step.publish(stage, move=True, keep=KEPT_VERSIONS)
        self._say(f"step {step.number}: published as version {version.version}")

    def _commit(self, step: Step, waited: float) -> None:
        """A checkpoint of ours is the note that the step is done; the trainer's own are among its files."""
        folder = self._flow.files.checkpoints / str(step.number)
        make_directory(folder)
        write_json(folder / NOTE, self._note)
        step.commit(folder, {"trainer_s": waited})
        self._forget(below=step.number)

    def _forget(self, below: int) -> None:
        """Removes the notes of earlier steps, those among them that a bridge was about to remove when it died."""
        for path in self._flow.files.checkpoints.iterdir():
            earlier = path.name.isdecimal() and int(path.name) < below
            if earlier and ((path / NOTE).exists() or all(NOTE in half.name for half in path.iterdir())):
                remove_tree(path, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megaflow_hpc.training.bridges.prime_rl",
        description="Bring a campaign's rollouts to prime-rl's trainer, and its weights to the campaign's engines.",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--policy", help="which policy is trained; may be left out where there is one")
    parser.add_argument("--output", type=Path, required=True, help="output_dir of prime-rl's trainer")
    parser.add_argument("--ranks", type=int, default=1, help="its data-parallel ranks (default: 1)")
    parser.add_argument("--tokens", type=int, help="tokens of a micro-batch (default: the policy's microbatch)")
    given = parser.parse_args(arguments)

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    try:
        if given.ranks < 1:
            raise ConfigError(f"--ranks {given.ranks}: expected 1 or more")
        flow = Dataflow(given.run, given.policy, say=say)
        try:
            tokens = given.tokens or flow.settings.microbatch
            done = PrimeBridge(flow, given.output.absolute(), given.ranks, tokens, say).run()
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
