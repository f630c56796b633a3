"""Import JSON lines: the output of ``export --format jsonl`` becomes a campaign file with equal columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.texts import parse_object
from megaflow_hpc.trajectories.exports.files import lines
from megaflow_hpc.trajectories.exports.jsonl import parse
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.journal.checks import checked


def import_jsonl(
    source: Path,
    target: Path,
    campaign: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Writes a ``trajectories.h5`` from JSON lines, plain or compressed with gzip or Zstandard.

    Args:
        source: The file of lines.
        target: The file to write. An existing file is replaced at the end.
        campaign: Name of the campaign. Default: the name of ``source`` up to its first dot.
        progress: Called with the number of finished trajectories.

    Returns:
        The number of trajectories.

    Raises:
        ConfigError: There is no line, or a line is not a trajectory or repeats an id. The message names the line, and
            ``target`` is unchanged.
    """
    if not source.is_file():
        raise ConfigError(f"{source}: cannot be read; expected JSON lines of megaflow-hpc export")
    seen: set[str] = set()
    with published(target) as temporary:
        name = campaign or source.name.split(".")[0]
        with TrajectoryWriter(temporary, name) as writer:
            for number, line in lines(source):
                if not line.strip():
                    continue
                try:
                    trajectory = checked(parse(parse_object(line)))
                except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
                    raise ConfigError(f"{source}:{number}: no trajectory of ours ({_fault(error)})") from None
                if trajectory.id in seen:
                    raise ConfigError(f"{source}:{number}: {trajectory.id} was there before; ids are unique")
                seen.add(trajectory.id)
                writer.append(trajectory)
                if progress is not None:
                    progress(len(seen))
        if not seen:
            raise ConfigError(f"{source}: holds no trajectory; expected JSON lines of megaflow-hpc export")
    return len(seen)


def _fault(error: Exception) -> str:
    lacking = str(error).partition("missing ")[2].partition(": ")[2] if isinstance(error, TypeError) else ""
    return f"it lacks {lacking}" if lacking else f"{error!r:.300}"
