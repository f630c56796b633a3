from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Servers


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with Servers(tmp_path) as started:
        yield started
