from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.run_folders import make_run, write_run


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes run folders under `tmp_path`, by name."""
    return lambda name, **how: make_run(tmp_path / name, **how)


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Path]:
    """Makes run folders under `tmp_path` from the very lines that their rounds recorded."""

    def record(name: str, lines: list[dict[str, Any]], status: str = "finished") -> Path:
        write_run(tmp_path / name, lines, status)
        return tmp_path / name

    return record
