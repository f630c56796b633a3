"""What pods and engines write of themselves in a run directory, with anything in any field: whoever looks says what is
sane of it, in words and in JSON, and what stands beside counts as before."""

from __future__ import annotations

import copy
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.cli import main
from megaflow_hpc.cli.output import print_json
from megaflow_hpc.cli.runs import watch
from megaflow_hpc.cli.view.tables import RolloutTable
from megaflow_hpc.cli.view.words import head
from megaflow_hpc.monitor.backlog import Backlog
from megaflow_hpc.monitor.live import Live
from megaflow_hpc.pod.master.histories import Histories
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.events import AnyEvent, EventWriter, PodEvent, RolloutEvent, StartEvent, WorkerEvent, encode
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.pods import summary
from megaflow_hpc.rundir.pods.condenser import Condenser, SummaryWriter
from megaflow_hpc.rundir.pods.summary import EndedBadly
from megaflow_hpc.slurm.ids import by_cluster
from tests.support.harbor_tasks import write_solved_task
from tests.support.ledgers import LEASE, NOW
from tests.support.samples import commit, trajectory
from tests.support.steering import EVIL, harmless

LONG, DEEP = "9" * 5000, "[" * 20_000 + "]" * 20_000
ODD: dict[str, str] = {
    "nan": "NaN",
    "infinity": "Infinity",
    "beyond a float": "1e999",
    "huge": "1e308",
    "5,000 digits": LONG,
    "4,000 digits": LONG[:4000],
    "64 bits": str(2**63),
    "negative": "-7",
    "far future": "300000000000",
    "past": "-300000000000",
    "a fraction": "0.5",
    "null": "null",
    "truth": "true",
    "text": '"nan"',
    "steering": json.dumps(EVIL),
    "surrogate": '"\\udc9b31m"',
    "list": "[[], {}]",
    "deep": DEEP,
}
"""JSON as Python reads it, for any field of any record."""
IDS = ("task0/oracle/0", "task1/oracle/0000")


def example(kind: Any) -> Any:
    """A record with a value in every field."""
    values = {int: 1, float: NOW, str: IDS[1], list: ["a"]}
    fields = {field.name: _plain(field.type) for field in msgspec.structs.fields(kind)}
    return kind(**{name: "failed" if name == "status" else values[plain] for name, plain in fields.items()})


def _plain(hint: Any) -> Any:
    """The type behind a bound, or beside ``None``."""
    (only,) = [one for one in (get_args(hint) if type(None) in get_args(hint) else [hint]) if one is not type(None)]
    return getattr(only, "__origin__", only)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document: of a map's and a list's values, and of themselves."""
    if path:
        yield path
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(one, (*path, key))


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a document with another value in a place."""
    found = inside = copy.deepcopy(document)
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return found


MARK = "put the value here"


def spelled(document: Any, odd: str) -> Iterator[tuple[str, bytes]]:
    """The document as JSON with an odd value in each place, under a name."""
    for path in places(document):
        yield "-".join(map(str, path)), json.dumps(put(document, path, MARK)).replace(f'"{MARK}"', odd).encode()


def lines(odd: str) -> Iterator[tuple[str, bytes]]:
    """Every field of every event."""
    for kind in get_args(AnyEvent):
        event = msgspec.to_builtins(example(kind))
        for name, line in spelled({"event": event["event"], **event}, odd):
            yield f"{event['event']}-{name}", line


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDir]:
    """A local run of two rollouts, of which one is stored; its trainer has committed a step."""
    folder = tmp_path_factory.mktemp("odd")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "SLURM_JOB_ID", "MEGAFLOW_SITE_FILE"):
            patch.delenv(name, raising=False)
        patch.setenv("MEGAFLOW_SCRATCH", str(folder))
        patch.setenv("MEGAFLOW_SITE_CHECK", "0")
        patch.setenv("PATH", str(folder / "bin"))  # a machine without Slurm
        (folder / "image" / "bin").mkdir(parents=True)
        for number in range(2):
            write_solved_task(folder / "tasks", f"task{number}")
        (folder / "campaign.yaml").write_text(
            "name: odd\ntasks: tasks/*\nagent: [oracle]\nlimits: {core_hours: 5, gpu_hours: 5, wall: 5}\n"
            f"environment: {{network: none, images: {{base: {folder / 'image'}}}}}\n"
        )
        run = RunDir(Campaign.from_yaml(folder / "campaign.yaml").plan(launcher="local").path)
        commit(run, "7_0", (0, 0, trajectory(0, id=IDS[0], task_id="task0", policy="oracle")))
        yield run


@pytest.fixture
def run(planned: RunDir) -> Iterator[RunDir]:
    events = EventWriter(planned.event_file("7_0", "0"))
    for event in (
        PodEvent(state="started", node="n1", ranks=2),
        WorkerEvent(rank=1, state="ready", slots=2, node="n1"),
        RolloutEvent(id=IDS[0], status="completed", reward=1.0, turns=3, seconds=0.25),
        PodEvent(state="drained", stored=1),
    ):
        events.write(event)
    events.close()
    before = set(planned.path.rglob("*"))
    yield planned
    for path in sorted(set(planned.path.rglob("*")) - before, reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    planned.event_file("7_0", "0").unlink()


def no_number(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def look(run: RunDir, capsys: pytest.CaptureFixture[str], report: str = "") -> dict[str, Any]:
    """What all verbs that look at a run say is harmless and, with --json, JSON; returns what status says."""
    verbs: list[list[str]] = [  # with --rollouts, all events are read, else the summaries
        ["status", str(run.path)],
        ["status", str(run.path), "--json"],
        ["status", str(run.path), "--rollouts", "--json"],
        ["status", str(run.path), "--rollouts"],
        ["list", str(run.path.parent)],
        ["usage", str(run.path), "--json"],
        ["logs", str(run.path), IDS[1]],
    ]
    if report:
        verbs += [["report", str(run.path), "--no-pictures", "-o", report, "--json"]]
        verbs += [["report", str(run.path), "--prometheus", f"{report}.prom"]]
    status: dict[str, Any] = {}
    for words in verbs:
        code = main(words)
        said = capsys.readouterr()
        where = f"{' '.join(words)}: {said.err[-2000:]}"
        assert code in (0, 3) if words[0] == "usage" else code == 0, where
        assert "Traceback" not in said.err, where
        assert harmless(said.out + said.err), where
        assert len(said.out) < 3_000_000, where
        if "--json" in words and code == 0:
            told = json.loads(said.out, parse_constant=no_number)
            status = told if words[0] == "status" else status
    return status


def counts_as_before(run: RunDir, capsys: pytest.CaptureFixture[str], report: str = "") -> dict[str, Any]:
    """Looks, and the viewer too: of the pod that stored a rollout is told whatever is beside."""
    status = look(run, capsys, report)
    rollouts = status["rollouts"]
    assert 2 <= rollouts["total"] > rollouts["pending"]
    assert min(*rollouts.values(), *status["retries"].values(), *(pod["stored"] for pod in status["pods"])) >= 0
    assert any(pod["pod"] == "7_0.0" and pod["state"] == "drained" for pod in status["pods"])
    seen = Run(run.path)
    seen.monitor.list_rollouts()
    snapshot = Live(run, seen.monitor).look(seen.status())
    texts = [watch.line("odd", snapshot.status), *(text.plain for text in head("odd", snapshot, (200, 100)))]
    assert all(map(harmless, texts))
    assert list(snapshot.rollouts)
    return status


def own(data: bytes, number: int) -> bytes:
    """The same of another rollout, so that none hides what another does."""
    return data.replace(IDS[1].encode(), b"task1/oracle/%04d" % number)


def grouped(names: Iterable[str]) -> list[Any]:
    """Values that are looked at together: a look costs more than a file of one."""
    return [pytest.param(list(some), id=", ".join(some)) for some in batched(names, 5)]


def batched(names: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    left = iter(names)
    while some := tuple(islice(left, size)):
        yield some


@pytest.mark.parametrize("odd", grouped(ODD))
def test_any_value_in_any_field_of_any_event(run: RunDir, odd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    started = [
        PodEvent(t=NOW, state="started", node="n2"),
        WorkerEvent(t=NOW, rank=1, state="ready", slots=2, node="n2"),
    ]
    first = b"".join(map(encode, started))
    names = []
    for number, (name, line) in enumerate(line for one in odd for line in lines(ODD[one])):
        (run.events / f"{name}-{number}.0.jsonl").write_bytes(first + own(line, number) + b"\n")
        names.append(f"{name}-{number}.0")
    assert len(names) > 50 * len(odd)
    counts_as_before(run, capsys)
    assert sum(Backlog(run).look().values()) <= 1
    Histories(run).look_at_events(names)
    CampaignBudget(run, {"core_hours": 1, "wall": 1}).exceeded({name: {} for name in names})
    for name in names:  # the pod that wrote such a line writes its summary of it
        writer = SummaryWriter(run.events / f"{name}.jsonl", clock=lambda: math.inf)
        writer.tick()
        writer.finish()
    counts_as_before(run, capsys)


def summarised() -> Any:
    """A summary with something in every field."""
    condenser = Condenser()
    for kind in get_args(AnyEvent):
        event = example(kind)
        if isinstance(event, RolloutEvent):
            condenser.apply(RolloutEvent(t=NOW, id=IDS[0], status="completed", inexact=3, constrained=2))
            event.kind = "node"
        if isinstance(event, WorkerEvent):
            event.state, event.node = "ready", "n1"
        if isinstance(event, PodEvent):
            event.state = "started"
        condenser.apply(event)
    made = msgpack.unpackb(msgspec.msgpack.encode(condenser.summary(100)), strict_map_key=False)
    made["version"] = summary.VERSION
    assert {"event", *(field.name for field in msgspec.structs.fields(summary.Summary))} == made.keys()
    assert len(made["ended_badly"][0]) == len(msgspec.structs.fields(EndedBadly))
    assert all(made[name] for name in ("retries", "failures", "recent", "inexact", "constrained", "ended_well"))
    assert made["ended_badly"][0][-1]
    assert msgspec.msgpack.decode(msgpack.packb(made), type=summary.Summary)
    return made


def packed(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(4, "little") + body


def deep() -> Any:
    value: Any = []
    for _ in range(400):
        value = [value]
    return value


PACKED: dict[str, Any] = {
    "nan": math.nan,
    "infinity": math.inf,
    "huge": 1e308,
    "64 bits": 2**64 - 1,
    "minus 63 bits": -(2**63),
    "negative": -7,
    "far future": 3 * 10**11,
    "a fraction": 0.5,
    "nothing": None,
    "truth": True,
    "steering": EVIL,
    "bytes": b"\xff" * 8,
    "list": [[], {}],
    "deep": deep(),
}


@pytest.mark.parametrize("odd", grouped(PACKED))
def test_any_value_in_any_field_of_a_summary(run: RunDir, odd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    made, values = summarised(), [PACKED[name] for name in odd]
    maps = [name for name, value in made.items() if isinstance(value, dict)]
    documents = [put(made, path, value) for path in places(made) for value in values]
    documents += [  # and as a key
        {**made, name: {value: next(iter(made[name].values()))}}
        for name in maps
        for value in values
        if isinstance(value, int | str)
    ]
    names = []
    for number, document in enumerate(documents):
        events = run.events / f"{number}.0.jsonl"
        events.write_bytes(b" " * 99 + b"\n")
        summary.path_of(events).write_bytes(packed(own(msgpack.packb(document), number)))
        names.append(f"{number}.0")
    assert len(names) > 60 * len(odd)
    counts_as_before(run, capsys)
    assert sum(Backlog(run).look().values()) <= 1
    Histories(run).look_at_events(names)


@pytest.mark.parametrize(
    "body",
    [b"", b"\x80", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff" * 5, b"\x91" * 100_000, b"\xc6\xff\xff\xff\xff"],
)
def test_bytes_that_are_no_summary(run: RunDir, body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    for number, data in enumerate((packed(body), body, packed(body)[:5])):
        (run.events / f"{number}.0.jsonl").write_bytes(encode(RolloutEvent(t=NOW, id=IDS[0], status="completed")))
        (run.events / f"{number}.0.summary").write_bytes(data)
    counts_as_before(run, capsys)


PROGRESS = [NOW, 1, 1, 1, 1, 1.5]
COORDINATOR = {"holder": "8_0.0", "count": 1, "pods": 1, "exceeded": "", "progress": {"8_0.0": PROGRESS}}
ENDPOINT = {
    "server": "default.0",
    "policy": "default",
    "url": "https://127.0.0.1:1",
    "model_name": "m",
    "node": "n1",
    "weight": 1.0,
    "started_at": NOW,
    "heartbeat": 1,
    "weight_version": 1,
    "refused": {"version": 2, "cause": "c"},
    "in_flight": 1,
    "waiting": 1,
    "wait_s": 0.5,
}
GONE = {"server": "default.1", "policy": "default", "cause": "c", "job_id": "7", "log": "/log", "at": NOW}
ADDED = {"rollouts": 0, "cut": [1], "digest": "d", "first": 2}
LIVE = {"rollouts": {IDS[1]: {"calls": 1, "tokens": 1, "waits": True, "quiet_s": 1.0}}, "transcripts": {}}
FILES: dict[str, Any] = {
    "ledger/leases/{}.0": LEASE,
    "ledger/gpus/{}.json": {"gpus": 1, "gpu_s": 10.0},
    "ledger/added/{}.0": ADDED,
    "ledger/jobs/1{}.json": {"role": "pods", "id": "1", "elements": 1, "base": 0, "policy": "", "submitted_at": NOW},
    "endpoints/{}.json": ENDPOINT,
    "endpoints/{}.failed.json": GONE,
    "endpoints/{}.starting": GONE,
}


@pytest.mark.parametrize("odd", grouped(ODD))
def test_any_value_in_any_field_of_what_pods_and_servers_say(
    run: RunDir, odd: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    number = 0
    for place, document in FILES.items():
        for _, text in (each for one in odd for each in spelled(document, ODD[one])):
            number += 1
            path = run.path / place.format(number)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text)
            if "leases" in place:
                (run.events / f"{number}.0.jsonl").write_bytes(encode(PodEvent(t=NOW, state="started", node="n2")))
    assert number > 50 * len(odd)
    counts_as_before(run, capsys)


@pytest.mark.parametrize("odd", ODD)
def test_any_value_in_what_one_pod_says_for_all_and_in_what_viewers_are_told(
    run: RunDir, odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "live").mkdir(exist_ok=True)
    begun = StartEvent(t=NOW, id=IDS[1], rank=1, attempt=0)
    (run.events / "9.0.jsonl").write_bytes(encode(PodEvent(t=NOW, state="started")) + encode(begun))
    (run.path / "ledger/limits.json").write_text(
        f'{{"core_hours": {ODD[odd]}, "gpu_hours": {ODD[odd]}, "wall": {ODD[odd]}}}'
    )
    seen = Run(run.path)
    live = Live(run, seen.monitor)
    live.shown, live.opened = IDS, IDS[1]
    for _, text in (*spelled(COORDINATOR, ODD[odd]), *spelled(LIVE, ODD[odd])):
        for name in ("ledger/coordinator.json", "live/9.0.json"):
            (run.path / name).write_bytes(text)
        snapshot = live.look(seen.status())
        print_json(snapshot.status)
        json.loads(capsys.readouterr().out, parse_constant=no_number)
        rows = RolloutTable(snapshot.rollouts, "")
        assert [rows.cells(row) for row in range(len(rows.keys))]
        assert all(harmless(text.plain) for text in head("odd", snapshot, (200, 100)))
    live.leave()
    CampaignBudget(run, {"core_hours": 1, "gpu_hours": 1, "wall": 1}).exceeded({"9.0": {}})


def test_a_lease_that_says_nonsense_lets_no_limit_pass(run: RunDir) -> None:
    """Neither takes it back what others have used, nor keeps it whoever sums up from going on."""
    used = {"a.0": {"core_s": 4 * 3600.0, "began_at": NOW}}
    for wrong in (math.nan, -math.inf, -1e9, "x", None, [], 10**400):
        budget = CampaignBudget(run, {"core_hours": 3})
        assert "4.00 core-hours are used" in budget.exceeded({**used, "b.0": {"core_s": wrong, "began_at": wrong}})
        budget = CampaignBudget(run, {"wall": 1})
        assert "limits.wall is 1" in budget.exceeded({**used, "b.0": {"core_s": wrong, "began_at": wrong}})
    run.gpus.mkdir(exist_ok=True)
    (run.gpus / "a.json").write_text('{"gpu_s": 14400.0}')
    for wrong in ("NaN", "-1e9", '"nan"', "Infinity", "[" * 20_000, LONG):
        (run.gpus / "b.json").write_text(f'{{"gpu_s": {wrong}}}')
        assert "4.00 GPU-hours are used" in CampaignBudget(run, {"gpu_hours": 3}).exceeded({})


NO_JOBS = ("--me", "-u root", "1 --me", "7\n#SBATCH --wrap=id", "$(id)", "7@--me", "7@a b", "", "１２", "9" * 200)


def test_what_a_run_directory_calls_its_jobs_is_no_option_and_no_line_of_a_script(run: RunDir) -> None:
    """``cancel`` gives them to scancel, of which ``--me`` ends all that its user has; a gather job waits for them."""
    run.jobs.mkdir(exist_ok=True)
    for number, name in enumerate((*NO_JOBS, "17", "18@other")):
        (run.jobs / f"{number}.json").write_text(json.dumps({"role": "pods", "id": name}))
        (run.path / f"ledger/leases/{number}.0").write_text(json.dumps({**LEASE, "job_id": name}))
    seen = Run(run.path)
    assert [record.id for record in seen.slurm_jobs.arrays.records()] == ["17", "18@other"]
    assert seen.slurm_jobs.ids() == ["17", "18@other"]
    assert seen.job_ids() == ["17", "18@other"]
    jobs = ["12", "12_3", "12_[0-3,7%2]", "12+1", "12_3@other"]
    assert by_cluster([*NO_JOBS, *jobs]) == {"": jobs[:4], "other": ["12_3"]}


def test_a_report_of_a_run_with_all_of_it(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for odd in ODD.values():
        for name, line in lines(odd):
            with open(run.events / f"{name}.0.jsonl", "ab") as file:
                file.write(line + b"\n")
    for number, (_, lease) in enumerate(
        (name, text) for odd in ("nan", "huge", "text", "5,000 digits") for name, text in spelled(LEASE, ODD[odd])
    ):
        (run.path / f"ledger/leases/l{number}.0").write_bytes(lease)
    counts_as_before(run, capsys, str(tmp_path / "report"))
    figures = json.loads((tmp_path / "report" / "figures.json").read_text(), parse_constant=no_number)
    assert figures["runs"][0]["stored"] == 1
    metrics = (tmp_path / "report.prom").read_bytes().decode()
    values = [line.rpartition(" ")[2] for line in metrics.split("\n") if line and not line.startswith("#")]
    assert len(values) > 20
    assert all(math.isfinite(float(value)) for value in values)


def test_json_is_json_whatever_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.nan, "b": [math.inf, (1, -math.inf)], "c": {"d": 1.5, 7: Path("x")}})
    assert json.loads(capsys.readouterr().out, parse_constant=no_number) == {
        "a": None,
        "b": [None, [1, None]],
        "c": {"d": 1.5, "7": "x"},
    }
