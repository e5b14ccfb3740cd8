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


@pytest.fixture
def variants(recorded: Callable[..., Path], quick_pages: None) -> Callable[..., list[Path]]:
    """Makes runs from accuracies: by algorithm, one a seed; each reaches half of it in round 1."""

    def make(
        finals: dict[str, list[float]], dataset: str = "digits", lr: float = 0.1
    ) -> list[Path]:
        folders = []
        for algorithm, values in finals.items():
            for seed, value in enumerate(values):
                spent = {"bytes_up": 500_000, "bytes_down": 1_500_000}
                lines = [{"round": n, "test_accuracy": value * n / 2, **spent} for n in (1, 2)]
                folder = recorded(f"{dataset}/{algorithm}-{lr}-{seed}", lines)
                (folder / "experiment.toml").write_text(
                    f'dataset = "{dataset}"\nmodel = "mlp"\nrounds = 2\nseed = {seed}\n'
                    f'local = {{ lr = {lr} }}\n[[algorithm]]\nname = "{algorithm}"\n'
                )
                folders.append(folder)
        return folders

    return make
