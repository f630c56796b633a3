"""Requests of viewers are bounded, and malicious files do no harm."""

from __future__ import annotations

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.live import MAX_ROLLOUTS, Asked, LiveFiles, LiveStatus, PodLiveStatus, Transcript, Viewers
from megaflow_hpc.texts import END_CHARACTERS, end_of


def test_all_viewers_together_ask_for_so_much_and_what_is_no_ask_is_skipped(run: RunDir) -> None:
    files = LiveFiles(run)
    assert files.asked() == Asked()
    files.ask([f"t/p/{n}" for n in range(9 * MAX_ROLLOUTS)])
    (run.live / "other.1.ask").write_text('{"counter": 1, "rollouts": ["u/p/0"], "transcript": "u/p/0"}')
    (run.live / "cut.2.ask").write_text('{"counter": 1, "rollo')
    (run.live / "deep.3.ask").write_text("[" * 100_000)
    (run.live / "odd.4.ask").write_text('{"counter": 1, "rollouts": [7]}')
    asked = files.asked()
    assert len(asked.rollouts) == MAX_ROLLOUTS
    assert asked.transcripts == ("u/p/0",)
    files.leave()
    assert files.asked() == Asked(("u/p/0",), ("u/p/0",))


def test_the_end_of_a_conversation_is_bounded_whatever_its_messages_are() -> None:
    deep: object = "x"
    for _ in range(100_000):
        deep = [deep]
    odd = [
        {"role": 7, "content": {"a": 1}},
        {"content": ["part", {"type": "image"}, {"text": None}], "tool_calls": [None, {"function": None}]},
        {"role": "assistant", "content": None, "reasoning": ["why"], "tool_calls": {"0": 1}},
        {"role": "user", "content": deep},
    ]
    found, left_out = end_of(odd)
    assert left_out == 0
    assert [role for role, _ in found] == ["7", "?", "assistant", "user"]
    assert found[1][1] == "part\n(image)\nNone\n→ ?()\n→ ?()"
    assert found[3][1].startswith("it cannot be shown: RecursionError")
    found, left_out = end_of([{"role": "user", "content": "é" * 10**6}] * 100)
    assert sum(len(text) for _, text in found) <= END_CHARACTERS
    assert left_out + len(found) == 100
    assert found


def test_what_a_pod_shows_may_be_any_text_and_a_disk_that_refuses_stops_nothing(run: RunDir) -> None:
    said = PodLiveStatus({"t/p/0": LiveStatus(1, 2, True, 3.0)}, {"t/p/0": Transcript(1, [("user", "\udc80é")])})
    viewers = Viewers(run, "7_0.0")
    viewers.show(said)  # the directory was removed
    assert not run.live.exists()
    run.live.mkdir()
    viewers.show(said)
    shown = LiveFiles(run).status("7_0.0")
    assert shown is not None
    assert shown.rollouts == said.rollouts
    assert shown.transcripts["t/p/0"].messages == [("user", "\\udc80é")]
    viewers.leave()
    assert list(run.live.iterdir()) == []
    viewers.clear()
    assert not run.live.exists()
