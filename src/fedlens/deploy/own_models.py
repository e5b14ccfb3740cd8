"""The model of one client of a run, where clients have models of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fedlens.config.experiment import Experiment
from fedlens.core import Tree
from fedlens.network.low_rank import merged
from fedlens.runs.folder import RunFolder
from fedlens.runs.run import as_begun
from fedlens.runs.twin import tuned_model
from fedlens.setup import build
from fedlens.setup.algorithm import make_algorithm
from fedlens.storage.run_files import EXPERIMENT, PARTITION, read_json, read_manifest


def of_client(folder: Path, client: str, *, best: bool = False, trust_code: bool = False) -> Tree:
    """The tensors of the model that a client is measured by.

    If it tunes the model at the end, it does so again, to the same bytes: the data are needed.
    """
    if best:
        raise ValueError("--best is a model of all clients: leave it or --client out")
    partition = read_json(folder / PARTITION) or {}
    count = int(partition.get("num_clients", 0))
    names = [str(name) for name in partition.get("client_names") or range(count)]
    if client not in names:
        few = ", ".join([*names[:10], *["..."] * (len(names) > 10)])
        raise ValueError(f"{folder} has no client {client!r}: choose one of {few}")
    described = Experiment.read(folder / EXPERIMENT, trust_code=trust_code)
    described = replace(described, clients=replace(described.clients, count=count))
    algorithm, number = make_algorithm(described), names.index(client)
    if algorithm.personal is None:
        raise ValueError(
            f"{folder} has one model for all clients: leave --client out, or run it with an "
            "algorithm for personal models, such as ditto"
        )
    saved = RunFolder(folder).load_checkpoint(torch.device("cpu"))
    if saved is None:
        raise ValueError(f"{folder} kept no checkpoint, which has clients' models: run it again")
    state = saved.state
    model = algorithm.model_of(state.params | state.buffers, state.clients.rows.get(number, {}))
    if not algorithm.personal.tune and described.lora is None:
        return model
    setup = build(as_begun(described, read_manifest(folder)))
    model = {name: t.to(setup.device) for name, t in model.items()}
    return merged(tuned_model(setup, model, number) | setup.network.frozen)
