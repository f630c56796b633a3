"""What is said if Apptainer, or a user namespace, cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.host.apptainer import explained

UNSHARE = "unshare: write failed /proc/self/uid_map: Operation not permitted"
APPTAINER = "INFO:    x\nERROR  : Could not write info to setgroups: Permission denied\nERROR  : Error while waiting"


@pytest.mark.parametrize(
    ("setting", "value", "output", "expected"),
    [
        (
            "",
            "",
            UNSHARE,
            f"{UNSHARE}; AppArmor restricts unprivileged user namespaces; ask the site for Apptainer's AppArmor",
        ),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            APPTAINER,
            "Error while waiting; AppArmor restricts unprivileged user namespaces "
            "(kernel.apparmor_restrict_unprivileged_userns=1); ask the site for Apptainer's AppArmor profile, or for a",
        ),
        (
            "user/max_user_namespaces",
            "0",
            "unshare: unshare failed: No space left on device",
            "unshare: unshare failed: No space left on device; the kernel forbids unprivileged user namespaces "
            "(user.max_user_namespaces=0); ask the site for user namespaces, or for a setuid Apptainer",
        ),
        ("kernel/apparmor_restrict_unprivileged_userns", "0", APPTAINER, "Error while waiting"),
        ("kernel/unprivileged_userns_clone", "0", "FATAL:   no such image", "no such image"),
        (
            "",
            "",
            "FATAL:   exec /bin/sh failed: exec format error",
            "exec /bin/sh failed: exec format error; a campaign",
        ),
    ],
)
def test_a_failure_has_its_known_cause_and_remedy(
    tmp_path: Path, setting: str, value: str, output: str, expected: str
) -> None:
    if setting:
        (tmp_path / setting).parent.mkdir()
        (tmp_path / setting).write_text(f"{value}\n")
    found = explained(output, str(tmp_path))
    assert found.startswith(expected)
    if not found.endswith(expected[-10:]):
        assert found.endswith(("profile, or for a setuid Apptainer", "with a separate image store"))
