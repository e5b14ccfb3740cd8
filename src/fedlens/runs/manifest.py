"""The manifest: what a run depends on besides its experiment (versions, machine, data, code)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlens.config.experiment import Experiment, Named
from fedlens.config.names import own_names
from fedlens.config.schedules import looked_at, value_at
from fedlens.core.federation import Fit
from fedlens.runs.records import settings
from fedlens.setup import Setup
from fedlens.setup.network import normalisation
from fedlens.storage.free_memory import num_cores
from fedlens.storage.reading import Fields, demand_fields, expanded
from fedlens.storage.run_files import (
    EXPERIMENT,
    MANIFEST,
    OVER,
    RERUN,
    experiment_text,
    last_saved,
    read_experiment,
    read_status,
    to_json,
)
from fedlens.storage.tables import to_toml
from fedlens.version import __version__

SAID = ("fedlens", "revision", "python", "torch", "numpy", "device", "threads")
"""Entries that may differ when a run is resumed; a warning says that results may then differ."""

MAY_MOVE = {
    "dataset.path": "data",
    "weights": "weights",
    "clients.partition.path": "partition",
    "clients.partition.of.path": "partition",
    "clients.devices.path": "devices_sha256",
}
"""Settings that are paths, and the manifest entry with the hash of the file's content."""

logger = logging.getLogger(__name__)


def manifest(setup: Setup) -> dict[str, Any]:
    """The manifest of a run at its start."""
    privacy = setup.experiment.privacy
    return {
        **machine(setup),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "engine": setup.engine.name,
        "precision": setup.experiment.precision,
        "at_once": setup.engine.at_once,
        "seed": setup.experiment.seed,
        "resumed": [],
        "data": setup.dataset.digest,
        "test_data": setup.dataset.test_digest,
        "partition": setup.federation.described().digest(),
        "devices_sha256": _devices_file(setup.experiment),
        "parameters": setup.network.num_parameters,
        "weights": setup.weights._asdict() if setup.weights else None,
        "classes": list(setup.dataset.classes),
        **({"multi_label": True} if setup.dataset.multi_label else {}),
        "left_out": [one._asdict() for one in setup.dataset.left_out],
        "images": _images(setup),
        "code": _own_code(setup.experiment),
        "code_sha256": _hashes(_own_files(setup.experiment)),
        **({} if privacy is None else {"run_id": setup.run_id}),
        **({} if privacy is None or privacy.ledger is None else {"salt": setup.salt}),
    }


def check_settings(folder: Path, experiment: Experiment, before: Mapping[str, Any]) -> None:
    """Raise if a run would be resumed with other settings than it was started with.

    `rounds` may differ, if they are at least those done and the last one is evaluated. Files may
    have moved: `check_unchanged` compares their content.
    """
    if "settings" not in before:
        return
    file = folder / MANIFEST
    demand_fields(before, {"settings": dict}, file, RERUN)
    demand_fields(before["settings"], {"rounds": int}, file, RERUN)
    done = last_saved(folder) or 0
    ends_there = read_status(folder) in OVER or experiment.evaluate.is_due(done, done + 1)
    fewest = done if ends_there else done + 1
    begun = as_today(before["settings"])
    old, new = (settings(json.loads(to_json(s))) for s in (begun, experiment.plain()))
    noise, differs = experiment.privacy, old["rounds"] != new["rounds"]
    if noise and differs and (noise.epsilon is not None or noise.mechanism.name != "gaussian"):
        raise ValueError(
            f"{folder} has noise for {old['rounds']} rounds, and cannot have {new['rounds']}: "
            "start a new run, next time with privacy.noise and gaussian noise"
        )
    for key in [*old, *(key for key in new if key not in old)]:
        was, now = old.get(key), new.get(key)
        if was == now or (key == "rounds" and experiment.rounds >= fewest):
            continue
        if was and now and before.get(MAY_MOVE.get(key, "")):
            continue
        if key == "rounds":
            why = "" if fewest == done else ", the last of which was not evaluated"
            raise ValueError(f"{folder} has done {done} rounds{why}: ask for {fewest} or more")
        put_back = f"put it back in {EXPERIMENT}"
        raise ValueError(f"{folder} was started with {key} = {was!r}, not {now!r}: {put_back}")
    rounds = before["settings"]["rounds"]
    for key, schedule in experiment.schedules.items():
        for round in looked_at(done) if done and experiment.rounds != rounds else ():
            if value_at(schedule, round, rounds) != value_at(schedule, round, experiment.rounds):
                raise ValueError(
                    f"{folder} has {key} scheduled over {rounds} rounds, and cannot have "
                    f"{experiment.rounds}: start a new run, or set the `rounds` of the "
                    "schedule next time"
                )


def check_there(folder: Path, experiment: Experiment) -> None:
    """Raise if a file or folder named by the user is missing; say where to set its path."""
    flat = settings(experiment.plain())
    for key in MAY_MOVE:
        place, of = flat.get(key), str(flat.get(key.removesuffix(".path")))
        if not isinstance(place, str) or ":" in of:  # a URL, or an option of a user's function
            continue
        demand_there(expanded(place), key, folder)


def demand_there(place: Path, key: str, folder: Path) -> None:
    """Raise if the path in the setting `key` of a run does not exist."""
    if not place.exists():
        file = folder / EXPERIMENT
        raise ValueError(f"{place} is gone: if it was moved, set {key} in {file} to where it is")


def check_unchanged(folder: Path, setup: Setup, before: Mapping[str, Any]) -> None:
    """Raise if a run would be resumed with other data than at its start; log other differences."""
    known: Fields = {"partition": str} | ({"weights": dict} if setup.weights else {})
    demand_fields(before, known, folder / MANIFEST, RERUN)
    remedy = "the data are not those it started with: put the old ones back"
    if before.get("data", setup.dataset.digest) != setup.dataset.digest:
        given = setup.experiment.dataset
        own = given.options.get("path") if isinstance(given, Named) else None
        name = own or setup.dataset.name
        raise ValueError(f"{folder}: {remedy} (images or labels of {name} differ)")
    if before["partition"] != setup.federation.described().digest():
        raise ValueError(f"{folder}: {remedy} (clients hold other examples)")
    if setup.weights and setup.weights.sha256 != before["weights"].get("sha256"):
        raise ValueError(f"{folder}: {setup.weights.source} has changed: put the old file back")
    devices = before.get("devices_sha256")
    if devices and devices != _devices_file(setup.experiment):
        raise ValueError(f"{folder}: clients.devices.path has changed: put the old file back")
    code = before.get("code_sha256")
    mine = _hashes(_own_files(setup.experiment))
    changed = [name for name in mine if isinstance(code, dict) and code.get(name) != mine[name]]
    if changed:
        names = ", ".join(changed)
        logger.warning(
            "%s was started with another %s: its rounds differ from then on", folder, names
        )
    now = machine(setup)
    was = {key: before.get(key, "an unknown one") for key in SAID}
    other = [f"{key} {was[key]}, now {now[key]}" for key in SAID if was[key] != now[key]]
    if other:
        logger.warning("%s was started with %s: its bytes may differ", folder, "; ".join(other))


def versions() -> dict[str, str | None]:
    """The versions that the exact results of a run may depend on."""
    return {
        "fedlens": __version__,
        "revision": _revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def machine(setup: Setup) -> dict[str, Any]:
    """What the exact results and the speed of a run may depend on besides its experiment."""
    return {
        **versions(),
        "device": ", ".join(_name(setup, device) for device in setup.devices),
        "threads": setup.threads,
    }


def as_it_began(setup: Setup, before: Mapping[str, Any], folder: Path) -> Setup:
    """The setup of a resumed run as it began, with the same noise.

    It has the same threads, for others round differently, but no more than there are cores, which
    would wait for each other.
    """
    given = {"threads": 1, "run_id": setup.run_id, "salt": 0, **before}  # older runs have no salt
    own = demand_fields(
        given, {"threads": int, "run_id": str, "salt": int}, folder / MANIFEST, RERUN
    )
    threads = max(min(own["threads"], num_cores()), 1)
    return replace(setup, threads=threads, run_id=own["run_id"], salt=own["salt"])


def going_on(before: Mapping[str, Any], setup: Setup, done: int, folder: Path) -> dict[str, Any]:
    """The manifest of a run that is resumed after `done` rounds.

    Its `resumed` lists the versions and the machine that trained later rounds, from each round
    after which they changed.
    """
    file, now = folder / MANIFEST, machine(setup)
    listed = demand_fields({"resumed": [], **before}, {"resumed": list}, file, RERUN)["resumed"]
    known = [demand_fields(one, {"after_round": int}, file, RERUN) for one in listed]
    resumed = [one for one in known if one["after_round"] < done]
    latest = resumed[-1] if resumed else before
    if {key: latest.get(key) for key in now} != now:
        resumed.append({"after_round": done, **now})
    return {**before, "resumed": resumed}


def _images(setup: Setup) -> dict[str, Any]:
    """How images are prepared for the model, so that later predictions do the same."""
    dataset = setup.dataset
    mean, std = normalisation(setup.experiment, dataset)
    floats = dataset.train.images.is_floating_point()
    return as_prepared(dataset.shape, mean, std, dataset.fit, floats)


def as_prepared(
    shape: Sequence[int],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    fit: Fit,
    floats: bool = False,
) -> dict[str, Any]:
    """The entry `images`."""
    return {
        "shape": list(shape),
        "mean": list(mean or [0.0] * shape[0]),
        "std": list(std or [1.0] * shape[0]),
        "floats": floats,
        "fit": fit,
    }


def _name(setup: Setup, device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else setup.engine.device_name(device)


def _devices_file(experiment: Experiment) -> str | None:
    """A hash of the file that describes the clients' devices, if there is one."""
    devices = experiment.clients.devices
    path = expanded(str(devices.options.get("path") or "")) if devices else Path()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _own_code(experiment: Experiment) -> list[str]:
    """The folders of functions named by import path, where a resumed run looks for them."""
    files = {name: file.resolve() for name, file in _own_files(experiment).items()}
    depths = {name: name.count(".") + (file.name == "__init__.py") for name, file in files.items()}
    return sorted({str(file.parents[depths[name]]) for name, file in files.items()})


def _own_files(experiment: Experiment) -> dict[str, Path]:
    """The files of these functions by module, if they have some; without what these import."""
    modules = sorted({name.partition(":")[0] for name in own_names(experiment.plain())})
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return {name: Path(file) for name, file in files.items() if file and Path(file).is_file()}


def _hashes(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def typed_functions(experiment: Experiment) -> dict[str, Any]:
    """The functions of a notebook or script that it names: other processes cannot import them."""
    main = sys.modules["__main__"]
    parts = [name.partition(":") for name in own_names(experiment.plain())]
    return {name: getattr(main, name) for module, _, name in parts if module == "__main__"}


@functools.cache  # imported code does not change while it runs
def _revision() -> str | None:
    """The git commit of Fedlens, if it runs from a checkout."""
    home = Path(__file__).resolve().parents[3]
    if not (home / ".git").exists():
        return None
    command = ["git", "-C", str(home), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    return None


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
