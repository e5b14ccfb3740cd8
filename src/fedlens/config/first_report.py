"""The config.json of the FedAvg report, whose code is that of "Practicing Federated Learning"."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedlens.config.names import MODELS
from fedlens.config.options import did_you_mean, refuse_unknown

PLACES = {
    "model_name": "model",
    "type": "dataset",
    "no_models": "clients.count",
    "k": "clients.per_round",
    "global_epochs": "rounds",
    "local_epochs": "local.epochs",
    "batch_size": "local.batch_size",
    "lr": "local.lr",
    "momentum": "local.momentum",
    "lambda": "algorithm.lambda-sum.lambda",
}
"""Its keys, and ours."""

BOOK: dict[str, Any] = {
    "model_name": "resnet18",
    "no_models": 10,
    "type": "cifar",
    "global_epochs": 20,
    "local_epochs": 3,
    "k": 5,
    "batch_size": 32,
    "lr": 0.001,
    "momentum": 0.0001,
    "lambda": 0.1,
}
"""The book's values, of keys that are left out."""

DATASETS = {"cifar": "cifar10", "mnist": "mnist"}
OUTPUTS = 1000  # of ImageNet's head, which the code leaves in place


def imported(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The experiment that a file describes, as plain tables, and lines on what became of what."""
    refuse_unknown(content, PLACES, "")
    values = {**BOOK, **content}
    kind, model = values["type"], values["model_name"]
    if kind not in DATASETS:
        raise ValueError(f"type is {kind!r}: {did_you_mean(str(kind), DATASETS)}")
    if model not in MODELS:
        raise ValueError(f"model_name is {model!r}: {did_you_mean(str(model), MODELS)}")
    tables: dict[str, Any] = {
        "dataset": DATASETS[kind],
        "model": model,
        "rounds": values["global_epochs"],
        "outputs": OUTPUTS,
        "clients": {
            "count": values["no_models"],
            "per_round": values["k"],
            "partition": {"name": "proportions", "sizes": "homogeneous", "order": "stored"},
        },
        "local": {
            "epochs": values["local_epochs"],
            "batch_size": values["batch_size"],
            "lr": values["lr"],
            "momentum": values["momentum"],
        },
        "algorithm": [{"name": "lambda-sum", "lambda": values["lambda"]}],
    }
    if kind == "cifar":
        tables["augment"] = {"crop": 4, "flip": True}
    else:
        tables["normalise"] = "none"
    ours = values | {"type": tables["dataset"]}
    lines = [
        f"{key}: now {place} = {json.dumps(ours[key])}"
        for key, place in PLACES.items()
        if key in content
    ]
    lines += [
        f"assumed: {key} is {values[key]}, as in the book" for key in PLACES if key not in content
    ]
    pixels = "are left as 0 to 1"
    if kind == "cifar":
        pixels = "are cropped, flipped and normalised"
    return tables, [
        *lines,
        f"assumed: images {pixels}, as in the book",
        "assumed: equal clients in the order of the files, as the printed code cuts them; for "
        'unequal ones set sizes = "low" or "high"',
        f"assumed: a head of {OUTPUTS:,} outputs, which the code leaves in place; else remove it",
        "missing: the book starts from ImageNet weights; set weights to torchvision's file, or it "
        "starts from scratch",
    ]
