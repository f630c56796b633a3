"""Keys of a user's environment, of a campaign file and of the servers: what a campaign writes and shows has none."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest

from megaflow_hpc.campaign.job_environment import environment_script
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.trajectories.hdf5.file import without_secrets
from tests.support.campaigns import CALL, Make, cli, running
from tests.support.processes import environment, processes
from tests.support.waiting import until

MARK = f"marked-{secrets.token_hex(12)}"
"""In variables of the user's environment: no sandbox and no file may have it."""
GIVEN = f"given-{secrets.token_hex(12)}"
"""In the campaign file: there, and for whom the file says; not in what is passed on to others."""
AS_PLANNED = {"campaign.yaml", "env.sh", "run.json"}
"""Files of a run directory that hold what the user wrote; docs/explanation/security.md."""
VARIABLES = {
    "HF_TOKEN": MARK,
    "OPENAI_API_KEY": MARK,
    "ANTHROPIC_API_KEY": MARK,
    "AWS_SECRET_ACCESS_KEY": MARK,
    "GITHUB_TOKEN": MARK,
    "PIP_INDEX_URL": f"https://user:{MARK}@index.invalid/simple",
    "https_proxy": f"http://user:{MARK}@127.0.0.1:9",
    "APPTAINER_DOCKER_PASSWORD": MARK,
    "APPTAINERENV_LEAK": MARK,
    "SINGULARITYENV_LEAK": MARK,
}
LOOK = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | grep -q '[m]arked-' && exit 3"


def ours() -> Iterator[int]:
    for pid, _ in processes():
        try:
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                yield pid
        except OSError:
            continue


def everything(file: Path) -> Iterator[str]:
    """All text of a campaign file, decompressed."""
    found: list[str] = []

    def visit(name: str, item: h5py.Group | h5py.Dataset) -> None:
        found.extend(map(str, item.attrs.values()))
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            found.append(item[()].tobytes().decode("latin-1") if item.dtype.kind != "O" else str(item[()].tolist()))

    with h5py.File(file) as store:
        found.extend(map(str, store.attrs.values()))
        store.visititems(visit)
    return iter(found)


@pytest.mark.slow
def test_no_key_is_in_what_a_campaign_writes_shows_or_hands_on(
    tmp_path: Path, make_campaign: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "answers.yaml").write_text('default: [{text: "42", delay_s: 6}]\n')
    command = json.dumps(f"{LOOK}; python3 -c '{CALL}'")
    campaign = make_campaign(
        1,
        "model: {engine: scripted, script: answers.yaml}\n"
        f"slurm: {{setup: ['export WANDB_API_KEY={GIVEN}', 'curl https://me:{GIVEN}@host.invalid/']}}\n",
        agent=f"{{name: command, args: {{command: {command}, env: {{DEPLOY_TOKEN: {GIVEN}}}}}}}",
    )
    campaign.write_text(campaign.read_text().replace("network: none", "network: gateway"))
    process, run = running(campaign)
    try:
        folder = Path(run)
        until(lambda: list(folder.glob("endpoints/*.json")), "the server registers")
        server = [json.loads(p.read_text()).get("key") for p in folder.glob("endpoints/*.json")]
        assert all(len(str(key)) > 20 for key in server)
        assert server
        inside: dict[int, str] = {}

        def in_sandbox() -> bool:
            for pid in ours():
                said = environment(pid)
                if said.get("DEPLOY_TOKEN") == GIVEN:
                    inside[pid] = said["OPENAI_API_KEY"]
            return bool(inside)

        until(in_sandbox, "the agent's program runs", every_s=0.02)
        keys = [*server, *inside.values()]
        namespace = os.readlink("/proc/self/ns/pid")
        for pid, words in processes():
            shown = " ".join(words)
            assert not any(key in shown for key in [*keys, MARK]), f"{pid}: {shown}"
        for pid in ours():
            said = " ".join(environment(pid).values())
            assert not any(str(key) in said for key in server), pid
            try:
                hidden = os.readlink(f"/proc/{pid}/ns/pid") != namespace
            except OSError:
                continue
            assert not (hidden and MARK in said), f"{pid}: {said}"
            assert hidden or not any(key in said for key in inside.values()), pid
    finally:
        _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    shown = [told]
    for words in (
        ("show", run, "task0/command/0"),
        ("status", run, "--json", "--rollouts"),
        ("export", run, "--format", "jsonl", "-o", str(tmp_path / "out")),
        ("doctor", "--json"),
        ("validate", f"{run}/trajectories.h5"),
    ):
        done = cli(*words)
        shown += [done.stdout, done.stderr]
    shown += [p.read_text(errors="replace") for p in (tmp_path / "out").parent.glob("out*") if p.is_file()]
    shown += everything(folder / "trajectories.h5")
    for text in shown:
        assert MARK not in text
        assert GIVEN not in text
        assert not any(str(key) in text for key in keys)
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert MARK.encode() not in content, path
            assert path.name in AS_PLANNED or GIVEN.encode() not in content, path
            assert path.parent.name == "endpoints" or not any(str(key).encode() in content for key in keys), path
            assert not path.stat().st_mode & 0o077, path


def test_what_looks_like_a_key_is_masked_where_a_campaign_is_passed_on() -> None:
    kept = {"max_tokens": 5, "api_key_file": "/home/me/key", "tokens_per_s": 2.0, "keys": ["a"], "text": "a=b key: c"}
    hidden = {
        "HF_TOKEN": GIVEN,
        "api_key": GIVEN,
        "env": {"DB_PASSWORD": GIVEN, "AWS_SECRET_ACCESS_KEY": GIVEN, "npm_token": [GIVEN]},
        "setup": [
            f"export HF_TOKEN={GIVEN}",
            f"export HF_TOKEN='{GIVEN} {GIVEN}' A=1",
            f'x --api-key "{GIVEN}" -y',
            f"curl -H 'Authorization: Bearer {GIVEN}'",
            f"git clone https://me:{GIVEN}@host/x",
            f"git clone https://{GIVEN}@host/x",
        ],
    }
    found = without_secrets({**kept, **hidden})
    assert {name: found[name] for name in kept} == kept
    assert GIVEN not in json.dumps(found)
    assert found["setup"][0] == "export HF_TOKEN=***"
    assert found["setup"][1].endswith("A=1")
    assert found["setup"][4] == "git clone https://***@host/x"


def test_no_job_leaves_its_memory_in_a_core_file_unless_the_site_asks_for_it(tmp_path: Path) -> None:
    """Servers and workers hold keys in memory."""
    limits = []
    for setup in ([], ["ulimit -S -c unlimited"]):
        file = tmp_path / "env.sh"
        file.write_text(
            environment_script(CampaignConfig(name="x", tasks="t", agent="nop", slurm={"setup": setup}), "pmi2")
        )
        done = subprocess.run(
            ["sh", "-c", f"ulimit -S -c 1000; . {file}; ulimit -S -c"], capture_output=True, text=True, check=True
        )
        limits.append(done.stdout.strip())
    assert limits[0] == "0"
    assert limits[1] != "0"
