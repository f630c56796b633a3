"""Images in the record: each is stored once, by content, and each placeholder span names its own."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import h5py
import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories import gather, open_trajectories, validate
from megaflow_hpc.trajectories.exports import export
from megaflow_hpc.trajectories.exports.jsonl import import_jsonl, line
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.journal.checks import checked
from megaflow_hpc.trajectories.journal.frames import read_journal
from megaflow_hpc.trajectories.maintenance.compact import compact
from megaflow_hpc.trajectory import Image, ImageSpan, TokenSequence, Trajectory, shown_images
from tests.support.samples import add_images, commit, image, run_dir, trajectory


def showing(number: int) -> Trajectory:
    """A trajectory with images in its sequences and in a message."""
    one = trajectory(number, sample_index=number)  # any change: without the images of the samples
    add_images(one, random.Random(number))
    return one


@pytest.fixture
def run(tmp_path):
    run = run_dir(tmp_path / "run")
    commit(run, "a", *((0, 0, showing(number)) for number in range(12)))
    return run


def records(path):
    with open_trajectories(path) as store:
        return [(row.images, [view.images for view in row.sequences], row.messages) for row in store]


def test_images_and_spans_come_back_from_journal_file_and_json_lines(run, tmp_path):
    expected = [(t.images, [tuple(s.images) for s in t.sequences], t.messages) for t in map(showing, range(12))]
    assert sum(len(spans) for _, sequences, _ in expected for spans in sequences) > 20
    live = records(run.path)
    assert [one[:2] for one in live] == [one[:2] for one in expected]
    assert all(shown_images(messages)[0] in images for images, _, messages in live)
    path = gather(run)
    assert validate(path) == []
    assert records(path) == live
    with open_trajectories(path) as store:
        (tmp_path / "lines.jsonl").write_bytes(b"".join(map(line, store)))
    assert import_jsonl(tmp_path / "lines.jsonl", tmp_path / "imported.h5") == 12
    assert records(tmp_path / "imported.h5") == live
    compact(path, tmp_path / "small.h5")
    assert validate(tmp_path / "small.h5") == []
    assert records(tmp_path / "small.h5") == live


def test_each_image_is_once_in_the_file(run):
    shown = {sha: one for number in range(12) for sha, one in showing(number).images.items()}
    with h5py.File(gather(run)) as file:
        assert len(file["image_uses/image"]) > len(file["images/sha256"]) == len(shown) == 5
        assert len(file["images/bytes"]) == sum(len(one.data) for one in shown.values())


def test_a_journal_holds_each_image_once_per_record(tmp_path):
    run = run_dir(tmp_path / "run")
    big = image(200, 150)
    one = trajectory(1, messages=[{"role": "user", "content": "x"}])
    one.images = {big.sha256: big}
    one.sequences[0].images = [ImageSpan(0, 1, big.sha256)]
    commit(run, "a", (0, 0, one))
    ((_, record),) = read_journal(run.journal_file("a", "0"))
    assert Trajectory.from_record(record["trajectory"]).images == one.images
    assert run.journal_file("a", "0").stat().st_size < 1.1 * len(big.data)


def test_thirty_screenshots_take_the_space_of_the_distinct_ones(tmp_path):
    """Thirty steps, of which each shows all before it, and every second screenshot is the one before."""
    run = run_dir(tmp_path / "run")
    screenshots = [image(320, 200, number // 2) for number in range(30)]
    one = trajectory(0, sequences=[TokenSequence("default")])
    for shown in screenshots:
        sequence = one.sequences[0]
        sequence.images.append(ImageSpan(len(sequence.tokens), 64, shown.sha256))
        for column, value in (("tokens", 7), ("logprobs", float("nan")), ("loss_mask", 0), ("weight_versions", -1)):
            getattr(sequence, column).extend([value] * 64)
        one.images[shown.sha256] = shown
        part = {"type": "image_url", "image_url": {"url": f"sha256:{shown.sha256}"}}
        one.messages.append({"role": "user", "content": [part]})
    commit(run, "a", (0, 0, replace(one, parents=[])))
    distinct = sum(len(shown.data) for shown in {shown.sha256: shown for shown in screenshots}.values())
    assert run.journal_file("a", "0").stat().st_size <= 1.1 * distinct
    assert gather(run).stat().st_size <= 1.1 * distinct


def image_of_bytes(data: bytes) -> Image:
    return Image(hashlib.sha256(data).hexdigest(), "image/png", 1, 1, data)


def test_thousands_of_images_are_written_checked_and_continued_in_few_reads(tmp_path, monkeypatch):
    """A read of HDF5 inflates a whole chunk, so reading image by image takes minutes for 100,000 images."""
    one = trajectory(1)
    (sequence,) = one.sequences
    for number in range(3000):
        shown = image_of_bytes(f"image {number}".encode())
        one.images[shown.sha256] = shown
        sequence.images.append(ImageSpan(len(sequence.tokens), 1, shown.sha256))
        for column, value in (("tokens", 7), ("logprobs", float("nan")), ("loss_mask", 0), ("weight_versions", -1)):
            getattr(sequence, column).append(value)
    path, reads = tmp_path / "many.h5", []
    get = h5py.Dataset.__getitem__
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda *args: reads.append(args) or get(*args))
    with TrajectoryWriter(path, "many") as writer:
        writer.append(one)
    with TrajectoryWriter(path, "many", append=True) as writer:
        writer.append(replace(one, id="task/default/2"))
    assert validate(path) == []
    assert len(reads) < 1000
    with h5py.File(path) as file:
        assert (len(file["images/sha256"]), len(file["image_uses/image"])) == (3000, 6000)
        assert file["images/bytes"].compression is None, "image files are compressed already"
    for column, entry, fault in (("images/bytes", 20_000, "image 2111:"), ("tokens/loss_mask", -9, "some of which")):
        with h5py.File(path, "r+") as file:
            before = file[column][entry]
            file[column][entry] = 1
        assert fault in "\n".join(validate(path))
        with h5py.File(path, "r+") as file:
            file[column][entry] = before


WRONG = {
    "outside the sequence": [ImageSpan(10**6, 1, image().sha256)],
    "overlapping": [ImageSpan(0, 1, image().sha256), ImageSpan(0, 1, image().sha256)],
    "empty": [ImageSpan(0, 0, image().sha256)],
    "unknown": [ImageSpan(0, 1, "0" * 64)],
    "text": [ImageSpan(0, "1", image().sha256)],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_span_that_is_wrong_is_refused(wrong):
    one = trajectory(1)
    one.images = {image().sha256: image()}
    one.sequences[0].images = [ImageSpan(0, 1, image().sha256)]
    assert checked(one) is one
    one.sequences[0].images = WRONG[wrong]
    with pytest.raises((ValueError, TypeError)):
        checked(one)


@pytest.mark.parametrize("change", [{"data": b"x"}, {"width": 0}, {"media_type": "text/html"}, {"sha256": "x"}])
def test_an_image_that_is_wrong_is_refused_and_costs_no_more_than_its_tokens(change, tmp_path):
    one = trajectory(1)
    wrong = replace(image(), **change)
    one.images = {wrong.sha256: wrong}
    with pytest.raises(ValueError):  # noqa: PT011
        checked(one)
    run = run_dir(tmp_path / "run")
    commit(run, "a", (0, 0, one))
    with open_trajectories(gather(run)) as store:
        assert (store[0].images, store[0].sequences, store[0].reward) == ({}, [], one.reward)
        assert "tokens lost" in store[0].error


@pytest.mark.parametrize(
    ("column", "value"), [("sha256", b"../../../etc/passwd"), ("media_type", b"image/../x"), ("bytes", 1)]
)
def test_a_file_of_others_names_no_path_and_no_other_bytes(run, tmp_path, column, value):
    path = gather(run)
    with h5py.File(path, "r+") as file:
        file[f"images/{column}"][0 if column != "bytes" else 30] = value
    with open_trajectories(path) as store, pytest.raises(ConfigError, match="megaflow-hpc validate"):
        export(store, ["atif"], tmp_path / "out")
    assert not list(tmp_path.rglob("passwd*"))


def test_a_sequence_is_never_cut_inside_an_image():
    one = trajectory(1).sequences[0]
    one.images = [ImageSpan(0, 3, "a"), ImageSpan(4, 3, "b")]
    assert len(one.first(3).tokens) == 3
    for count in (4, 5, 6):
        cut = one.first(count)
        assert (len(cut.tokens), cut.images) == (4, one.images[:1])
    assert (len(one.first(7).tokens), one.first(7).images) == (7, one.images)
