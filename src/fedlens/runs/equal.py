"""Whether two experiments are equal, also if different versions of Fedlens wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.config.experiment import Experiment
from fedlens.storage.run_files import experiment_text, read_experiment
from fedlens.storage.tables import to_toml


def as_today(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """An experiment's plain tables as this version of Fedlens writes them.

    A key that was added since has its default, which is how Fedlens behaved before the key existed.
    """
    try:
        return Experiment.of(tables).plain()
    except (ValueError, TypeError):  # from a later version, or damaged
        return tables


def text_of(folder: Path) -> str:
    """A run's experiment as this version of Fedlens writes it."""
    try:
        return to_toml(as_today(read_experiment(folder)))
    except ValueError:  # it is damaged
        return experiment_text(folder)


def is_run_of(folder: Path, experiment: Experiment) -> bool:
    """Whether the run in a folder has this experiment."""
    text = experiment.toml()
    return text in (experiment_text(folder), text_of(folder))
