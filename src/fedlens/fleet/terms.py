"""The terms of an experiment, as text with a hash. A site approves them, and runs nothing else."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fedlens.algorithm import Algorithm
from fedlens.data.partitions import natural_column
from fedlens.experiment import NUM_CLIENTS, Clients, Evaluate, Experiment, Named
from fedlens.federation import Dataset, Examples
from fedlens.runs.beforehand import epochs_without_effect
from fedlens.setup.algorithm import make_algorithm
from fedlens.setup.network import normalisation
from fedlens.version import __version__

logger = logging.getLogger(__name__)

NOT_TOLD = (
    "dataset",
    "device",
    "evaluate",
    "faults",
    "normalise",
    "reporting",
    "stop",
    "weights",
    "weights_sha256",
)
"""The keys of an experiment that only the server uses, and that sites do not receive."""


@dataclass(frozen=True)
class Terms:
    """An experiment as a site sees it. Terms that differ in anything have different hashes."""

    text: str  # JSON: fedlens, experiment, data

    @classmethod
    def of(cls, experiment: Experiment, dataset: Dataset) -> Terms:
        check_possible(experiment)
        tables = {k: v for k, v in experiment.plain().items() if k not in NOT_TOLD}
        clients = dict(tables["clients"])
        tables["clients"] = {k: v for k, v in clients.items() if k not in ("count", "partition")}
        mean, std = normalisation(experiment, dataset)
        data = {
            "classes": list(dataset.classes),
            "shape": list(dataset.shape),
            "mean": None if mean is None else list(mean),
            "std": None if std is None else list(std),
        }
        content = {"fedlens": __version__, "experiment": tables, "data": data}
        return cls(json.dumps(content, sort_keys=True, ensure_ascii=True, allow_nan=False))

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def content(self) -> dict[str, Any]:
        try:
            content = json.loads(self.text)
            if not isinstance(content, dict) or {"fedlens", "experiment", "data"} - content.keys():
                raise ValueError("it lacks a part")
        except ValueError as error:
            raise ValueError(f"these are not the terms of an experiment ({error})") from error
        return content

    @property
    def version(self) -> str:
        return str(self.content["fedlens"])

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.content["data"]["classes"])

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.content["data"]["shape"]
        return channels, height, width

    @property
    def algorithms(self) -> list[str]:
        return [one["name"] for one in self.content["experiment"]["algorithm"]]

    @property
    def rounds(self) -> int:
        return int(self.content["experiment"]["rounds"])

    @property
    def own_code(self) -> list[str]:
        """The import paths in the terms: code that is neither in Fedlens nor in the terms."""
        tables = self.content["experiment"]
        local = tables["local"]
        chosen = [tables["model"], tables["loss"], local["optimizer"], local.get("anneal", "")]
        names = [*map(_name_of, chosen)]
        names += _names_in([tables["local"], tables["server"], tables["algorithm"]])
        return [name for name in dict.fromkeys(names) if ":" in name]

    def experiment(self, examples: Examples) -> Experiment:
        """The experiment, with the site's own examples as its data set."""
        data = self.content["data"]
        mean, std = (None if data[key] is None else tuple(data[key]) for key in ("mean", "std"))
        none = Examples(examples.images[:0], examples.labels[:0])
        dataset = Dataset("the site's", examples, none, self.classes, mean, std)
        tables = dict(self.content["experiment"])
        told = dict(tables.pop("clients"))
        share = told["per_round"]
        count = share if isinstance(share, int) else 1
        clients = Clients(**told, count=count, partition=Named("iid"))
        return Experiment(dataset=dataset, clients=clients, **tables)

    def describe(self) -> list[str]:
        """What the experiment needs from a site, in plain words, line by line."""
        tables, shape = self.content["experiment"], "×".join(map(str, self.shape))
        algorithm = self.algorithm
        leaves = ["how many examples it holds", "its updates of the model, and its training loss"]
        if "label_counts" in algorithm.discloses:
            leaves.insert(1, "how many examples it holds of each class")
        if tables["clients"]["holdout"]:
            leaves.append("how many of its held-out examples the model classifies correctly")
        remembers = algorithm.remembers
        local = tables["local"]
        lr = local["lr"]
        lr = f"{lr:g}" if isinstance(lr, int | float) else json.dumps(lr)
        return [
            f"experiment {self.hash}",
            f"data:      images {shape} of {len(self.classes)} classes: "
            f"{', '.join(self.classes[:12])}{', ...' if len(self.classes) > 12 else ''}",
            f"model:     {_name_of(tables['model'])}",
            f"algorithm: {' + '.join(self.algorithms)}",
            f"training:  rounds: {self.rounds}, {_work_of(local)}, "
            f"batches of {local['batch_size']}, {_name_of(local['optimizer'])} with lr {lr}",
            f"channel:   {', '.join(map(repr, algorithm.channel)) or 'updates leave as they are'}",
            f"leaves the site: {'; '.join(leaves)}",
            f"stays at the site: images, labels{', what it remembers' * remembers}",
            f"code of its own: {', '.join(self.own_code) or 'none'}",
            f"by Fedlens {self.version}",
        ]

    @cached_property
    def algorithm(self) -> Algorithm:
        nothing = Examples(
            torch.zeros((0, *self.shape), dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
        )
        return make_algorithm(self.experiment(nothing))


def _name_of(chosen: str | dict[str, Any]) -> str:
    return chosen if isinstance(chosen, str) else str(chosen["name"])


def _work_of(local: dict[str, Any]) -> str:
    """How much a site trains in a round, in words."""
    key = "steps" if "steps" in local else "epochs"
    amount = local[key]
    if isinstance(amount, dict):
        amount = f"{amount['low']:g} to {amount['high']:g}"
    most = f", {local['max_steps']} steps at the most" if "max_steps" in local else ""
    return f"{key} of each: {amount}{most}"


def _names_in(value: Any) -> Iterator[str]:
    """All values of the key `name` in nested tables, such as the names of schedules."""
    if isinstance(value, dict):
        if isinstance(value.get("name"), str):
            yield value["name"]
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _names_in(part)


def for_fleet(experiment: Experiment) -> Experiment:
    """The experiment with `auto` resolved for a fleet: a site has one client, trained by one core.

    The engine `ray` becomes `processes` too: a Ray actor computes the same bytes.
    """
    engine = "processes" if experiment.engine in ("auto", "ray") else experiment.engine
    precision = "fp32" if experiment.precision == "auto" else experiment.precision
    return replace(experiment, engine=engine, precision=precision, device="cpu")


def check_possible(experiment: Experiment) -> None:
    """Raise ValueError for an experiment that a fleet cannot run."""
    if not isinstance(experiment.model, Named):
        raise ValueError("model was given from Python: in a fleet it needs a name")
    for what, given in (
        ("faults", experiment.faults),
        ("clients.devices", experiment.clients.devices),
    ):
        if given is not None:
            raise ValueError(
                f"{what} is for simulations, real sites fail by themselves: leave it out"
            )
    evaluate: Evaluate = experiment.evaluate
    if evaluate.local_only or evaluate.fine_tune:
        raise ValueError(
            "sites of a fleet train no models of their own: leave evaluate.local_only and "
            "evaluate.fine_tune out"
        )
    if set(evaluate.on) - {"test"} or evaluate.twin:
        raise ValueError(
            "the server of a fleet has no training examples: evaluate on test alone, without a "
            "twin (clients.holdout tests the model at the sites)"
        )
    if experiment.weights is not None and (experiment.train_last or experiment.norm == "frozen"):
        raise ValueError(
            "sites are not sent layers that stay frozen at loaded weights: leave weights out, or "
            "train all layers"
        )
    if experiment.engine == "stacked":
        raise ValueError('each site trains one client: choose engine "processes" or "sequential"')
    algorithm = make_algorithm(_of_some(experiment))
    if algorithm.pace is not None:
        raise ValueError("a fleet runs in rounds: leave asynchronous algorithms out")
    if not algorithm.draw.by_client:
        raise ValueError(
            "what a client draws depends on the others: leave out the algorithm that draws so"
        )


def say_without_effect(experiment: Experiment, num_sites: int) -> None:
    """Log a warning for each key that only a simulation uses; the server has `num_sites` sites."""
    clients, partition = experiment.clients, experiment.clients.partition
    found: dict[str, tuple[Any, str]] = {}
    if experiment.engine == "ray":
        found["engine"] = experiment.engine, "each site trains by itself"
    if experiment.device not in ("auto", "cpu"):
        where = "the server computes on the CPU, and a site where its own --device says"
        found["device"] = experiment.device, where
    if clients.count not in (None, NUM_CLIENTS, num_sites):  # NUM_CLIENTS is the default
        have = "1 site has its key" if num_sites == 1 else f"{num_sites} sites have their keys"
        found["clients.count"] = clients.count, f"{have} here"
    # A column that names clients has an effect: it decides which images become test images.
    if partition.name != "iid" and natural_column(partition.name, partition.options) is None:
        found["clients.partition"] = partition.name, "sites hold the images that they have"
    if clients.seed is not None and not clients.holdout:
        found["clients.seed"] = clients.seed, "nothing is dealt or held out"
    for key, (value, why) in found.items():
        logger.warning("%s is %s, which has no effect: %s", key, value, why)
    if line := epochs_without_effect(_of_some(experiment)):
        logger.warning("%s", line)


def _of_some(experiment: Experiment) -> Experiment:
    """The experiment with a number of clients: if it has none, enough for its rounds."""
    share = experiment.clients.per_round
    some = experiment.clients.count or (share if isinstance(share, int) else 1)
    return replace(experiment, clients=replace(experiment.clients, count=some))


def read_terms(text: str, wanted: str) -> Terms:
    """Stored terms; a ValueError if their hash is not `wanted`."""
    terms = Terms(text)
    if terms.hash != wanted:
        raise ValueError(f"the terms kept as {wanted[:12]} are others: approve them again")
    return terms
