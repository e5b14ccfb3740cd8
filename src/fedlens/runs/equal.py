"""Whether two experiments are one: by what they say, whichever Fedlens wrote it down."""

from __future__ import annotations

from pathlib import Path

from fedlens.experiment import Experiment
from fedlens.run_files import experiment_text, read_experiment


def text_of(folder: Path) -> str:
    """A run's experiment as it would be written today.

    A key that has come since has its default, which is what was done before there was the key.
    """
    try:
        return Experiment.of(read_experiment(folder)).toml()
    except ValueError:  # a later Fedlens's, or damaged
        return experiment_text(folder)


def is_run_of(folder: Path, experiment: Experiment) -> bool:
    """Whether the run in a folder has this experiment."""
    text = experiment.toml()
    return text in (experiment_text(folder), text_of(folder))
