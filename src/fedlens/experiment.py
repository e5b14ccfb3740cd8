"""The one typed description of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import nn

from fedlens.augment import Augment
from fedlens.core import Number
from fedlens.data.own_clients import own_clients
from fedlens.data.partitions import finds_clients
from fedlens.engines import EngineName
from fedlens.federation import Dataset
from fedlens.models.weights import is_address
from fedlens.names import ALGORITHMS, DATASETS, DEVICES, LOSSES, MODELS, OPTIMIZERS, PARTITIONS
from fedlens.options import (
    Given,
    check,
    default,
    find,
    importable,
    options_of,
    refuse_unknown,
    required,
    resolve,
    types_of,
)
from fedlens.options import Named as Named  # as others import it from here
from fedlens.pieces.solve import DecayOn
from fedlens.reading import expanded
from fedlens.reporting.reports import Faults, Reporting
from fedlens.run_files import own_code
from fedlens.schedules import resolved, value_at
from fedlens.tables import apply_override, read_tables, to_toml

NUM_CLIENTS = 10  # where nobody says how many

Table = Mapping[str, Any]
Name = str | Table | Named
"""How something is chosen: by a name, by a table with a name and options, or by both as `Named`."""

Scheduled = Given[float | Table | Named, float | Named]
"""A number, or a schedule that gives it for every round."""

R = TypeVar("R")
OrTable = Given[R | Table, R]
"""A record, or a table of its fields."""

Part = Literal["test", "validation", "train"]


def _settle(self: Any, prefix: str) -> None:
    """Check every field of a description against its type, taking tables for records."""
    hints = types_of(self.__class__)
    for f in fields(self):
        value = check(getattr(self, f.name), hints[f.name], prefix + f.name)
        object.__setattr__(self, f.name, value)


def _demand(fits: bool, key: str, value: Any, remedy: str) -> None:
    if not fits:
        raise ValueError(f"{key} is {value!r}: {remedy}")


@dataclass(frozen=True)
class Clients:
    count: int | None = None  # without it 10, or as many as the partition finds in the data
    per_round: int | float = 1.0  # a number of clients, or a share of them
    partition: Given[Name, Named] = default(
        Named("auto")
    )  # the data set's own clients if it has any, else iid
    seed: int | None = None  # of the split alone; without it, the experiment's
    holdout: float = 0.0  # the share of its examples on which a client is tested, not trained
    devices: Given[Name | None, Named | None] = default(None)  # how fast they are, and when there

    def __post_init__(self) -> None:
        _settle(self, "clients.")
        if self.count is not None:
            _demand(self.count >= 1, "clients.count", self.count, "choose 1 or more")
        if isinstance(self.per_round, float):
            fits = 0 < self.per_round <= 1
            _demand(fits, "clients.per_round", self.per_round, "a share lies in (0, 1]")
        elif self.count is None:
            _demand(self.per_round >= 1, "clients.per_round", self.per_round, "choose 1 or more")
        else:
            fits = 1 <= self.per_round <= self.count
            remedy = f"there are {self.count} clients: choose 1 to {self.count}"
            _demand(fits, "clients.per_round", self.per_round, remedy)
        if self.seed is not None:
            _demand(self.seed >= 0, "clients.seed", self.seed, "choose 0 or more")
        _demand(0 <= self.holdout < 1, "clients.holdout", self.holdout, "choose 0 to below 1")

    @property
    def cohort(self) -> int:
        """How many clients take part in a round, once it is known how many there are."""
        if isinstance(self.per_round, int):
            return self.per_round
        assert self.count is not None
        # The nudge keeps 0.29 * 100 = 28.999999999999996 from losing a client.
        return max(int(self.per_round * self.count + 1e-9), 1)


@dataclass(frozen=True)
class LocalTraining:
    epochs: int = 1
    batch_size: int = 32
    lr: Scheduled = default(0.1)
    momentum: float = 0.0
    weight_decay: float = 0.0
    weight_decay_on: DecayOn = "all"  # parameters, or only weights: no biases, no normalisation
    optimizer: Given[Name, Named] = default(Named("sgd"))
    clip: float | None = None  # the norm to which a longer gradient is scaled down
    clip_value: float | None = None  # beyond which no number of a gradient goes
    class_balance: float = 0.0  # how much more examples of rare classes count
    reset: bool = True  # what the optimiser remembers starts afresh in every round

    def __post_init__(self) -> None:
        _settle(self, "local.")
        for name in ("epochs", "batch_size"):
            _demand(
                getattr(self, name) >= 1, f"local.{name}", getattr(self, name), "choose 1 or more"
            )
        for name in ("lr", "momentum", "weight_decay"):
            value = getattr(self, name)
            _demand(_is_step(value), f"local.{name}", value, "choose 0 or more")
        _demand(self.momentum < 1, "local.momentum", self.momentum, "choose 0 to below 1")
        fits = 0 <= self.class_balance < 1
        _demand(fits, "local.class_balance", self.class_balance, "choose 0 to below 1")
        for name in ("clip", "clip_value"):
            value = getattr(self, name)
            fits = value is None or 0 < value < float("inf")
            _demand(fits, f"local.{name}", value, "choose a number above 0, or leave it out")


@dataclass(frozen=True)
class Server:
    lr: Scheduled = default(1.0)

    def __post_init__(self) -> None:
        _settle(self, "server.")
        _demand(_is_step(self.lr), "server.lr", self.lr, "choose 0 or more")


def _is_step(value: float | Named) -> bool:
    """What a schedule gives is looked at when it is known for how many rounds."""
    return isinstance(value, Named) or 0 <= value < float("inf")


@dataclass(frozen=True)
class Evaluate:
    every: int = 1  # rounds
    at: tuple[int, ...] = ()  # rounds besides
    on: Given[Part | Sequence[Part], tuple[Part, ...]] = default(("test",))
    validation: float = 0.1  # the share of train set apart, if `on` has validation
    twin: bool = False  # also train a centralised twin, and say how near to it the run came

    def __post_init__(self) -> None:
        _settle(self, "evaluate.")
        _demand(self.every >= 1, "evaluate.every", self.every, "choose 1 or more")
        numbered = all(round >= 1 for round in self.at)
        _demand(numbered, "evaluate.at", list(self.at), "rounds are counted from 1")
        fits = 0 < self.validation < 1
        _demand(fits, "evaluate.validation", self.validation, "choose a share between 0 and 1")
        compared = bool(self.on) or not self.twin
        _demand(compared, "evaluate.on", list(self.on), "name what a twin is compared on: test")

    def is_due(self, round: int, rounds: int) -> bool:
        """Whether a run of so many rounds is evaluated after this one."""
        return round % self.every == 0 or round == rounds or round in self.at


@dataclass(frozen=True)
class Experiment:
    """Everything a run depends on. Only `dataset`, `model` and `rounds` must be given.

    From Python, `dataset` may also be a `Dataset` and `model` a `torch.nn.Module`.
    """

    dataset: Given[Name | Dataset, Named | Dataset] = required()
    model: Given[Name | nn.Module, Named | nn.Module] = required()
    rounds: int = required()
    seed: int = 0
    engine: EngineName = "auto"
    device: str = "auto"
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp64"] = "auto"
    deterministic: bool = False  # the same bytes from a GPU, at some cost in speed
    loss: Given[Name, Named] = default(Named("cross_entropy"))
    augment: OrTable[Augment] = default(Augment())
    outputs: int | None = None  # of the model's head; without it, the number of classes
    norm: Literal["shared", "local", "group", "frozen"] = "shared"  # what becomes of BatchNorm
    weights: str | None = None  # the file, or address of one, that the model starts from
    weights_sha256: str | None = None
    train_last: int | None = None  # so many layers; without it, all
    clients: OrTable[Clients] = default(Clients())
    local: OrTable[LocalTraining] = default(LocalTraining())
    server: OrTable[Server] = default(Server())
    evaluate: OrTable[Evaluate] = default(Evaluate())
    algorithm: Given[Name | Sequence[Name], tuple[Named, ...]] = default(())
    faults: Given[Faults | Table | None, Faults | None] = default(None)  # what clients do wrong
    reporting: Given[Reporting | Table | None, Reporting | None] = default(
        None
    )  # who is waited for

    def __post_init__(self) -> None:
        if self.algorithm in ((), []):
            object.__setattr__(self, "algorithm", (Named("fedavg"),))
        _settle(self, "")
        _demand(self.rounds >= 1, "rounds", self.rounds, "choose 1 or more")
        _demand(self.seed >= 0, "seed", self.seed, "choose 0 or more")
        if self.outputs is not None:
            _demand(self.outputs >= 1, "outputs", self.outputs, "choose 1 or more")
        if self.train_last is not None:
            _demand(self.train_last >= 1, "train_last", self.train_last, "choose 1 or more")
        if self.weights_sha256 is not None:
            fits = re.fullmatch("[0-9a-f]{64}", self.weights_sha256) is not None
            _demand(fits, "weights_sha256", self.weights_sha256, "give 64 digits of 0-9, a-f")
            _demand(self.weights is not None, "weights", None, "name the file that has this sum")
        self._resolve_options()

    def _resolve_options(self) -> None:
        """Check every name and its options, and fill in the options' defaults."""

        def filled(named: Named, table: Mapping[str, Callable[..., Any]], kind: str) -> Named:
            function = find(table, named.name, kind)
            return Named(named.name, resolve(function, named.options, f"{kind} {named.name!r}"))

        object.__setattr__(self, "loss", filled(self.loss, LOSSES, "loss"))
        if isinstance(self.dataset, Named):
            object.__setattr__(self, "dataset", filled(self.dataset, DATASETS, "dataset"))
        if isinstance(self.model, Named):
            object.__setattr__(self, "model", filled(self.model, MODELS, "model"))
        partition, count = self.clients.partition, self.clients.count
        if partition.name == "auto":
            own = own_clients(self.dataset) if isinstance(self.dataset, Named) else None
            partition = Named("natural", {"column": own}) if own else Named("iid")
        partition = filled(partition, PARTITIONS, "partition")
        if count is None and not finds_clients(partition.name, partition.options):
            count = NUM_CLIENTS
        devices = self.clients.devices
        devices = None if devices is None else filled(devices, DEVICES, "devices")
        clients = replace(self.clients, partition=partition, count=count, devices=devices)
        object.__setattr__(self, "clients", clients)
        optimizer = filled(self.local.optimizer, OPTIMIZERS, "optimizer")
        object.__setattr__(self, "local", replace(self.local, optimizer=optimizer))
        algorithm = tuple(map(_filled_algorithm, self.algorithm))
        object.__setattr__(self, "algorithm", algorithm)
        for part in ("local", "server"):
            table: LocalTraining | Server = getattr(self, part)
            if isinstance(table.lr, Named):
                lr = resolved(table.lr, f"{part}.lr")
                object.__setattr__(self, part, replace(table, lr=lr))

    @property
    def schedules(self) -> dict[str, Named]:
        """The numbers that change from round to round, by key."""
        given: dict[str, Any] = {"local.lr": self.local.lr, "server.lr": self.server.lr}
        for named in self.algorithm:
            given |= {f"algorithm.{named.name}.{key}": v for key, v in named.options.items()}
        return {key: value for key, value in given.items() if isinstance(value, Named)}

    def scheduled(self, round: int) -> dict[str, float]:
        """What these are in a round, counted from 0."""
        return {key: value_at(one, round, self.rounds) for key, one in self.schedules.items()}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Experiment:
        """From plain tables, as a file holds them."""
        known = {f.name: f for f in fields(cls)}
        refuse_unknown(content, known, "")
        needed = [n for n, f in known.items() if f.default is MISSING and n not in content]
        if needed:
            raise ValueError(f"the experiment needs {needed[0]!r}: set {needed[0]} = ...")
        return cls(**content)

    @classmethod
    def read(cls, path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
        """From a TOML or JSON file; `overrides` are `key=value`, with dots in the key.

        Functions of the user's own are looked for beside the file, too, and those of a run's own
        file where the run found them.
        """
        path = Path(path)
        content = read_tables(path)
        for override in overrides:
            apply_override(content, override)
        clients = content.get("clients")
        _anchor(content.get("dataset"), path.parent)
        for name in ("partition", "devices"):
            _anchor(clients.get(name) if isinstance(clients, dict) else None, path.parent)
        weights = content.get("weights")
        if isinstance(weights, str) and not is_address(weights):
            content["weights"] = str((path.parent / expanded(weights)).resolve())
        with importable(path.parent, *own_code(path.parent)):
            return cls.of(content)

    def plain(self) -> dict[str, Any]:
        """As plain tables, every default filled in."""
        tables: dict[str, Any] = _plain(self)
        return tables

    def toml(self) -> str:
        return to_toml(self.plain())


def _filled_algorithm(named: Named) -> Named:
    """Its options as given and checked, else by default; a `Number` may be a schedule."""
    function = find(ALGORITHMS, named.name, "algorithm")
    may_change = [
        key for key, p in options_of(function).items() if p.annotation in (Number, Number | None)
    ]
    schedules = {
        key: resolved(Named.of(named.options[key], key), f"algorithm.{named.name}.{key}")
        for key in may_change
        if isinstance(named.options.get(key), (Mapping, Named))
    }
    numbers = {**named.options, **dict.fromkeys(schedules, 0.0)}
    options = resolve(function, numbers, f"algorithm {named.name!r}")
    return Named(named.name, options | schedules)


def _anchor(table: Any, folder: Path) -> None:
    """Make the path of a table, and of the partition that it is `of`, relative to nothing."""
    if isinstance(table, dict):
        if isinstance(table.get("path"), str):
            table["path"] = str((folder / expanded(table["path"])).resolve())
        _anchor(table.get("of"), folder)


def _plain(value: Any) -> Any:
    if isinstance(value, Named):
        return {"name": value.name, **_plain(dict(value.options))} if value.options else value.name
    if isinstance(value, Dataset):
        return f"<{value.name}: tensors given from Python>"
    if isinstance(value, nn.Module):
        return f"<{type(value).__name__}: a module given from Python>"
    if is_dataclass(value):
        tables = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        return {name: part for name, part in tables.items() if part is not None}
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items() if part is not None}
    if isinstance(value, (tuple, list)):
        plain = [_plain(part) for part in value]
        if any(isinstance(part, Named) for part in value):  # algorithms: a list of tables
            return [part if isinstance(part, dict) else {"name": part} for part in plain]
        return plain
    return value
