"""Prints the tokens of a trajectory: id, text and log-probability, coloured by probability.

Tokens are grouped into runs with the same loss mask and weight version. Token text is looked up in the run's copy of
the model's ``tokenizer.json``, in the model's directory, or in the path given with ``--tokenizer``. Without any of
these, only ids are printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from megaflow_hpc.texts import printable

if TYPE_CHECKING:
    from rich.text import Text

    from megaflow_hpc.trajectories.reading.sources import SequenceView
    from megaflow_hpc.trajectories.reading.store import Row, TrajectoryStore
    from megaflow_hpc.trajectories.reading.vocabulary import Vocabulary

HEAD, TAIL = 96, 32
"""Number of tokens to print from the beginning and end of a longer run without ``--full``."""
WIDTH = 110
"""Approximate line width in characters."""
SCALE = ((0.5, "green"), (0.1, "yellow"), (0.01, "dark_orange"), (0.0, "red"))
"""Colours of sampled tokens, each with the minimum probability at which it applies."""


def view(store: TrajectoryStore, row: Row, full: bool, tokenizer: str | None) -> Iterator[Text]:
    """Yields the lines to print.

    Args:
        store: Store of the row. Tokenizers are looked up next to it.
        row: The trajectory.
        full: Whether long runs are printed in full.
        tokenizer: A ``tokenizer.json`` or a model's directory that replaces the one found.

    Raises:
        ConfigError: ``tokenizer`` cannot be read as a tokenizer.
    """
    from rich.text import Text

    vocabularies: dict[str, Vocabulary | None] = {}
    sequences = row.sequences
    for number, sequence in enumerate(sequences):
        if sequence.policy not in vocabularies:
            vocabularies[sequence.policy], source = _vocabulary(store, sequence.policy, tokenizer)
            yield Text(f"\npolicy {printable(sequence.policy)}: {source}", style="dim")
        yield Text(f"\nsequence {number}: {len(sequence.tokens)} tokens, policy {printable(sequence.policy)}", "bold")
        yield from _runs(sequence, vocabularies[sequence.policy], full)
    if sequences:
        scale = Text("\nid:log-probability of what was sampled, coloured by probability: ", style="dim")
        for bound, colour in SCALE:
            scale.append(f"≥ {bound:g} " if bound else "less", style=colour)
        yield scale


def _vocabulary(store: TrajectoryStore, policy: str, tokenizer: str | None) -> tuple[Vocabulary | None, str]:
    """Returns the vocabulary of a policy, if a tokenizer is known, and a note on where the tokenizer comes from."""
    from megaflow_hpc.errors import ConfigError
    from megaflow_hpc.trajectories.reading.vocabulary import find, load

    if tokenizer is not None:
        return load(Path(tokenizer)), f"ids read with {tokenizer}"
    path = find(store.path, store.versions.get("models") or {}, policy)
    if path is None:
        return None, "ids only: no tokenizer of its model is at hand; give one with --tokenizer PATH"
    try:
        return load(path), f"ids read with {path}"
    except ConfigError as error:
        return None, f"ids only: {error}"


def _runs(sequence: SequenceView, vocabulary: Vocabulary | None, full: bool) -> Iterator[Text]:
    from rich.text import Text

    columns = (sequence.loss_mask.tolist(), sequence.weight_versions.tolist())
    start = 0
    for (mask, version), run in groupby(zip(*columns, strict=True)):
        end = start + sum(1 for _ in run)
        sampled = version >= 0
        label = f"sampled, loss mask {mask}, weights {version}" if sampled else "not sampled, loss mask 0"
        style = "yellow" if sampled else "dim"
        yield Text(f"  [{start}, {end}) {label}", style="green" if mask else style)
        places = list(range(start, end))
        if full or len(places) <= HEAD + TAIL + 1:
            yield from _lines(sequence, places, sampled, vocabulary)
        else:
            yield from _lines(sequence, places[:HEAD], sampled, vocabulary)
            yield Text(f"    … {len(places) - HEAD - TAIL} tokens folded (--full)", style="dim")
            yield from _lines(sequence, places[-TAIL:], sampled, vocabulary)
        start = end


def _lines(sequence: SequenceView, places: list[int], sampled: bool, vocabulary: Vocabulary | None) -> Iterator[Text]:
    from rich.text import Text

    line = Text("   ")
    for position in places:
        token, logprob = int(sequence.tokens[position]), float(sequence.logprobs[position])
        cell = f" {token}:{logprob:.4f}" if sampled else f" {token}"
        if vocabulary is not None:
            cell += f" {_quoted(vocabulary.piece(token))} "
        if len(line) + len(cell) > WIDTH and len(line) > 3:
            yield line
            line = Text("   ")
        line.append(cell, style=_colour(logprob) if sampled else "dim")
    yield line


def _quoted(piece: str) -> str:
    """Returns a token's text in quotation marks, on one line."""
    plain = piece.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return f"‹{printable(plain)}›" if piece else "‹?›"


def _colour(logprob: float) -> str:
    probability = math.exp(min(logprob, 0.0)) if logprob == logprob else 0.0
    return next(colour for bound, colour in SCALE if probability >= bound)
