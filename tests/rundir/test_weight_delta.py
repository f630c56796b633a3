"""Weights as a delta: small if little changed, and exact bit for bit."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir import weight_delta
from megaflow_hpc.rundir.weight_delta import put_together, write_delta
from megaflow_hpc.rundir.weight_source import base_of


def model(folder: Path, tensors: np.ndarray, dtype: str = "BF16") -> Path:
    """Make a model directory with one safetensors file."""
    folder.mkdir()
    header = json.dumps({"w": {"dtype": dtype, "shape": [tensors.size], "data_offsets": [0, tensors.nbytes]}}).encode()
    header += b" " * (-len(header) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + tensors.tobytes())
    (folder / "config.json").write_text("{}")
    return folder


def rounded(masters: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, to nearest even; return 16-bit words."""
    bits = masters.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def test_one_step_of_adam_at_a_small_rate_takes_a_tenth_of_the_bytes_or_less(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    masters = random.normal(0, 0.02, 1_000_000).astype(np.float32)
    step = np.float32(1e-6) * np.sign(random.normal(size=masters.size)).astype(
        np.float32
    )  # Adam's first step has this size for every gradient
    base = model(tmp_path / "base", rounded(masters))
    new = model(tmp_path / "new", rounded(masters + step))
    found = write_delta(new, base, 5, tmp_path / "delta")
    assert found is not None
    assert found[0] >= 10 * found[1]
    assert base_of(tmp_path / "delta") == 5
    whole = put_together(tmp_path / "delta", base, tmp_path / "whole")
    assert sorted(path.name for path in whole.iterdir()) == ["config.json", "model.safetensors"]
    assert (whole / "model.safetensors").read_bytes() == (new / "model.safetensors").read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), word=st.sampled_from([2, 4]), length=st.integers(0, 1500))
def test_any_part_comes_back_bit_for_bit(data: st.DataObject, word: int, length: int) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    old = random.bytes(length)
    share = data.draw(st.sampled_from([0.0, 0.002, 0.1, 1.0]))
    change = np.frombuffer(random.bytes(length), np.uint8) * (random.random(length) < share)
    new = (np.frombuffer(old, np.uint8) ^ change.astype(np.uint8)).tobytes()
    packed = weight_delta._encode(new, old, word)
    assert b"".join(weight_delta._decode(io.BytesIO(packed), io.BytesIO(old), word)) == new


def test_parts_are_taken_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_delta, "WORDS", 1000)
    random = np.random.default_rng(1)
    first = random.integers(0, 2**32, 3456, dtype=np.uint32)
    second = np.where(random.random(3456) < 0.01, first + 1, first).astype(np.uint32)
    base, new = model(tmp_path / "base", first, "F32"), model(tmp_path / "new", second, "F32")
    write_delta(new, base, 1, tmp_path / "delta")
    whole = put_together(tmp_path / "delta", base, tmp_path / "whole")
    assert (whole / "model.safetensors").read_bytes() == (new / "model.safetensors").read_bytes()


def test_what_does_not_come_out_as_it_was_published_is_refused(tmp_path: Path) -> None:
    words = np.arange(5000, dtype=np.uint16)
    base, new = model(tmp_path / "base", words), model(tmp_path / "new", words + (words % 7 == 0))
    write_delta(new, base, 1, tmp_path / "delta")
    other = model(tmp_path / "other", words + 1)
    with pytest.raises(ConfigError, match="SHA-256 differs"):
        put_together(tmp_path / "delta", other, tmp_path / "whole")
    with pytest.raises(ConfigError, match="cannot be combined"):
        put_together(tmp_path / "delta", tmp_path / "nowhere", tmp_path / "whole")
    file = tmp_path / "delta" / "model.safetensors.delta"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="cannot be combined"):
        put_together(tmp_path / "delta", base, tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "delta", "new", "other"]


def test_another_shape_is_no_delta(tmp_path: Path) -> None:
    base = model(tmp_path / "base", np.zeros(10, np.uint16))
    new = model(tmp_path / "new", np.zeros(11, np.uint16))
    assert write_delta(new, base, 1, tmp_path / "delta") is None
    assert not (tmp_path / "delta").exists()
    assert base_of(new) is None
