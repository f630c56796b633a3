"""The report of ``prove``: findings with remedies. Names of users, accounts and private directories are replaced."""

from __future__ import annotations

import getpass
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megaflow_hpc.host.atomic import write_atomic, write_json
from megaflow_hpc.resources import __version__

Level = Literal["ok", "warn", "FAIL", "skip"]


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    check: str
    level: Level
    found: str
    remedy: str = ""


@dataclass
class ProofReport:
    """All findings of a run of ``prove``.

    Args:
        secrets: Maps private text, such as the user's name, to its replacement in the report.
    """

    secrets: Mapping[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    """Measurements and versions, by name."""
    began_at: float = field(default_factory=time.time)

    def add(self, finding: Finding) -> Finding:
        """Adds a finding with private names replaced. Returns the changed finding."""
        kept = Finding(finding.check, finding.level, self._public(finding.found), self._public(finding.remedy))
        self.findings.append(kept)
        return kept

    @property
    def failed(self) -> bool:
        """True if any check failed."""
        return any(finding.level == "FAIL" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of ``report.json``."""
        return {
            "ok": not self.failed,
            "version": __version__,
            "date": time.strftime("%Y-%m-%d", time.gmtime(self.began_at)),
            "seconds": round(time.time() - self.began_at),
            "python": platform.python_version(),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "findings": [asdict(finding) for finding in self.findings],
            "facts": {name: self._public(value) for name, value in self.facts.items()},
        }

    def write(self, folder: Path) -> Path:
        """Writes ``report.json`` and ``report.md``. Returns the path of ``report.md``."""
        content = self.to_dict()
        write_json(folder / "report.json", content)
        write_atomic(folder / "report.md", _markdown(content).encode())
        return folder / "report.md"

    def _public(self, text: str) -> str:
        for secret, shown in sorted(self.secrets.items(), key=lambda item: -len(item[0])):
            text = re.sub(rf"(?<![\w-]){re.escape(secret)}(?![\w-])", shown, text)
        return text


def secrets_of(accounts: Iterable[str], folders: Sequence[Path]) -> dict[str, str]:
    """Maps private text to its replacement in the report.

    Args:
        accounts: Slurm accounts that jobs are charged to.
        folders: Private directories. The first is shown as ``PROVE``, the others as ``HOME``.
    """
    hidden = {str(folder): "HOME" for folder in folders[1:] if len(folder.parts) > 1} | {str(folders[0]): "PROVE"}
    words = {getpass.getuser(): "USER"} | {account: "ACCOUNT" for account in accounts}
    return hidden | words


def _markdown(content: Mapping[str, Any]) -> str:
    verdict = "every check passed" if content["ok"] else "some checks failed"
    lines = [
        f"# megaflow-hpc prove: {verdict}",
        "",
        f"megaflow-hpc {content['version']}, {content['date']}, {content['seconds']} s, Python {content['python']}, "
        f"Linux {content['kernel']} on {content['machine']}",
        "",
        "| check | result | found | remedy |",
        "| --- | --- | --- | --- |",
    ]
    for finding in content["findings"]:
        cells = (finding["check"], finding["level"], finding["found"], finding["remedy"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    lines += ["", "## Facts", "", "| fact | value |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in content["facts"].items()]
    return "\n".join(lines) + "\n"
