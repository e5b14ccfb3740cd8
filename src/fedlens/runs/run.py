"""`run` and `resume`: an experiment from its description to its result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedlens.build import Setup, build
from fedlens.data import statistics
from fedlens.experiment import Experiment
from fedlens.rounds import State, begin
from fedlens.run_files import EXPERIMENT, MANIFEST, PARTITION, read_manifest
from fedlens.runs.active import ActiveRun, Result, Watch, run_to_end
from fedlens.runs.evaluate import Twin
from fedlens.runs.folder import RunFolder, check_free, readable_json
from fedlens.runs.manifest import manifest, partition_hash
from fedlens.runs.twin import trained


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    data: str | Path | None = None,
    watch: Watch | None = None,
) -> Result:
    """Run an experiment, and write its folder if `out` names one.

    `data` is where named data sets are looked for first; `watch` is called with each record and,
    before, with each pass of the centralised twin, if one is trained (see `twin.trained`).
    """
    if out is not None:
        check_free(Path(out), overwrite)
    setup = build(experiment, Path(data) if data is not None else None)
    (result,) = run_to_end([start(experiment, setup, out, overwrite=overwrite, watch=watch)])
    return result


def resume(
    path: str | Path,
    *,
    data: str | Path | None = None,
    watch: Watch | None = None,
    experiment: Experiment | None = None,
) -> Result:
    """Go on where a run stopped, to the result it would have had.

    `experiment` is needed only if the run's data or model were given from Python.
    """
    folder = RunFolder(Path(path))
    before = read_manifest(folder.path)
    experiment = as_begun(experiment or Experiment.read(folder.path / EXPERIMENT), before)
    setup = build(experiment, Path(data) if data is not None else None)
    (result,) = run_to_end([reopen(folder, setup, watch)])
    return result


def as_begun(experiment: Experiment, manifest: dict[str, Any]) -> Experiment:
    """With the engine and the precision that a run began with, whatever `auto` means here."""
    chosen = {key: manifest[key] for key in ("engine", "precision") if key in manifest}
    return replace(experiment, **chosen)


def start(
    experiment: Experiment,
    setup: Setup,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    watch: Watch | None = None,
) -> ActiveRun:
    """A run at its start; its folder is made if `out` names one."""
    twin = _twin(setup, watch)
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    folder = None
    if out is not None:
        files = {
            EXPERIMENT: experiment.toml(),
            MANIFEST: readable_json(manifest(setup)),
            PARTITION: readable_json(_partition(setup)),
        }
        folder = RunFolder.create(Path(out), overwrite, files)
    return ActiveRun(setup, state, folder, watch=watch, twin=twin)


def reopen(folder: RunFolder, setup: Setup, watch: Watch | None = None) -> ActiveRun:
    """A run where its last checkpoint is; `setup` is made of its own experiment."""
    path, before = folder.path, read_manifest(folder.path)
    if partition_hash(setup) != before["partition"]:
        raise ValueError(f"{path}: the data are not those it started with: find the old ones")
    if setup.weights and setup.weights.sha256 != before["weights"]["sha256"]:
        raise ValueError(f"{path}: {setup.weights.source} has changed: find the old file")
    twin = _twin(setup, watch)
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    if folder.last_saved is not None:
        saved = folder.load_state(setup.device)
        if _shapes(saved) != _shapes(state):
            raise ValueError(f"{path} was run with another model: put the old one back")
        state = saved
    return ActiveRun(setup, state, folder, folder.cut_records(state.round), watch, twin)


def _twin(setup: Setup, watch: Watch | None) -> Twin | None:
    return trained(setup, watch) if setup.experiment.evaluate.twin else None


def _partition(setup: Setup) -> dict[str, Any]:
    federation = setup.federation
    return statistics.summary(
        federation.described(), federation.labels, federation.num_classes, federation.num_clients
    )


def _shapes(state: State) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in (state.params | state.buffers).items()}
