"""Small sweeps, and whether their points end as each would alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedlens as fl
from fedlens.runs.records import Record
from tests.toys import toy

DATASET = toy(96, 6)
LOST = 1e30  # a weight decay that ends in infinity


def base(**changes: Any) -> fl.Experiment:
    described: dict[str, Any] = {
        "dataset": DATASET,
        "model": "linear",
        "rounds": 3,
        "engine": "stacked",
        "clients": fl.Clients(12, 4, fl.Named("dirichlet", {"alpha": 1.0}), holdout=0.1),
        "local": fl.LocalTraining(batch_size=4, lr=0.1),
    }
    return fl.Experiment(**described | changes)


def records(folder: Path) -> list[Record]:
    """What a run recorded, but for how long it took."""
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "seconds" not in k} for line in lines]


def told(folder: Path) -> dict[str, Any]:
    """What its summary says, but for what it took."""
    summary = json.loads((folder / "summary.json").read_text())
    return {
        k: v
        for k, v in summary.items()
        if k not in ("seconds", "peak_memory_bytes", "padding_share")
    }


def assert_alone(points: dict[str, fl.Experiment], out: Path, exact: bool) -> None:
    """Every folder is what a run of the point by itself writes."""
    for name, experiment in points.items():
        alone = out.parent / f"{out.name} alone" / name
        fl.run(experiment, alone)
        for line, expected in zip(records(out / name), records(alone), strict=True):
            for listed in ("clients", "client_accuracy"):
                assert line.pop(listed, None) == expected.pop(listed, None)
            assert line == (expected if exact else pytest.approx(expected, rel=1e-9))
        assert told(out / name)["status"] == told(alone)["status"]
        for file in ("experiment.toml", "partition.json"):
            assert (out / name / file).read_bytes() == (alone / file).read_bytes()
        found, wanted = (load_file(folder / "model.safetensors") for folder in (out / name, alone))
        for key, tensor in wanted.items():
            if exact:
                assert torch.equal(found[key], tensor), key
            else:
                torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-12)
        if exact:
            assert told(out / name) == told(alone)
