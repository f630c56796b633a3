"""Copies a campaign file without the names of users, hosts, jobs and home directories.

Nodes, servers and jobs are numbered. In every text (errors, messages, artifacts, the configuration) the names found
and the names given are replaced, as are mail addresses and the owner in paths such as ``/home/NAME``. Token ids cannot
be rewritten without the tokenizer that made them: a rollout whose messages had to be changed loses its token sequences,
unless they are asked for.
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
from megaflow_hpc.trajectories.hdf5.encoding import MAX_DEPTH
from megaflow_hpc.trajectories.hdf5.file import attribute, attribute_text, open_file
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectory import Attempt, Trajectory

_OWNED = re.compile(r"(/(?:home|users|Users|scratch|work|lustre|gpfs|nfs|projects?|data)/)([^/\s\"'\\:;,()<>\[\]]+)")
"""A directory that holds people's directories, and the person's name."""
_MAIL = re.compile(r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]++@[A-Za-z0-9-]++(?:\.[A-Za-z0-9-]++)++")
"""Begins where a word does and never goes back, so that a long word costs its length and not the square of it."""
_COMMON = frozenset({"", "user", "root", "localhost", "agent", "main", "default"})
_WITH_IDS = "engine.jsonl"
"""The artifact in which older software kept the sampled ids a second time."""
_SHORTEST = 3
"""Names shorter than this would be found inside ordinary words."""


@dataclass
class Scrubber:
    """Replaces names in texts: users by ``user``, hosts by ``host``, nodes, servers and jobs by their numbers."""

    users: set[str] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    _pattern: re.Pattern[str] | None = None

    def learn(self, users: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        """Adds names to be replaced; a host's also without its domain. Short and common words are left alone."""
        self.users |= {name for name in users if len(name) >= _SHORTEST and name not in _COMMON}
        for name in hosts:
            short = name.partition(".")[0]
            self.hosts |= {n for n in (name, short) if len(n) >= _SHORTEST and n not in _COMMON}
        self._pattern = None

    def number(self, kind: str, name: str) -> str:
        """Returns for example ``node-3`` for the fourth node seen; an empty name stays empty."""
        if not name:
            return ""
        return f"{kind}-{self.numbers.setdefault((kind, name), sum(k == kind for k, _ in self.numbers))}"

    def text(self, text: str) -> str:
        """Returns the text with every known name, owner of a directory and mail address replaced."""
        text = _OWNED.sub(r"\1user", text)
        text = _MAIL.sub("user@example.org", text)
        if self._pattern is None:
            names = sorted(self.users | self.hosts, key=len, reverse=True)
            self._pattern = re.compile(
                "|".join(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])" for name in names) or r"(?!)"
            )
        return self._pattern.sub(lambda found: "user" if found[0] in self.users else "host", text)

    def value(self, value: Any, depth: int = 0) -> Any:
        """Returns a JSON value with every text in it replaced; what is nested too deeply to be read is left out."""
        if isinstance(value, str):
            return self.text(value)
        if depth > MAX_DEPTH and isinstance(value, dict | list):
            return None
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item, depth + 1) for key, item in value.items()}
        return [self.value(item, depth + 1) for item in value] if isinstance(value, list) else value


def anonymise(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    names: Iterable[str] = (),
    keep_tokens: bool = False,
) -> dict[str, int]:
    """Writes a copy of a campaign file without names.

    Args:
        path: the campaign file.
        output: the copy, which must not be the file itself.
        names: further words to replace: users, projects, machines.
        keep_tokens: keep the sequences of rollouts whose messages were changed; their ids still spell the old text.

    Returns:
        Counts of ``trajectories``, of those ``changed`` in their messages, and of those ``without_tokens`` therefore.

    Raises:
        ConfigError: ``path`` is not a campaign file, or ``output`` is the same file.
        OSError: no space left, or a read-only directory.
    """
    from megaflow_hpc.trajectories.reading.store import open_trajectories

    path, output = Path(path), Path(output)
    if output.exists() and path.exists() and os.path.samefile(path, output):
        raise ConfigError(f"{output}: is the file itself; name another one, the original cannot be had back")
    counts = {"trajectories": 0, "changed": 0, "without_tokens": 0}
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
                if changed and trajectory.sequences and not keep_tokens:
                    counts["without_tokens"] += 1
                    trajectory.sequences = []
                    trajectory.artifacts = [a for a in trajectory.artifacts if a.name != _WITH_IDS]
                    for turn in trajectory.turns:
                        turn.sequence, turn.token_start, turn.token_end = -1, 0, 0
                writer.append(trajectory)
    return counts


def _described(source: Any, scrub: Scrubber) -> dict[str, str]:
    found = {}
    for name in ("config", "versions"):
        if name in source.attrs:
            found[name] = json.dumps(scrub.value(attribute(source, name)), sort_keys=True)
    return found


def _scrub(trajectory: Trajectory, scrub: Scrubber) -> bool:
    """Replaces names in place, and returns whether a message, and so the text of the tokens, was changed."""
    parts: list[Trajectory | Attempt] = [trajectory, *trajectory.attempts]
    for part in parts:
        part.node = scrub.number("node", part.node)
        part.job_id = scrub.number("job", part.job_id)
        part.error = scrub.text(part.error)
    for turn in trajectory.turns:
        turn.server = scrub.number("server", turn.server)
    for artifact in trajectory.artifacts:
        artifact.name = scrub.text(artifact.name)
        text = artifact.data.decode("utf-8", "surrogateescape")
        artifact.data = scrub.text(text).encode("utf-8", "surrogateescape")
    before = trajectory.messages
    trajectory.messages = scrub.value(before)
    return trajectory.messages != before
