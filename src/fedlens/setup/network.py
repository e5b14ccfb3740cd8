"""Makes the model of an experiment, and tests it on the data."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedlens.config.experiment import Constants, Experiment, Named
from fedlens.config.names import MODELS
from fedlens.core import Tree, keys
from fedlens.core.federation import Dataset
from fedlens.models.freeze import freeze_norms, train_last, weighted_layers
from fedlens.models.initial import initialise
from fedlens.models.weights import IMAGENET as PACKAGED
from fedlens.models.weights import Loaded, load_imagenet, load_weights
from fedlens.network.cut import Cut
from fedlens.network.layers import group_norm
from fedlens.network.low_rank import low_rank
from fedlens.network.network import Network
from fedlens.setup.devices import PRECISIONS
from fedlens.setup.tryouts import cannot_take, try_network


def untrained(experiment: Experiment, shape: tuple[int, int, int], outputs: int) -> nn.Module:
    """The model of an experiment, initialised by its seed."""
    given, outputs = experiment.model, experiment.outputs or outputs
    with _seeded(experiment, "model"):
        if isinstance(given, Named):
            module: nn.Module = MODELS.make(given, shape, outputs, of=nn.Module)
        elif hasattr(given, "_orig_mod"):
            raise ValueError(
                "the model was compiled by torch.compile, which workers cannot share: "
                "give the module itself"
            )
        elif any(map(is_lazy, given.buffers())):
            raise ValueError(
                "the model has layers such as LazyBatchNorm2d, which torch cannot copy before they "
                f"have seen images: call it once, as model(torch.zeros{(2, *shape)})"
            )
        else:
            module = copy.deepcopy(given)
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            _give_shapes(module, shape)
        if experiment.initialise != "model":
            initialise(module, experiment.initialise)
    return group_norm(module) if experiment.norm == "group" else module


@contextmanager
def _seeded(experiment: Experiment, purpose: str) -> Iterator[None]:
    """Draw by the seed of an experiment, on the CPU, where models are made.

    `torch.manual_seed` would also seed GPUs, and store a stack trace for each kind that is not
    available, which takes longer than to make many models.
    """
    with torch.random.fork_rng(devices=[]):
        seed = int(keys.root(experiment.seed, keys.purpose(purpose)))
        torch.default_generator.manual_seed(seed)
        yield


def _give_shapes(module: nn.Module, shape: tuple[int, int, int]) -> None:
    """Run a forward pass, in which layers such as LazyLinear create their weights."""
    was_training = module.training
    try:
        with torch.no_grad():
            module.eval()(torch.zeros(2, *shape))
    except Exception as error:  # a module of the user's own may raise anything
        raise cannot_take(f"images of {shape}", error) from error
    for name, layer in module.named_modules():
        if any(map(is_lazy, layer.parameters(recurse=False))):
            raise ValueError(
                f"the model's layer {name!r} ({type(layer).__name__}) saw no images, from which it "
                "would take its size: use it in forward, or take it out"
            )
    module.train(was_training)


# Mean and std of ImageNet, with which torchvision's weights were trained.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

MeanAndStd = tuple[tuple[float, ...] | None, tuple[float, ...] | None]


def normalisation(experiment: Experiment, dataset: Dataset) -> MeanAndStd:
    """The mean and the std by which each channel of an image in [0, 1] is normalised."""
    given = experiment.normalise
    if given == "dataset":
        if experiment.weights == "imagenet":
            raise ValueError(
                'weights = "imagenet" were trained on images that were normalised otherwise: set '
                'normalise = "imagenet"'
            )
        if not len(dataset.train) and dataset.mean is None:
            raise ValueError(
                f"{dataset.name} has no images here, whose mean and deviation would be taken: set "
                'normalise = "imagenet", or { mean = 0.5, deviation = 0.25 }'
            )
        return dataset.mean, dataset.std
    if dataset.train.images.is_floating_point():
        raise ValueError(
            f"normalise is {given!r}, but the images of {dataset.name} are floats, which are used "
            "as they are: leave normalise out"
        )
    if given == "none":
        return None, None
    if isinstance(given, Constants):
        mean, deviation = given.of(dataset.shape[0])
        return mean, deviation
    if dataset.shape[0] != len(IMAGENET[0]):
        shape = "×".join(map(str, dataset.shape))
        raise ValueError(
            f'normalise is "imagenet", but the images of {dataset.name} are {shape}, and those of '
            'ImageNet have 3 channels: choose "dataset" or "none"'
        )
    if experiment.weights == "imagenet":
        trained = PACKAGED[model_name(experiment)]
        return trained.mean, trained.std
    return IMAGENET


def model_name(experiment: Experiment) -> str:
    """The name of the model, or of the class of one that was given from Python."""
    model = experiment.model
    return model.name if isinstance(model, Named) else type(model).__name__


class Networks:
    """Networks of related experiments, by everything that they depend on, and what was cut."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[Network, Loaded | None]] = {}
        self.cuts: dict[Network, Cut | None] = {}


def shared_network(
    experiment: Experiment, dataset: Dataset, networks: Networks
) -> tuple[Network, Loaded | None]:
    """Return the network made for an experiment with the same model and seed, or a new one.

    Networks do not hold the weights of a run, so several runs can use one, and a sweep has few
    seeds. A model of the user's own may hold any state: each experiment gets its own.
    """
    if not isinstance(experiment.model, Named) or experiment.model.name not in MODELS:
        return make_network(experiment, dataset)
    one = experiment
    depends_on = one.model, one.outputs, one.norm, one.weights, one.train, one.lora, one.precision
    start = one.initialise, one.weights_sha256, one.seed
    key = repr((id(dataset), one.normalise, *depends_on, *start))
    if key not in networks.made:
        networks.made[key] = make_network(experiment, dataset)
    return networks.made[key]


def make_network(
    experiment: Experiment, dataset: Dataset, frozen: Tree | None = None
) -> tuple[Network, Loaded | None]:
    """The model of an experiment, and what was loaded into it; `frozen` layers were elsewhere."""
    outputs = experiment.outputs or dataset.num_classes
    if outputs < dataset.num_classes:
        raise ValueError(
            f"outputs is {outputs}, but {dataset.name} has {dataset.num_classes} classes: "
            f"choose {dataset.num_classes} or more"
        )
    module, loaded = starting_module(experiment, dataset)
    if frozen is not None:
        module.load_state_dict(frozen, strict=False)
    dtype, compute = PRECISIONS[experiment.precision]
    network = Network(module, *normalisation(experiment, dataset), dtype, compute)
    if experiment.norm in ("local", "frozen") and not network.layout.norm_layers:
        raise ValueError(
            f'norm is "{experiment.norm}", but the model has no such layers: leave norm out'
        )
    if not network.num_parameters:
        raise ValueError("the model has nothing to train: leave some parameters unfrozen")
    try_network(network, dataset, experiment.outputs)
    return network, loaded


def starting_module(experiment: Experiment, dataset: Dataset) -> tuple[nn.Module, Loaded | None]:
    """The module of an experiment before its first round, and what was loaded into it."""
    module = untrained(experiment, dataset.shape, dataset.num_classes)
    loaded = None
    if experiment.weights == "imagenet":
        loaded = load_imagenet(module, model_name(experiment))
    elif experiment.weights is not None:
        loaded = load_weights(module, experiment.weights, experiment.weights_sha256)
    if experiment.train != "all":
        train_last(module, experiment.train)
    if experiment.norm == "frozen":
        freeze_norms(module)
    if experiment.lora is not None:
        with _seeded(experiment, "lora"):
            low_rank(module, experiment.lora.rank, weighted_layers(module)[-1])
    return module, loaded
