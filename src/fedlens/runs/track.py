"""Records are also sent to trackers: TensorBoard, Weights & Biases, MLflow or trackio.

A sink is a context manager that yields a function of measures and their round. Each uses a package
of the extra `[track]`, which is imported only if that tracker is chosen.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from fedlens.config.options import did_you_mean
from fedlens.runs.progress import Watch
from fedlens.runs.records import Record, is_number, settings

Log = Callable[[Mapping[str, float], int], Any]
Sink = Callable[[Any, Path, Mapping[str, Any]], AbstractContextManager[Log]]
PROJECT = "fedlens"  # the project name of all runs, in every tracker


@contextmanager
def tensorboard(package: Any, folder: Path, described: Mapping[str, Any]) -> Iterator[Log]:
    """Event files in RUN/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        writer.add_text("experiment", "\n".join(f"- {k}: {v}" for k, v in described.items()))
        yield lambda measures, round: [writer.add_scalar(k, v, round) for k, v in measures.items()]


@contextmanager
def wandb(package: Any, folder: Path, described: Mapping[str, Any]) -> Iterator[Log]:
    """A run of the project `fedlens`, its files in RUN/wandb."""
    with package.init(
        project=PROJECT, name=folder.name, config=dict(described), dir=str(folder)
    ) as run:
        yield lambda measures, round: run.log(dict(measures), step=round)


@contextmanager
def mlflow(package: Any, folder: Path, described: Mapping[str, Any]) -> Iterator[Log]:
    """A run of the experiment `fedlens`, stored where MLflow is configured to store it."""
    package.set_experiment(PROJECT)
    with package.start_run(run_name=folder.name):
        package.log_params(described)
        yield lambda measures, round: package.log_metrics(measures, step=round)


@contextmanager
def trackio(package: Any, folder: Path, described: Mapping[str, Any]) -> Iterator[Log]:
    """A run of the project `fedlens`, stored where trackio stores its runs."""
    with redirect_stdout(sys.stderr):  # trackio prints; our stdout is for results only
        package.init(project=PROJECT, name=folder.name, config=dict(described))
    try:
        yield lambda measures, round: package.log(dict(measures), step=round)
    finally:
        with redirect_stdout(sys.stderr):
            package.finish()


SINKS: dict[str, Sink] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
    "trackio": trackio,
}


@contextmanager
def tracking(
    names: str | Sequence[str], folder: str | Path, experiment: Mapping[str, Any]
) -> Iterator[Watch]:
    """A watch for `fl.run` that sends every record to the tracker or trackers named.

    `folder` is the run folder, `experiment` its plain tables. A missing package raises here, before
    anything runs; trackers start with the first record, when the run folder exists.
    """
    packages = {name: _package(name) for name in ([names] if isinstance(names, str) else names)}
    folder, logs = Path(folder), list[Log]()
    with ExitStack() as stack:

        def send(record: Record) -> None:
            if "round" not in record:  # progress outside of rounds
                return
            if not logs:
                for name, package in packages.items():
                    sink = SINKS[name](package, folder, settings(experiment))
                    logs.append(stack.enter_context(sink))
            measures = {k: float(v) for k, v in record.items() if k != "round" and is_number(v)}
            for log in logs:
                log(measures, record["round"])

        yield send


def _package(name: str) -> Any:
    if name not in SINKS:
        raise ValueError(f"unknown tracker {name!r}: {did_you_mean(name, SINKS)}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"tracking with {name} needs the package {name} ({error}): `pip install {name}`, or "
            "`pip install 'fedlens[track]'` for all trackers"
        ) from error
