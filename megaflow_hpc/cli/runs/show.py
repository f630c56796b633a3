"""``show``: prints a trajectory as text, its tokens on request, or one of its artifacts."""

from __future__ import annotations

import argparse
import base64
import difflib
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import ROLE_COLOURS, note, print_json, print_result, say, used
from megaflow_hpc.cli.verb import Subparsers, add_output, add_run, add_verb, output_file
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.texts import content_of, printable
from megaflow_hpc.trajectories.reading.conversations import heading, main, tokens_of_calls

if TYPE_CHECKING:
    from rich.text import Text

    from megaflow_hpc.trajectories.reading.sources import SequenceView
    from megaflow_hpc.trajectories.reading.store import Row, TrajectoryStore
    from megaflow_hpc.trajectories.reading.vocabulary import Vocabulary
    from megaflow_hpc.trajectory import Image

HEAD_LINES, TAIL_LINES = 20, 10
"""Lines to print from the beginning and end of a long message without ``--full``."""
LINE_CHARACTERS = 2000
"""Maximum number of characters per line without ``--full``, because a whole prompt on one line is unreadable."""

CANDIDATES = 2000
"""Maximum number of ids to search for suggestions when an id is unknown."""

VERIFIER_LOG = "verifier.log"
VERIFIER_LINES = 20
"""Lines to print from the end of the verifier log without ``--full``."""
HEAD_TOKENS, TAIL_TOKENS = 96, 32
"""Tokens to print from the beginning and end of a long run of tokens without ``--full``."""
WIDTH = 110
"""Approximate width of a line of tokens in characters."""
SCALE = ((0.5, "green"), (0.1, "yellow"), (0.01, "dark_orange"), (0.0, "red"))
"""(Minimum probability, colour) of sampled tokens."""

_STATUS = {"completed": "green", "truncated": "yellow", "failed": "red", "cancelled": "red"}


def register(subparsers: Subparsers) -> None:
    """Registers the verb ``show``."""
    show = add_verb(
        subparsers,
        "show",
        _show,
        "print one trajectory",
        examples=[
            "show RUN fix-humanize/default/0",
            "show RUN 0 --tokens | less",
            "show RUN 0 --artifact patch -o fix.patch",
            "show RUN/trajectories.h5 fix-humanize/default/0 --json",
        ],
        description="Prints one rollout of a campaign: its outcome, conversation, model calls and attempts. Works "
        "while the campaign runs.",
    )
    add_run(show, file=True)
    show.add_argument("id", metavar="ID", help="rollout id (<task>/<policy>/<sample>), or its row number")
    show.add_argument("--tokens", action="store_true", help="also print every token: id, text, log-probability, mask")
    show.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer for the ids: a tokenizer.json, or a model's directory"
    )
    show.add_argument("--artifact", metavar="NAME", help="print this artifact and nothing else")
    add_output(show, "with --artifact: write it to this file")
    show.add_argument("--images", metavar="DIR", help="write the rollout's images to this directory, and name them")
    show.add_argument("--full", action="store_true", help="print everything")


def _show(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.trajectories import open_trajectories

    if arguments.output is not None and arguments.artifact is None:
        raise ConfigError("--output: only with --artifact NAME")
    if arguments.images is not None and arguments.artifact is not None:
        raise ConfigError("--images: not with --artifact NAME; give one of them")
    with open_trajectories(arguments.run_dir) as store:
        row = find(store, arguments.id)
        if arguments.artifact is not None:
            hand_out(row, arguments.artifact, arguments.output, arguments.json)
        elif arguments.images is not None:
            hand_out_images(row, Path(arguments.images), arguments.json)
        elif arguments.json:
            print_json(as_json(row, arguments.tokens))
        else:
            shown = list(token_lines(store, row, arguments.full, arguments.tokenizer)) if arguments.tokens else []
            print_lines([*_lines(row, arguments.full), *shown])
    return 0


def find(store: TrajectoryStore, wanted: str) -> Row:
    """Returns the trajectory with this rollout id or row number.

    Raises:
        ConfigError: There is no such row. The message suggests similar ids.
    """
    if wanted in store:
        return store[wanted]
    if wanted.isdigit() and int(wanted) < len(store):
        return store[int(wanted)]
    # Prefer ids of the same task: comparing a million ids would take minutes.
    task = wanted.partition("/")[0]
    alike = [rollout for rollout in store.ids if rollout.startswith(task)] if len(store) > CANDIDATES else store.ids
    candidates = (alike or store.ids)[:CANDIDATES]
    near = difflib.get_close_matches(wanted, candidates, 3, 0.4) or candidates[:3]
    hint = f"; there are: {', '.join(near)}" if near else ""
    raise ConfigError(f"{store.path}: no trajectory {wanted!r} among {len(store)}{hint}")


# --- JSON ------------------------------------------------------------------------------------------------------------


def as_json(row: Row, with_tokens: bool) -> dict[str, Any]:
    """Returns a trajectory as plain JSON: null for NaN, name and size of artifacts, and token columns on request."""
    trajectory = row.trajectory()
    other = ("sequences", "artifacts", "messages", "parents", "images")
    record = {name: value for name, value in vars(trajectory).items() if name not in other}
    record |= row.conversation_record()
    for name in ("turns", "attempts"):
        record[name] = [vars(item) for item in record[name]]
    record["artifacts"] = [{"name": artifact.name, "bytes": len(artifact.data)} for artifact in trajectory.artifacts]
    record["images"] = [_image_json(image) for image in trajectory.images.values()]
    record["sequences"] = []
    for sequence in trajectory.sequences:
        entry: dict[str, Any] = {"policy": sequence.policy, "length": len(sequence.tokens)}
        entry["images"] = [list(span) for span in sequence.images]
        if with_tokens:
            entry["tokens"] = sequence.tokens.tolist()
            entry["logprobs"] = [finite(value) for value in sequence.logprobs]
            entry["loss_mask"] = sequence.loss_mask.tolist()
            entry["weight_version"] = sequence.weight_versions.tolist()
        record["sequences"].append(entry)
    return record


def _image_json(image: Image) -> dict[str, Any]:
    size = {"width": image.width, "height": image.height, "bytes": len(image.data)}
    return {"sha256": image.sha256, "media_type": image.media_type, **size}


def finite(value: Any) -> Any:
    """Replaces NaN and infinity with ``None``, because JSON does not support them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- text ------------------------------------------------------------------------------------------------------------


def print_lines(lines: Iterable[tuple[str, str] | Text]) -> None:
    """Prints lines, given as strings or (text, style) pairs. Uses colours only on a terminal."""
    from rich.console import Console
    from rich.text import Text

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # terminals without UTF-8 must not cause an error
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text(printable(line[0]), style=line[1]) if isinstance(line, tuple) else line)


def _lines(row: Row, full: bool) -> Iterator[tuple[str, str]]:
    counts = tokens_of_calls(row)
    yield from _head(row, counts)
    conversations, turns, labels = row.conversations, row.turns, row.image_labels
    for number, conversation in enumerate(conversations):
        if len(conversations) > 1 or len(conversation.speakers) > 1:
            yield f"\n{heading(number, conversation)}", "bold reverse"
        for index in range(conversation.shared, len(conversation.messages)):
            message, call = conversation.messages[index], conversation.turns[index]
            role = str(message.get("role", "?"))
            speaker = "" if call is None or not turns[call].role else f", {turns[call].role}"
            by = "" if call is None else f"  (call {call}{speaker})"
            yield f"\n[{index}] {role}{by}", f"bold {ROLE_COLOURS.get(role, 'cyan')}"
            yield from ((line, "") for line in _fold(content_of(message, labels), full))
    yield from _calls(row, counts)
    verifier = [*verifier_lines(row, full)]
    if verifier:
        yield f"\n{VERIFIER_LOG}", "bold"
        yield from ((f"  {line}", "") for line in verifier)


def _head(row: Row, counts: Sequence[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    yield row.id, "bold"
    reward = "not verified" if math.isnan(row.reward) else f"{row.reward:g}"
    yield f"  status    {row.status}", _STATUS.get(row.status, "")
    rewards = ", ".join(f"{name} {value:g}" for name, value in row.rewards.items())
    yield f"  reward    {reward}" + (f"  ({rewards})" if rewards else ""), ""
    if row.error_kind or row.error:
        yield f"  error     {row.error_kind}: {row.error}", "red"
    yield f"  agent     {row.agent}, policy {row.policy}", ""
    yield f"  where     node {row.node or '-'}, job {row.job_id or '-'}", ""
    yield f"  when      {_utc(row.started_at)}, {row.finished_at - row.started_at:.1f} s", ""
    if usage := used(row.cpu_s, row.memory_peak_mb, row.disk_peak_mb):
        yield f"  used      {usage}", ""
    yield f"  attempt   {row.attempt + 1}, epoch {row.epoch}", ""
    sampled = sum(int((sequence.weight_versions >= 0).sum()) for sequence in row.sequences)
    counted = sum(int(sequence.loss_mask.sum()) for sequence in row.sequences)
    masked = f", {sampled - counted} of these with loss mask 0" if counted < sampled else ""
    count = sum(len(sequence.tokens) for sequence in row.sequences)
    reported = [used for turn, used in zip(row.turns, counts, strict=True) if turn.sequence < 0]
    if row.sequences or not reported:
        sequences = f"{len(row.sequences)} sequence{'s' * (len(row.sequences) != 1)}"
        yield f"  tokens    {count} in {sequences}, {sampled} sampled{masked}", ""
    if reported:
        prompts, answers = (sum(each) for each in zip(*reported, strict=True))
        yield f"  tokens    {prompts} of prompts and {answers} sampled in {len(reported)} calls without token ids", ""
    if labels := row.image_labels:
        shown = sum(len(sequence.images) for sequence in row.sequences)
        placeholders = sum(span.length for sequence in row.sequences for span in sequence.images)
        yield f"  images    {len(labels)}, shown {shown} times with {placeholders} tokens (--images DIR)", ""
    if len(conversations := row.conversations) > 1:
        messages = sum(len(one.messages) - one.shared for one in conversations)
        count, first = len(conversations), main(conversations, row.policy)
        yield f"  messages  {messages} in {count} conversations, the main one is {first}", ""
    for artifact in row.artifacts:
        yield f"  artifact  {artifact.name}, {len(artifact.data)} bytes", ""


def _calls(row: Row, counts: Sequence[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    turns = row.turns
    if turns:
        yield f"\n{len(turns)} model calls (seconds: model, sandbox, agent, waiting)", "bold"
    for number, turn in enumerate(turns):
        times = "  ".join(f"{s:8.3f}" for s in (turn.model_s, turn.sandbox_s, turn.agent_s, turn.wait_s))
        has_tokens = turn.sequence >= 0  # otherwise the engine reported no tokens
        where = f"sequence {turn.sequence} [{turn.token_start}, {turn.token_end})"
        if not has_tokens:
            where = f"{counts[number][0]} prompt and {counts[number][1]} sampled tokens, no ids"
        team = f"  role {turn.role}" if turn.role else ""
        if turn.started_by >= 0:
            team += f"  started by call {turn.started_by}"
        yield f"  {number:3}  {times}  {where}  {turn.finish_reason}  {turn.server}{team}", ""
    attempts = row.attempts
    if len(attempts) > 1 or any(attempt.error for attempt in attempts):
        yield f"\n{len(attempts)} attempts", "bold"
        for attempt in attempts:
            cause = f"  {attempt.error_kind}: {attempt.error}" if attempt.error else ""
            yield f"  {attempt.attempt + 1}  {attempt.status}  node {attempt.node or '-'}{cause}", ""


def _fold(text: str, full: bool) -> list[str]:
    lines = printable(text).split("\n")
    if full:
        return lines
    if len(lines) > HEAD_LINES + TAIL_LINES + 1:
        folded = len(lines) - HEAD_LINES - TAIL_LINES
        lines = [*lines[:HEAD_LINES], f"… {folded} lines folded (--full)", *lines[-TAIL_LINES:]]
    return [line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]} … cut (--full)" for line in lines]


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds else "-"


# --- artifacts ------------------------------------------------------------------------------------------------------


def artifact(row: Row, name: str) -> bytes:
    """Returns the content of an artifact. If several artifacts have this name, returns the last.

    Raises:
        ConfigError: There is no such artifact. The message lists the existing names.
    """
    by_name = {item.name: item.data for item in row.artifacts}
    if name not in by_name:
        existing = ", ".join(by_name) or "none"
        raise ConfigError(f"{row.id}: no artifact {name!r}; there are: {existing}")
    return by_name[name]


def hand_out(row: Row, name: str, output: str | None, as_json: bool) -> None:
    """Writes an artifact to ``output`` or stdout. Output is escaped on a terminal and unchanged in a pipe or file."""
    data = artifact(row, name)
    if output is not None:
        write_atomic(output_file(output), data)
    if as_json:
        record = {"id": row.id, "name": name, "bytes": len(data)}
        print_json(record | ({"base64": base64.b64encode(data).decode()} if output is None else {"path": output}))
    elif output is not None:
        note(f"{name}: {len(data)} bytes")
        say(output)
    elif sys.stdout.isatty():
        text = data.decode("utf-8", "surrogateescape")
        say(text, end="" if text.endswith("\n") else "\n")
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def hand_out_images(row: Row, directory: Path, as_json: bool) -> None:
    """Writes a rollout's images to a directory, in the order of their first use, and prints their paths."""
    images = row.images.values()
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for image in images:
        path = directory / image.file_name
        write_atomic(path, image.data)
        written.append({**_image_json(image), "path": str(path)})
    paths = "\n".join(one["path"] for one in written)
    print_result(as_json, {"id": row.id, "images": written}, paths, f"{row.id}: {len(written)} images")


def verifier_lines(row: Row, full: bool) -> Iterator[str]:
    """Yields the last lines of the verifier log if the reward is 0 or the verifier failed. With ``full``, yields all
    lines."""
    if row.reward != 0 and row.error_kind != "verifier":
        return
    data = next((item.data for item in reversed(row.artifacts) if item.name == VERIFIER_LOG), b"").rstrip()
    lines = printable(data.decode("utf-8", "surrogateescape")).split("\n") if data else []
    if len(lines) > VERIFIER_LINES and not full:
        yield f"… {len(lines) - VERIFIER_LINES} lines before (--artifact {VERIFIER_LOG})"
        lines = lines[-VERIFIER_LINES:]
    yield from lines


# --- tokens ---------------------------------------------------------------------------------------------------------


def token_lines(store: TrajectoryStore, row: Row, full: bool, tokenizer: str | None) -> Iterator[Text]:
    """Yields a trajectory's tokens as lines to print.

    Args:
        store: Store that contains the trajectory. Tokenizers are looked up next to it.
        row: The trajectory.
        full: Whether to print long runs of tokens in full.
        tokenizer: ``tokenizer.json`` or model directory to use. ``None`` searches for one.

    Raises:
        ConfigError: ``tokenizer`` cannot be loaded.
    """
    from rich.text import Text

    vocabularies: dict[str, Vocabulary | None] = {}
    sequences, labels = row.sequences, row.image_labels
    for number, sequence in enumerate(sequences):
        if sequence.policy not in vocabularies:
            vocabularies[sequence.policy], source = _vocabulary(store, sequence.policy, tokenizer)
            yield Text(f"\npolicy {printable(sequence.policy)}: {source}", style="dim")
        yield Text(f"\nsequence {number}: {len(sequence.tokens)} tokens, policy {printable(sequence.policy)}", "bold")
        for span in sequence.images:
            yield Text(f"  [{span.start}, {span.end}) {labels.get(span.image, span.image)}", "cyan")
        yield from _runs(sequence, vocabularies[sequence.policy], full)
    if sequences:
        scale = Text("\nid:log-probability of what was sampled, coloured by probability: ", style="dim")
        for bound, colour in SCALE:
            scale.append(f"≥ {bound:g} " if bound else "less", style=colour)
        yield scale


def _vocabulary(store: TrajectoryStore, policy: str, tokenizer: str | None) -> tuple[Vocabulary | None, str]:
    """Returns the vocabulary of a policy (``None`` if there is no tokenizer) and a note on its origin."""
    from megaflow_hpc.errors import ConfigError
    from megaflow_hpc.trajectories.reading.vocabulary import find, load

    if tokenizer is not None:
        return load(Path(tokenizer)), f"ids read with {tokenizer}"
    path = find(store.path, store.versions.get("models") or {}, policy)
    if path is None:
        return None, "ids only: no tokenizer of its model was found; name one with --tokenizer PATH"
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
        if full or len(places) <= HEAD_TOKENS + TAIL_TOKENS + 1:
            yield from _token_lines(sequence, places, sampled, vocabulary)
        else:
            yield from _token_lines(sequence, places[:HEAD_TOKENS], sampled, vocabulary)
            yield Text(f"    … {len(places) - HEAD_TOKENS - TAIL_TOKENS} tokens folded (--full)", style="dim")
            yield from _token_lines(sequence, places[-TAIL_TOKENS:], sampled, vocabulary)
        start = end


def _token_lines(
    sequence: SequenceView, places: list[int], sampled: bool, vocabulary: Vocabulary | None
) -> Iterator[Text]:
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
    """Returns a token's text on one line, in quotation marks."""
    plain = piece.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return f"‹{printable(plain)}›" if piece else "‹?›"


def _colour(logprob: float) -> str:
    probability = math.exp(min(logprob, 0.0)) if logprob == logprob else 0.0
    return next(colour for bound, colour in SCALE if probability >= bound)
