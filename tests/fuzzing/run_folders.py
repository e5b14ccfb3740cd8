"""Run folders, and files of weights."""

from __future__ import annotations

import io
import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from fedlens.models.weights import load_weights
from fedlens.report.page import html
from fedlens.report.runs import headline, run_blocks
from fedlens.runs.folder import RunFolder
from fedlens.runs.records import read_all
from fedlens.storage.run_files import checksum
from tests.fuzzing.cases import (
    TOML,
    TOML_WORDS,
    Data,
    Read,
    Reader,
    altered,
    other_json,
    other_text,
    spoilt,
)

STATE = {"1.weight": torch.zeros(3, 25), "1.bias": torch.zeros(3)}


def other_state(data: Data) -> Any:
    kinds: list[Any] = [
        {**STATE, 7: torch.zeros(2)},
        {1: torch.zeros(2)},
        {**STATE, "1.bias": torch.zeros(3).to_sparse()},
        {**STATE, "1.bias": torch.zeros(3, device="meta")},
        {**STATE, "1.weight": torch.zeros(1).expand(3, 25)},
        {**STATE, "1.bias": torch.zeros(3, dtype=torch.complex64)},
        {**STATE, "1.bias": 5},
        {"model": STATE},
        [torch.zeros(3)],
        torch.zeros(3),
        {},
        {**STATE, "1.bias": torch.zeros(())},
        {**STATE, "1.bias": torch.zeros(3, dtype=torch.bool)},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch is about to drop quantised tensors
        kinds.append(
            {**STATE, "1.bias": torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)}
        )
    return data.draw(st.sampled_from(kinds))


def read_weights(place: Path, data: Data) -> tuple[Path, Read]:
    kind = data.draw(st.sampled_from(["safetensors", "pth", "pt"]))
    file = place / f"a.{kind}"
    if kind == "safetensors":
        file.write_bytes(spoilt(data, save(STATE)))
    else:
        made = io.BytesIO()
        other = data.draw(st.booleans())
        old = data.draw(st.booleans())
        torch.save(
            other_state(data) if other else STATE, made, _use_new_zipfile_serialization=not old
        )
        file.write_bytes(made.getvalue() if other else spoilt(data, made.getvalue()))
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(25, 3))
    return file, lambda: load_weights(module, str(file))


RUN: dict[str, Any] = {
    "manifest.json": {
        **{"partition": "abc", "engine": "sequential", "precision": "fp32", "seed": 3, "code": []},
        **{"classes": ["a", "b"], "parameters": 10, "weights": None, "device": "cpu"},
    },
    "summary.json": {
        **{"status": "finished", "rounds": 2, "final": {"test_accuracy": 0.5}, "emd": 0.5},
        **{"best": {"test_accuracy": {"value": 0.5, "round": 2}}, "seconds": {"total": 3.0}},
        **{"twin": {"accuracy": 0.9}, "bytes_up": 10, "peak_memory_bytes": 10},
    },
    "partition.json": {"num_clients": 2, "label_counts": [[1, 2], [3, 4]]},
    "evaluation.json": {"confusion": [[1, 2, 0], [0, 1, 0]], "client_accuracy": [0.5, 0.7]},
    "checkpoint/state-000002.json": {
        "round": 2,
        "sha256": "",
        "records": {"num_records": 2, "num_bytes": 400, "sha256": ""},
        "state": {},
    },
}
ROUNDS = [
    {"round": i, "test_accuracy": 0.5, "test_loss": 1.0, "train_loss": 1.0, "seconds": 1.0,
     "bytes_up": 1, "bytes_down": 1, "client_accuracy_median": 0.5, "client_accuracy_min": 0.1,
     "client_accuracy_max": 0.9, "client_accuracy_p10": 0.2, "relative_accuracy": 0.7}
    for i in (1, 2)
]  # fmt: skip


def read_run(place: Path, data: Data) -> tuple[Path, Read]:
    folder = place / "run"
    (folder / "checkpoint").mkdir(parents=True)
    wrong = data.draw(st.sampled_from([*RUN, "rounds.jsonl", "experiment.toml"]))
    for name, content in RUN.items():
        made = other_json(data, content) if name == wrong else json.dumps(content).encode()
        if name.startswith("checkpoint"):
            with suppress(ValueError, RecursionError):  # signed, as whoever altered it could do
                index = json.loads(made)
                made = json.dumps({"sha256": checksum(index), "index": index}).encode()
        (folder / name).write_bytes(made)
    rounds = altered(data, ROUNDS) if wrong == "rounds.jsonl" else ROUNDS
    lines = rounds if isinstance(rounds, list) else [rounds]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    toml = other_text(data, TOML, TOML_WORDS) if wrong == "experiment.toml" else TOML.encode()
    (folder / "experiment.toml").write_bytes(toml)

    def read() -> None:
        runs = read_all([folder])
        html("a", headline(runs), run_blocks(runs), str)
        RunFolder(folder).load_checkpoint(torch.device("cpu"))

    return folder, read


READERS: dict[str, Reader] = {"weights": read_weights, "run": read_run}
