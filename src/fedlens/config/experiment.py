"""The one typed description of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from fedlens.config import consent
from fedlens.config.names import (
    ALGORITHMS,
    ATTACKS,
    DATASETS,
    LOSSES,
    MODELS,
    PARTITIONS,
    SCHEDULES,
    EngineName,
    own_names,
)
from fedlens.config.options import (
    ByName,
    Elsewhere,
    Given,
    default,
    refuse_unknown,
    required,
    section_of,
    types_of,
)
from fedlens.config.options import Named as Named  # other modules import it from here
from fedlens.config.schedules import value_at
from fedlens.config.sections import Aggregation as Aggregation
from fedlens.config.sections import Between as Between
from fedlens.config.sections import Clients as Clients
from fedlens.config.sections import Constants as Constants
from fedlens.config.sections import (
    Count,
    Faults,
    Name,
    OrTable,
    Reporting,
    WholeNumber,
    check_fields,
    demand,
)
from fedlens.config.sections import Evaluate as Evaluate
from fedlens.config.sections import LocalTraining as LocalTraining
from fedlens.config.sections import LowRank as LowRank
from fedlens.config.sections import Privacy as Privacy
from fedlens.config.sections import Server as Server
from fedlens.config.sections import Stop as Stop
from fedlens.data.augment import Augment
from fedlens.data.partitions import finds_clients, natural_column, own_clients, with_clients
from fedlens.storage.reading import expanded, is_address
from fedlens.storage.run_files import EXPERIMENT, is_run, own_code
from fedlens.storage.tables import apply_override, read_tables, to_toml

if TYPE_CHECKING:
    from torch.nn import Module

    from fedlens.algorithm import Amendment
    from fedlens.core.federation import Dataset
else:
    Amendment = Elsewhere("Amendment", (), {"__module__": "fedlens.algorithm"})
    Dataset = Elsewhere("Dataset", (), {"__module__": "fedlens.core.federation"})
    Module = Elsewhere("Module", (), {"__module__": "torch.nn"})

NUM_CLIENTS = 10  # the default

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp64"]


@dataclass(frozen=True)
class Experiment:
    """Everything a run depends on. Only `dataset`, `model` and `rounds` must be given.

    From Python, `dataset` may also be a `Dataset`, `model` a `torch.nn.Module`, and `algorithm` a
    paper with its options, as `fedprox(mu=0.1)`, or several.
    """

    dataset: Annotated[Given[Name | Dataset, Named | Dataset], DATASETS] = required()
    """what is trained and tested on: see [data.md](data.md)"""
    model: Annotated[Given[Name | Module, Named | Module], MODELS] = required()
    """what is trained"""
    rounds: Count = required()
    """how many rounds"""
    seed: WholeNumber = 0
    """drives the split, the initial model, who takes part, and what each client draws"""
    engine: EngineName = "auto"
    """how clients are run: `sequential` (one after another), `stacked` (side by side on one
    device), `processes` (on all CPU cores, or on all GPUs; Linux), `ray` (on a
    [cluster](cluster.md)). `auto`: `stacked` on a GPU (`sequential` for a model that branches on a
    tensor's value); on a CPU `processes`, or `sequential` where there is one core or one client"""
    device: str = "auto"
    """where the run computes. `auto` is a GPU if torch sees one, else `cpu`. `cuda` may have a
    number where there are several GPUs, as `cuda:1`. Apple's (`mps`) is refused, for it has no
    float64, in which updates are added up: choose `cpu`. With engine `processes`, `cuda` is all
    GPUs: see [scaling.md](scaling.md#several-gpus)"""
    precision: Precision = "auto"
    """`auto` (`bf16` where clients train on a GPU that has it, else `fp32`); `fp32`; `tf32`
    (multiplies in TF32 on a GPU); `bf16` (keeps parameters in fp32, computes in bfloat16);
    `fp64`"""
    deterministic: bool = False
    """the same bytes from every run on a GPU, at some cost in speed. On a CPU they are the same
    anyway"""
    loss: Annotated[Given[Name, Named], LOSSES] = default(Named("cross_entropy"))
    """what a client minimises for an example: see [Local training](training.md#local-training).
    `test_loss` is of the same loss"""
    normalise: OrTable[Literal["dataset", "imagenet", "none"] | Constants] = default("dataset")
    """what images are normalised by, channel by channel. `dataset`: the mean and deviation of the
    data set. `imagenet`: those that `weights = "imagenet"` were trained with, or torchvision's.
    `none`: nothing, so that they are 0 to 1. `{ mean = 0.5, deviation = 0.5 }`: these, which may be
    lists of a number a channel"""
    augment: OrTable[Augment] = default(Augment())
    outputs: Count | None = None
    """outputs of the model's head; without it, the number of classes"""
    initialise: Literal["model", "glorot", "he"] = "model"
    """the model's first weights. `model`: as its own code draws them, most often as PyTorch does.
    `glorot`, `he`: those of convolutions and linear layers by this rule, uniform, with biases of
    0"""
    norm: Literal["shared", "local", "group", "frozen"] = "shared"
    """what becomes of normalisation layers. `shared`: they are averaged like the rest, statistics
    included. `local`: every client keeps its own. `group`: BatchNorm is replaced by GroupNorm.
    `frozen`: they stay as they are at the start, and BatchNorm normalises by the statistics it
    has"""
    weights: str | None = None
    """the file, or the run, that the model starts from, or `imagenet`: see
    [Weights](training.md#pretrained-weights)"""
    weights_sha256: str | None = None
    """the checksum that this file must have"""
    train: Literal["all", "head", "last-block"] | Count = "all"
    """which layers are trained: `all`, the `head` alone (the last one), the `last-block` and the
    head, or a number of layers, the last ones. The others stay as they are at the start"""
    lora: OrTable[LowRank | None] = default(None)
    """train these layers by low rank: see [Which layers](training.md#which-layers)"""
    clients: OrTable[Clients] = default(Clients())
    local: OrTable[LocalTraining] = default(LocalTraining())
    server: OrTable[Server] = default(Server())
    evaluate: OrTable[Evaluate] = default(Evaluate())
    stop: OrTable[Stop | None] = default(None)
    """when the run is over before its last round: see [schedules.md](schedules.md#stopping)"""
    algorithm: Annotated[
        Given[Name | Amendment | Sequence[Name | Amendment], tuple[Named, ...]], ALGORITHMS
    ] = default(())
    """what differs from FedAvg, applied in this order; a single name stands for a list of one"""
    faults: OrTable[Faults | None] = default(None)
    """what clients do wrong, and how often: see [faults.md](faults.md#faults)"""
    reporting: OrTable[Reporting | None] = default(None)
    """whom the server waits for, how long, and what it takes: see
    [faults.md](faults.md#reporting)"""
    privacy: OrTable[Privacy | None] = default(None)
    """differential privacy: see [privacy.md](privacy.md#in-an-experiment)"""
    aggregation: OrTable[Aggregation | None] = default(None)
    """sums that hide single updates: see [secure.md](secure.md)"""
    attack: Annotated[Given[Name | None, Named | None], ATTACKS] = default(None)
    """what some clients do to harm the others: see [attacks.md](attacks.md)"""

    def __post_init__(self) -> None:
        given: Any = self.algorithm
        if isinstance(given, (list, tuple, Amendment)):
            listed = [given] if isinstance(given, Amendment) else given
            named = tuple(map(_named, listed)) or (Named("fedavg"),)
            object.__setattr__(self, "algorithm", named)
        if not isinstance(self.dataset, (str, Mapping, Named, Dataset)):
            raise ValueError(
                f"dataset is a {type(self.dataset).__name__}: give a name, a table with a name, or "
                "a Dataset, which fl.map_style makes of those of torchvision's kind"
            )
        if isinstance(self.dataset, Named | str | Mapping):
            _refuse_path(Named.of(self.dataset, "dataset").name)
        check_fields(self, "")
        if self.weights_sha256 is not None:
            fits = re.fullmatch("[0-9a-f]{64}", self.weights_sha256) is not None
            demand(fits, "weights_sha256", self.weights_sha256, "give 64 digits of 0-9, a-f")
            has = self.weights not in (None, "imagenet")
            demand(has, "weights", self.weights, "name the file that has this sum")
        if self.stop is not None:
            on, stop = self.evaluate.on, self.stop
            fits = "validation" in on or stop.patience is None
            demand(fits, "stop.patience", stop.patience, 'add "validation" to evaluate.on')
            fits = bool({"validation", "test"} & set(on)) or stop.accuracy is None
            demand(fits, "stop.accuracy", stop.accuracy, 'add "validation" to evaluate.on')
        if self.attack is not None and self.privacy is not None:
            raise ValueError("attack and [privacy] exclude each other: leave one out")
        self._decide_clients()

    def _decide_clients(self) -> None:
        """Decide what one part leaves to another: the partition, its clients, their number."""
        put = partial(object.__setattr__, self)
        partition, count = self.clients.partition, self.clients.count
        if partition.name == PARTITIONS.automatic:
            own = own_clients(self.dataset) if isinstance(self.dataset, Named) else None
            partition = Named("natural", {"column": own}) if own else Named("iid")
        if isinstance(self.dataset, Named):
            column = natural_column(partition.name, partition.options)
            put("dataset", with_clients(self.dataset, column))
        if count is None and not finds_clients(partition.name, partition.options):
            count = NUM_CLIENTS
        put("clients", replace(self.clients, partition=partition, count=count))

    @property
    def schedules(self) -> dict[str, Named]:
        """The numbers that change from round to round, by key."""
        given: dict[str, Any] = {
            key: getattr(getattr(self, key.partition(".")[0]), key.partition(".")[2])
            for key, table in chosen_by_name().items()
            if table is SCHEDULES
        }
        for named in self.algorithm:
            given |= {f"algorithm.{named.name}.{key}": v for key, v in named.options.items()}
        return {key: value for key, value in given.items() if isinstance(value, Named)}

    def scheduled(self, round: int) -> dict[str, float]:
        """The values of `schedules` in a round, counted from 0."""
        return {key: value_at(one, round, self.rounds) for key, one in self.schedules.items()}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Experiment:
        """Make an experiment from plain tables, as a file contains them."""
        inner = [key for key in fields_by_key() if "." in key]
        refuse_unknown(content, [f.name for f in fields(cls)], "", inner)
        sections = {key.partition(".")[0] for key in inner}
        for name in (f.name for f in fields(cls) if f.default is MISSING):
            for section in sections & content.keys() if name not in content else ():
                if isinstance(content[section], Mapping) and name in content[section]:
                    raise ValueError(
                        f"{name} is in the section [{section}]: put it above the first section"
                    )
            if name not in content:
                raise ValueError(f"the experiment needs {name!r}: set {name} = ...")
        return cls(**content)

    @classmethod
    def read(
        cls, path: str | Path, overrides: Sequence[str] = (), *, trust_code: bool = False
    ) -> Experiment:
        """Read a TOML or JSON file; `overrides` are `key=value`, with dots in the key.

        Paths in the file are relative to the file, and paths in overrides to the working folder.
        The user's own functions are also looked for in the working folder, beside the file and, if
        it is the file of a run, where that run found them. A run's file may be from someone else:
        functions that it names are imported only if they are approved, or with `trust_code`.
        """
        path = Path(path)
        content = read_tables(path)
        if "model_name" in content:
            raise ValueError(
                f"{path} has the keys of the FedAvg report: make an experiment of it with "
                f"`fedlens import {path}`"
            )
        _make_absolute(content, path.parent)
        for override in [overrides] if isinstance(overrides, str) else overrides:
            apply_override(content, override)
        _make_absolute(content, Path.cwd())
        of_run = path.name == EXPERIMENT and is_run(path.parent)
        trusted = not of_run or trust_code or consent.trusts_all
        places = [Path.cwd(), path.parent, *(own_code(path.parent) if of_run else ())]
        with consent.importable(*places, trusted=trusted):
            named = own_names(content) if of_run else []
            if not trusted:
                consent.demand_approval(path.parent, map(consent.Code.named, named))
            experiment = cls.of(content)
            if trusted:
                consent.approve(named)
        return experiment

    def plain(self) -> dict[str, Any]:
        """The experiment as plain tables, with every default filled in."""
        tables: dict[str, Any] = as_plain(self)
        return tables

    def toml(self) -> str:
        return to_toml(self.plain())


@cache
def fields_by_key() -> dict[str, tuple[type, Field[Any]]]:
    """All keys, those of a section with dots after it: each a field of the dataclass before it."""

    def below(kind: type, prefix: str) -> Iterator[tuple[str, tuple[type, Field[Any]]]]:
        for one in fields(kind):
            yield prefix + one.name, (kind, one)
            if (section := section_of(types_of(kind)[one.name])) is not None:
                yield from below(section, f"{prefix}{one.name}.")

    return dict(below(Experiment, ""))


@cache
def chosen_by_name() -> dict[str, ByName]:
    """The keys of an experiment that take names, and these names; some numbers take schedules."""
    rules = {key: get_args(types_of(kind)[f.name]) for key, (kind, f) in fields_by_key().items()}
    return {key: rule for key, some in rules.items() for rule in some if isinstance(rule, ByName)}


def _refuse_path(name: str) -> None:
    """Refuse a path in place of a data set's name, and say how to name one's own images."""
    is_path = "/" in name or name.endswith((".csv", ".npz")) or Path(name).is_dir()
    if is_path and name not in DATASETS and ":" not in name:
        kind = {".csv": "csv", ".npz": "npz"}.get(Path(name).suffix, "folder")
        raise ValueError(
            f'dataset is {name!r}, a path: write {{ name = "{kind}", path = "{name}" }}, or let '
            "`fedlens import` look at a folder and write the experiment"
        )


def _named(given: Any) -> Any:
    """A paper with its options as an experiment names it; anything else as it is."""
    if not isinstance(given, Amendment):
        return given
    if given.named is None or "<" in given.named.name:
        raise ValueError(
            f"algorithm {given.name!r} cannot be imported by a name: define it at the top of a "
            "module, with @paper of fedlens on the line above it"
        )
    return given.named


def _make_absolute(content: dict[str, Any], folder: Path) -> None:
    """Make all paths of an experiment absolute; absolute paths stay as they are."""
    clients = content.get("clients")
    _make_path_absolute(content.get("dataset"), folder)
    for name in ("partition", "devices"):
        _make_path_absolute(clients.get(name) if isinstance(clients, dict) else None, folder)
    privacy = content.get("privacy")
    if isinstance(privacy, dict) and isinstance(privacy.get("ledger"), str):
        privacy["ledger"] = str((folder / expanded(privacy["ledger"])).resolve())
    weights = content.get("weights")
    if isinstance(weights, str) and weights != "imagenet" and not is_address(weights):
        content["weights"] = str((folder / expanded(weights)).resolve())


def _make_path_absolute(table: Any, folder: Path) -> None:
    """Make the path of a table absolute, and also that of the partition in its key `of`."""
    if isinstance(table, dict):
        if isinstance(table.get("path"), str):
            table["path"] = str((folder / expanded(table["path"])).resolve())
        _make_path_absolute(table.get("of"), folder)


def as_plain(value: Any) -> Any:
    """A value of an experiment in the form that plain tables contain."""
    if value is None or isinstance(value, (str, int, float)):  # most of them
        return value
    if isinstance(value, Named):
        return (
            {"name": value.name, **as_plain(dict(value.options))} if value.options else value.name
        )
    if isinstance(value, Dataset):
        return f"<{value.name}: tensors given from Python>"
    if isinstance(value, Module):
        return f"<{type(value).__name__}: a module given from Python>"
    if is_dataclass(value):
        tables = {f.name: as_plain(getattr(value, f.name)) for f in fields(value)}
        return {name: part for name, part in tables.items() if part is not None}
    if isinstance(value, dict):
        return {name: as_plain(part) for name, part in value.items() if part is not None}
    if isinstance(value, (tuple, list)):
        parts = [as_plain(part) for part in value]
        if any(isinstance(part, Named) for part in value):  # algorithms: a list of tables
            return [part if isinstance(part, dict) else {"name": part} for part in parts]
        return parts
    return value


def expect_experiment(given: Any, what: str) -> None:
    """Refuse anything but an Experiment, such as the path of its file."""
    if not isinstance(given, Experiment):
        raise ValueError(
            f"{what} is given {type(given).__name__}: give an Experiment, as Experiment.read(path) "
            "and Experiment.of(tables) make one"
        )
