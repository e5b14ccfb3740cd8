"""Whether two experiments are one: by what they say, whichever Fedlens wrote it down."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.experiment import Experiment
from fedlens.run_files import experiment_text, read_experiment
from fedlens.tables import to_toml


def as_today(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """An experiment's plain tables as they would be written today.

    A key that has come since has its default, which is what was done before there was the key.
    """
    try:
        return Experiment.of(tables).plain()
    except (ValueError, TypeError):  # a later Fedlens's, or damaged
        return tables


def text_of(folder: Path) -> str:
    """A run's experiment as it would be written today."""
    try:
        return to_toml(as_today(read_experiment(folder)))
    except ValueError:  # it is damaged
        return experiment_text(folder)


def is_run_of(folder: Path, experiment: Experiment) -> bool:
    """Whether the run in a folder has this experiment."""
    text = experiment.toml()
    return text in (experiment_text(folder), text_of(folder))
