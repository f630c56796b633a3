"""Copies a campaign file without the names of users, hosts, jobs and home directories.

Nodes, servers and jobs are replaced by numbers. The same names are replaced in all text (errors, messages, artifacts,
the configuration), and so are names supplied by the caller, email addresses, and the owner in paths such as
``/home/NAME``. Token ids cannot be rewritten without the tokenizer. If a rollout's messages change, its token sequences
are therefore dropped, unless the caller asks to keep them.
"""

from __future__ import annotations

import getpass
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories.hdf5.columns import texts
from megaflow_hpc.trajectories.hdf5.file import attribute, attribute_text, open_file
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.schema import MAX_DEPTH
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectory import Attempt, Trajectory

_HOME_PATH = re.compile(
    r"(/(?:home|users|Users|scratch|work|lustre|gpfs|nfs|projects?|data)/)([^/\s\"'\\:;,()<>\[\]]+)"
)
"""Matches a directory that contains home directories, and the user name that follows it."""
_EMAIL = re.compile(r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]++@[A-Za-z0-9-]++(?:\.[A-Za-z0-9-]++)++")
"""Matches an email address. Possessive quantifiers prevent backtracking, which would take quadratic time on a long
word."""
_COMMON = frozenset({"", "user", "root", "localhost", "agent", "main", "default"})
_MIN_NAME_LENGTH = 3
"""Minimum length of a name to replace. Shorter names also occur as ordinary words."""


@dataclass
class Scrubber:
    """Replaces names in text: users by ``user``, hosts by ``host``, and nodes, servers and jobs by numbers."""

    users: set[str] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number assigned to each name, by kind and name."""
    _pattern: re.Pattern[str] | None = None

    def learn(self, users: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        """Adds names to replace. Hosts are also added without their domain. Short and common words are ignored."""
        self.users.update(filter(_is_distinctive, users))
        for name in hosts:
            self.hosts.update(filter(_is_distinctive, (name, name.partition(".")[0])))
        self._pattern = None

    def number(self, kind: str, name: str) -> str:
        """Returns a numbered name, such as ``node-3`` for the fourth node seen. An empty name stays empty."""
        if not name:
            return ""
        numbers = self.numbers.setdefault(kind, {})
        return f"{kind}-{numbers.setdefault(name, len(numbers))}"

    def text(self, text: str) -> str:
        """Replaces all known names, directory owners and email addresses in a text."""
        text = _HOME_PATH.sub(r"\1user", text)
        text = _EMAIL.sub("user@example.org", text)
        if self._pattern is None:
            names = sorted(self.users | self.hosts, key=len, reverse=True)
            words = [rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])" for name in names]
            self._pattern = re.compile("|".join(words) or r"(?!)")
        return self._pattern.sub(lambda match: "user" if match[0] in self.users else "host", text)

    def value(self, value: Any, depth: int = 0) -> Any:
        """Scrubs every string in a JSON value. Values that are nested too deeply are dropped."""
        if isinstance(value, str):
            return self.text(value)
        if depth > MAX_DEPTH and isinstance(value, dict | list):
            return None
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item, depth + 1) for item in value]
        return value


def _is_distinctive(name: str) -> bool:
    return len(name) >= _MIN_NAME_LENGTH and name not in _COMMON


def anonymise(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    names: Iterable[str] = (),
    keep_tokens: bool = False,
    keep_images: bool = False,
) -> dict[str, int]:
    """Writes a copy of a campaign file without names.

    Args:
        path: The campaign file.
        output: The copy, which must not be the file itself.
        names: Additional words to replace, such as users, projects and machines.
        keep_tokens: Keep the token sequences of rollouts with changed messages. Their ids still encode the original
            text.
        keep_images: Keep the images, and the token sequences that show them.

    Returns:
        Counts: ``trajectories``; ``changed`` (messages changed); ``without_tokens`` (all or some token sequences
        dropped); ``images`` (dropped, counted once per trajectory).

    Raises:
        ConfigError: ``path`` is not a campaign file, or ``output`` is the same file.
        OSError: There is no space left, or the directory is read-only.
    """
    from megaflow_hpc.trajectories.reading.store import open_trajectories

    path, output = Path(path), Path(output)
    if output.exists() and path.exists() and os.path.samefile(path, output):
        raise ConfigError(f"{output}: is the input file; name another one, because the input cannot be restored")
    counts = {"trajectories": 0, "changed": 0, "without_tokens": 0, "images": 0}
    with open_file(path) as source, open_trajectories(path) as store, published(output) as temporary:
        scrub = Scrubber()
        scrub.learn(users=[*names, getpass.getuser()], hosts=[os.uname().nodename])
        for column in ("trajectories/node", "attempts/node"):
            scrub.learn(hosts=set(texts(source[column])))
        campaign = scrub.text(attribute_text(source, "campaign"))
        with TrajectoryWriter(temporary, campaign, attributes=_described(source, scrub)) as writer:
            for row in store:
                trajectory = row.trajectory()
                changed = _scrub(trajectory, scrub)
                counts["trajectories"] += 1
                counts["changed"] += changed
                if not keep_images:
                    counts["images"] += len(trajectory.images)
                    trajectory.images = {}
                without = changed and not keep_tokens
                kept = [not (without or (s.images and not keep_images)) for s in trajectory.sequences]
                if not all(kept):
                    counts["without_tokens"] += 1
                    _keep_sequences(trajectory, kept)
                writer.append(trajectory)
    return counts


def _keep_sequences(trajectory: Trajectory, kept: list[bool]) -> None:
    """Drops the token sequences whose entry in ``kept`` is false."""
    numbers = [sum(kept[:number]) if keep else -1 for number, keep in enumerate(kept)]
    trajectory.sequences = [one for one, keep in zip(trajectory.sequences, kept, strict=True) if keep]
    for turn in trajectory.turns:
        turn.sequence = numbers[turn.sequence] if turn.sequence >= 0 else -1
        if turn.sequence < 0:
            turn.token_start, turn.token_end = 0, 0


def _described(source: Any, scrub: Scrubber) -> dict[str, str]:
    attributes = {}
    for name in ("config", "versions"):
        if name in source.attrs:
            attributes[name] = json.dumps(scrub.value(attribute(source, name)), sort_keys=True)
    return attributes


def _scrub(trajectory: Trajectory, scrub: Scrubber) -> bool:
    """Scrubs a trajectory in place. Returns whether its messages changed, so that its tokens no longer match."""
    records: list[Trajectory | Attempt] = [trajectory, *trajectory.attempts]
    for record in records:
        record.node = scrub.number("node", record.node)
        record.job_id = scrub.number("job", record.job_id)
        record.error = scrub.text(record.error)
    for turn in trajectory.turns:
        turn.server = scrub.number("server", turn.server)
    for artifact in trajectory.artifacts:
        artifact.name = scrub.text(artifact.name)
        text = artifact.data.decode("utf-8", "surrogateescape")
        artifact.data = scrub.text(text).encode("utf-8", "surrogateescape")
    before = trajectory.messages
    trajectory.messages = scrub.value(before)
    return trajectory.messages != before
