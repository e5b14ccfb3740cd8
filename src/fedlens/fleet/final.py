"""The final model at a site: a folder that `predict`, `evaluate` and `export` take as a run's."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedlens.config.experiment import Experiment, Named
from fedlens.config.sections import Evaluate
from fedlens.core import Tree
from fedlens.evaluation.reliability import Calibration
from fedlens.fleet.terms import Terms
from fedlens.network.low_rank import merged
from fedlens.runs.folder import to_bytes
from fedlens.runs.manifest import as_prepared, versions
from fedlens.storage.files import write_atomically
from fedlens.storage.run_files import EVALUATION, EXPERIMENT, MANIFEST, MODEL, ROUNDS, to_json


def place_of(home: Path, experiment: str) -> Path:
    """Where a site keeps the final model of the experiment with this hash."""
    return home / "models" / experiment[:12]


def keep(
    home: Path, terms: Terms, experiment: Experiment, model: Tree, calibration: Any = None
) -> None:
    """Write the model, and what is needed to use it: the site's own images are not named.

    `calibration` is what the server found for the model, if it did.
    """
    data, place = terms.content.data, place_of(home, terms.hash)
    stated = {"classes": list(data.classes), "shape": list(data.shape), "fit": data.fit}
    several = {"multi_label": True} if data.multi_label else {}
    dataset = Named("at-sites", stated | several)
    described = replace(experiment, dataset=dataset, evaluate=Evaluate(on=()))
    tensors = merged(model)
    manifest = {
        **versions(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "classes": list(data.classes),
        **several,
        "images": as_prepared(data.shape, data.mean, data.std, data.fit),
    }
    write_atomically(place / EXPERIMENT, described.toml().encode())
    write_atomically(place / MANIFEST, to_json(manifest, indent=1).encode())
    write_atomically(place / ROUNDS, b"")
    evaluation = {"calibration": calibration}
    if Calibration.of(evaluation, MODEL) is not None:
        write_atomically(place / EVALUATION, to_json(evaluation).encode())
    write_atomically(place / MODEL, to_bytes(tensors))
