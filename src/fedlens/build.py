"""From the description of a run to the parts that run it. All mistakes are found here."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fedlens import keys, memory
from fedlens.algorithm import Algorithm, Amendment, compose
from fedlens.client import ClientProgram
from fedlens.clock import make_clock, needs_clock
from fedlens.core import Dataset, Examples, Federation, Fixed, Holdings, Split, offsets_of
from fedlens.data.partitions import natural_column
from fedlens.data.partitions.altered import Altered
from fedlens.data.partitions.by_name import dealt
from fedlens.data.places import Source, existing
from fedlens.engines import ENGINES, Engine, cluster
from fedlens.engines.actor import OnDisk
from fedlens.engines.gpus import all_have_bf16, gpu_names, has_bf16
from fedlens.engines.processes import num_cores
from fedlens.experiment import LOSSES, Experiment, Named
from fedlens.models.freeze import freeze_norms, train_last
from fedlens.models.weights import Loaded, load_weights
from fedlens.names import ALGORITHMS, DATASETS, MODELS
from fedlens.network.layers import group_norm
from fedlens.network.network import Network
from fedlens.options import call, find
from fedlens.pieces import Epochs, Objective, Sgd, Uniformly
from fedlens.reports import Clock

PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "tf32": (torch.float32, torch.float32),
    "bf16": (torch.float32, torch.bfloat16),
    "fp64": (torch.float64, torch.float64),
}  # what parameters are kept in, what they are multiplied in


class ClientTests(NamedTuple):
    """What each client is tested on."""

    part: Literal["train", "test"]  # what it is a part of
    holdings: Holdings  # positions in the examples of that part


@dataclass(frozen=True)
class Setup:
    """Everything that a run needs, made and checked."""

    experiment: Experiment
    dataset: Dataset
    device: torch.device
    network: Network
    weights: Loaded | None  # the file that the model starts from
    program: ClientProgram
    federation: Federation
    client_tests: ClientTests | None
    parts: dict[str, Examples]  # what the server's model is evaluated on, by name
    engine: Engine
    clock: Clock | None = None  # what clients are on a virtual one, and who is waited for
    knows_labels: bool = True  # whether the server knows which labels clients hold

    @property
    def some_may_fail(self) -> bool:
        """Whether not everybody who is asked need report."""
        return self.clock is not None or self.engine.reporting is not None

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where clients train: where the server is, unless workers have devices of their own."""
        return self.engine.worker_devices or (self.device,)


def build(experiment: Experiment, data: Path | None = None, beside: Setup | None = None) -> Setup:
    """Make the parts of a run; `data` is where named data sets are looked for first.

    `beside` is a setup whose examples are the same, as clients see them: the two share them.
    """
    device, workers = _devices(experiment)
    dataset = load_dataset(experiment.dataset, data)
    train, validation = dataset.train, None
    if "validation" in experiment.evaluate.on:
        train, validation = _set_apart(train, experiment)
    train, split = _split(experiment, train, dataset.num_classes)
    # From here on it is known how many clients there are, and whether per_round fits them.
    clients = replace(experiment.clients, count=split.num_clients)
    precision = _precision(experiment, device, workers)
    experiment = replace(experiment, clients=clients, precision=precision)
    if clients.holdout:
        split, held_out = _hold_out(split, experiment)
        client_tests: ClientTests | None = ClientTests("train", held_out)
    else:
        client_tests = _own_tests(experiment, dataset.test, split)

    algorithm = make_algorithm(experiment)
    if device.type == "cpu" and not workers:
        _demand_memory(experiment, dataset, algorithm, split)
    network, weights = make_network(experiment, dataset)
    if not all(bool(p.isfinite().all()) for p in network.params.values()):
        raise ValueError("the model starts with numbers that are not finite: initialise it anew")
    algorithm.combine.check(network.layout)
    clocked = needs_clock(experiment, algorithm)
    program = ClientProgram(algorithm, network.layout, experiment.augment, guarded=clocked)
    if beside is None:
        parts = {"train": train, "test": dataset.test, "validation": validation}
        for name in experiment.evaluate.on:
            if not parts[name]:
                raise ValueError(
                    f"{dataset.name} has no {name} examples: leave it out of evaluate.on"
                )
        train, asked = _placed(parts, experiment.evaluate.on, device)
    else:
        train, asked = beside.federation.examples, beside.parts
    federation = Federation(train, dataset.num_classes, split)
    return Setup(
        experiment=experiment,
        dataset=dataset,
        device=device,
        network=network,
        weights=weights,
        program=program,
        federation=federation,
        client_tests=client_tests,
        parts=asked,
        engine=_engine(
            experiment,
            network,
            train,
            device,
            workers,
            [*asked.values()],
            _on_disk(dataset, experiment.dataset, data),
        ),
        clock=make_clock(experiment, network, program, federation) if clocked else None,
    )


def partition(
    experiment: Experiment, data: Path | None = None
) -> tuple[Dataset, Examples, Holdings]:
    """The data set, what is trained on, and who holds what of it (in the first round)."""
    dataset = load_dataset(experiment.dataset, data)
    train = dataset.train
    if "validation" in experiment.evaluate.on:
        train, _ = _set_apart(train, experiment)
    train, split = _split(experiment, train, dataset.num_classes)
    return dataset, train, Federation(train, dataset.num_classes, split).everyone(0)


def load_dataset(given: Named | Dataset, data: Path | None) -> Dataset:
    data = existing(data)
    if isinstance(given, Dataset):
        made = given
    else:
        found = call(find(DATASETS, given.name, "dataset"), Source(data), options=given.options)
        made = _expect(found, Dataset, f"dataset {given.name!r}")
    for name in made.classes:
        if not name.isascii() and name.encode(errors="ignore").decode() != name:
            raise ValueError(f"the class {name!r} of {made.name} is not text: give it another name")
    return made


def _on_disk(dataset: Dataset, given: Named | Dataset, data: Path | None) -> OnDisk | None:
    """How other machines open images that are too many to be sent."""
    if not dataset.is_mapped or isinstance(given, Dataset):
        return None
    images = dataset.train.images, dataset.test.images
    return OnDisk(images, partial(_images, given, data))


def _images(given: Named, data: Path | None) -> Sequence[torch.Tensor]:
    dataset = load_dataset(given, data)
    return dataset.train.images, dataset.test.images


def _placed(
    parts: Mapping[str, Examples | None], asked: Sequence[str], device: torch.device
) -> tuple[Examples, dict[str, Examples]]:
    """The training examples on the device, and the parts asked for; they share images."""
    there: dict[int, torch.Tensor] = {}
    placed: dict[str, Examples] = {}
    for name, part in parts.items():
        if part is not None and name in ("train", *asked):
            placed[name] = part.to(device, there.get(id(part.images)))
            there[id(part.images)] = placed[name].images
    return placed["train"], {name: placed[name] for name in parts if name in asked}


T = TypeVar("T")


def _expect(made: Any, kind: type[T], what: str) -> T:
    """What a function made, which may be one of the user's own, if it is what it should be."""
    if not isinstance(made, kind):
        raise ValueError(f"{what} gave {type(made).__name__}: it must return {kind.__name__}")
    return made


def _split_seed(experiment: Experiment) -> int:
    own = experiment.clients.seed
    return experiment.seed if own is None else own


def _set_apart(train: Examples, experiment: Experiment) -> tuple[Examples, Examples]:
    """Train without a seeded share of it, and that share."""
    key = keys.fold(keys.root(_split_seed(experiment)), keys.purpose("validation"))
    order = keys.fold(key, torch.arange(len(train))).argsort(stable=True)
    count = max(int(len(train) * experiment.evaluate.validation), 1)
    apart, rest = order[:count].sort().values, order[count:].sort().values
    return train.take(rest), train.take(apart)


def _split(experiment: Experiment, train: Examples, num_classes: int) -> tuple[Examples, Split]:
    """What is trained on, as the clients see it, and how it is spread over them."""
    clients = experiment.clients
    named = clients.partition
    rng = np.random.default_rng([_split_seed(experiment), keys.purpose("partition")])
    made = dealt(named.name, named.options, train, num_classes, clients.count, rng)
    what = f"partition {named.name!r}"
    if isinstance(made, Altered):
        train, made = made.examples, made.held
    split = made if isinstance(made, Split) else Fixed(_expect(made, Holdings, what))
    if clients.count not in (None, split.num_clients):
        raise ValueError(
            f"{what} made {split.num_clients} clients: set clients.count to {split.num_clients}, "
            "or choose a clients.partition that deals examples to as many as you like"
        )
    return train, split


def _hold_out(split: Split, experiment: Experiment) -> tuple[Split, Holdings]:
    """What clients train on, and the share of each client's examples on which it is tested."""
    if not isinstance(split, Fixed):
        raise ValueError(
            f"clients.holdout is {experiment.clients.holdout}, but partition "
            f"{experiment.clients.partition.name!r} gives clients other examples in every round: "
            "leave clients.holdout out"
        )
    train, tested = held_out(split.everyone, experiment, torch.arange(split.num_clients))
    return Fixed(train), tested


def held_out(
    everyone: Holdings, experiment: Experiment, clients: torch.Tensor
) -> tuple[Holdings, Holdings]:
    """What these clients train on, and what each is tested on."""
    root = keys.fold(keys.root(_split_seed(experiment)), keys.purpose("holdout"))
    own = keys.fold(root, clients)
    order = torch.from_numpy(keys.shuffle_segments(everyone.offsets.numpy(), own.numpy()))
    position = torch.arange(len(order)) - everyone.offsets[everyone.owners]
    apart = (everyone.sizes * experiment.clients.holdout).long()
    tested = position < apart[everyone.owners]
    index = everyone.index[order]

    def holdings(mask: torch.Tensor) -> Holdings:
        sizes = torch.bincount(everyone.owners[mask], minlength=len(everyone))
        return Holdings(index[mask], offsets_of(sizes), everyone.names)

    return holdings(~tested), holdings(tested)


def _demand_memory(
    experiment: Experiment, dataset: Dataset, algorithm: Algorithm, split: Split
) -> None:
    """Refuse a run whose rounds cannot fit in memory, by what they take at the least."""
    cohort, sizes = experiment.clients.cohort, split.sizes(0)
    held = int(sizes.max()) if len(sizes) else 0
    kept = PRECISIONS[experiment.precision][0].itemsize
    # Of the model: the server's, its next, and the sum of updates in float64; of each client
    # that trains at a time, its own and its gradient.
    training = min(num_cores(), cohort) if experiment.engine in ("auto", "processes") else 1
    copies = 2 * kept + 8 + 2 * kept * training
    channels, height, width = dataset.shape
    padded = (height + 2 * experiment.augment.crop) * (width + 2 * experiment.augment.crop)
    batch = min(experiment.local.batch_size, held)
    memory.demand(
        "a round",
        {
            f"{training + 1} models": _num_parameters(experiment, dataset) * copies,
            "who sees which examples": cohort * algorithm.draw.plan_size(held) * 8,
            "a batch": batch * channels * padded * kept,
        },
        "choose a smaller model, fewer local.epochs, or a smaller augment.crop",
    )


def _num_parameters(experiment: Experiment, dataset: Dataset) -> int:
    """Of a model of ours, made without memory; 0 of others, which are made once and not to try."""
    given = experiment.model
    if not isinstance(given, Named) or given.name not in MODELS:
        return 0
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _Undrawn():
        outputs = experiment.outputs or dataset.num_classes
        try:
            module = call(MODELS[given.name], dataset.shape, outputs, options=given.options)
        except (RuntimeError, TypeError, OverflowError):  # so large that no tensor can be
            return 2**60
        return sum(parameter.numel() for parameter in module.parameters())


class _Undrawn(TorchFunctionMode):
    """Draws nothing: on the device "meta", to draw from a normal takes seconds of imports."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "kaiming_normal_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs or {})


def _own_tests(experiment: Experiment, test: Examples, split: Split) -> ClientTests | None:
    """The test examples that are the clients' own, where a column says so."""
    named = experiment.clients.partition
    column = natural_column(named.name, named.options)
    if column is None or column not in test.columns or "test" not in experiment.evaluate.on:
        return None
    if not isinstance(split, Fixed) or split.everyone.names is None:  # all at one: a twin's
        return None
    number = {name: client for client, name in enumerate(split.everyone.names)}
    owner = torch.tensor([number.get(str(value), -1) for value in test.columns[column].tolist()])
    index = owner.argsort(stable=True)
    sizes = torch.bincount(owner[owner >= 0], minlength=len(number))
    index = index[len(index) - int(sizes.sum()) :]  # those of nobody stand first
    return ClientTests("test", Holdings(index, offsets_of(sizes), split.everyone.names))


def untrained(experiment: Experiment, shape: tuple[int, int, int], outputs: int) -> nn.Module:
    """The model of an experiment, as its seed initialises it."""
    given, outputs = experiment.model, experiment.outputs or outputs
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(keys.fold(keys.root(experiment.seed), keys.purpose("model"))))
        if isinstance(given, Named):
            made = call(find(MODELS, given.name, "model"), shape, outputs, options=given.options)
            module = _expect(made, nn.Module, f"model {given.name!r}")
        else:
            module = copy.deepcopy(given)
    return group_norm(module) if experiment.norm == "group" else module


def make_network(experiment: Experiment, dataset: Dataset) -> tuple[Network, Loaded | None]:
    outputs = experiment.outputs or dataset.num_classes
    if outputs < dataset.num_classes:
        raise ValueError(
            f"outputs is {outputs}, but {dataset.name} has {dataset.num_classes} classes: "
            f"choose {dataset.num_classes} or more"
        )
    module = untrained(experiment, dataset.shape, outputs)
    loaded = None
    if experiment.weights is not None:
        loaded = load_weights(module, experiment.weights, experiment.weights_sha256)
    if experiment.train_last is not None:
        train_last(module, experiment.train_last)
    if experiment.norm == "frozen":
        freeze_norms(module)
    dtype, compute = PRECISIONS[experiment.precision]
    network = Network(module, dataset.mean, dataset.std, dtype, compute)
    if experiment.norm in ("local", "frozen") and not network.layout.norm_layers:
        raise ValueError(
            f'norm is "{experiment.norm}", but the model has no such layers: leave norm out'
        )
    if not network.num_parameters:
        raise ValueError("the model has nothing to train: leave some parameters unfrozen")
    _try(network, dataset, experiment.outputs)
    return network, loaded


def _try(network: Network, dataset: Dataset, outputs: int | None) -> None:
    """One forward pass, so that a model that does not fit the data is found now."""
    part = dataset.train if len(dataset.train) else dataset.test
    try:
        logits = network.predict(network.params, network.buffers, part.images[:2])
    except ValueError:
        raise
    except Exception as error:  # a module of the user's own may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"the model cannot take images of {dataset.name}, {dataset.shape}: {reason}"
        ) from error
    if logits.ndim != 2 or logits.shape[1] < dataset.num_classes:
        raise ValueError(
            f"the model gives {tuple(logits.shape[1:])} outputs an image, but {dataset.name} has "
            f"{dataset.num_classes} classes: give it {dataset.num_classes} outputs"
        )
    if outputs not in (None, logits.shape[1]):
        raise ValueError(
            f"outputs is {outputs}, but the model has {logits.shape[1]}: leave outputs out"
        )
    _try_training(network, part.images[:2])


def _try_training(network: Network, images: torch.Tensor) -> None:
    """One pass as in training, to see whether the model draws numbers that no key reaches."""
    before = torch.get_rng_state()
    key = torch.zeros(1, dtype=torch.int64)
    params, buffers = (
        {n: t[None] for n, t in tree.items()} for tree in (network.params, network.buffers)
    )
    try:
        with torch.no_grad():
            network.single(params, buffers, images[None], key, torch.ones(1, len(images)))
    except ValueError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"the model cannot be trained: {reason}") from error
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise ValueError(
            "the model draws random numbers by itself, so that no run could be repeated: use "
            "nn.Dropout layers in place of torch.nn.functional.dropout and the like"
        )


def make_algorithm(experiment: Experiment) -> Algorithm:
    local = experiment.local
    base = Algorithm(
        select=Uniformly(experiment.clients.cohort),
        draw=Epochs(local.epochs, local.batch_size),
        objective=Objective(find(LOSSES, experiment.loss, "loss")),
        solve=Sgd(local.lr, local.momentum, local.weight_decay),
        advance=Sgd(experiment.server.lr),
        reset=local.reset,
        personal_norm=experiment.norm == "local",
    )
    papers = []
    for named in experiment.algorithm:
        made = call(find(ALGORITHMS, named.name, "algorithm"), options=named.options)
        papers.append(_expect(made, Amendment, f"algorithm {named.name!r}"))
    return compose(base, *papers)


def _precision(
    experiment: Experiment, device: torch.device, devices: list[torch.device]
) -> Literal["fp32", "tf32", "bf16", "fp64"]:
    """`auto`: bf16 where clients train on a GPU that has it, else fp32 (see results/)."""
    if experiment.precision != "auto":
        return experiment.precision
    if experiment.engine == "ray":
        have_bf16 = bool(devices) and all(gpu.has_bf16 for gpu in cluster.gpus())
        return "bf16" if have_bf16 else "fp32"
    if devices:
        return "bf16" if all_have_bf16() else "fp32"
    return "bf16" if device.type == "cuda" and has_bf16(device) else "fp32"


def _devices(experiment: Experiment) -> tuple[torch.device, list[torch.device]]:
    """Where the server is, and where workers train if that is elsewhere: each on a GPU."""
    name = experiment.device
    try:
        device = torch.device("cuda" if name == "auto" else name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}: choose auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}: choose auto, cpu or cuda")
    if device.type == "cpu":
        return device, []
    here = torch.device("cpu")
    if experiment.engine in ("processes", "ray"):  # only a child may ask for GPUs: see gpus.py
        count = len(gpu_names()) if experiment.engine == "processes" else len(cluster.gpus())
        found = [torch.device("cuda", number) for number in range(count)]
        if device.index is not None and experiment.engine == "ray":
            raise ValueError(f"device is {name!r}, but Ray deals out GPUs itself: choose cuda")
        devices = found if device.index is None else [one for one in found if one == device]
        if devices or name == "auto":
            return here, devices
        if found:
            raise ValueError(
                f"device is {name!r}, but torch sees {len(found)} GPUs: choose cuda for all of "
                "them, or one from cuda:0 on"
            )
    elif torch.cuda.is_available():
        return device, []
    elif name == "auto":
        return here, []
    raise ValueError(f"device is {name!r}, but torch sees no GPU: choose cpu")


def _engine(
    experiment: Experiment,
    network: Network,
    train: Examples,
    device: torch.device,
    devices: Sequence[torch.device],
    others: Sequence[Examples],
    on_disk: OnDisk | None,
) -> Engine:
    name: str = experiment.engine
    if name == "auto":
        name = automatic_engine(device, experiment.clients.cohort)
    return ENGINES[name](network, train, devices, others, on_disk)


def automatic_engine(device: torch.device, cohort: int) -> str:
    """GPU: stacked. CPU: processes where there are several cores and clients to share them."""
    if device.type == "cuda":
        return "stacked"
    return "processes" if sys.platform == "linux" and min(num_cores(), cohort) > 1 else "sequential"
