"""Makes the model of an experiment, and tests it on the data."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parameter import is_lazy

from fedlens.config.experiment import Experiment, Named
from fedlens.config.names import MODELS
from fedlens.config.options import call, expect, find
from fedlens.config.own_code import mistake_of, place_of_error
from fedlens.core import keys
from fedlens.core.federation import Dataset
from fedlens.models.freeze import freeze_norms, train_last
from fedlens.models.weights import Loaded, load_weights
from fedlens.network.functional import MappedModel
from fedlens.network.layers import group_norm
from fedlens.network.model import Model
from fedlens.network.network import Network
from fedlens.setup.devices import PRECISIONS
from fedlens.storage.reading import reason


def untrained(experiment: Experiment, shape: tuple[int, int, int], outputs: int) -> nn.Module:
    """The model of an experiment, initialised by its seed."""
    given, outputs = experiment.model, experiment.outputs or outputs
    with torch.random.fork_rng(devices=[]):
        # Models are made on the CPU. `torch.manual_seed` would also seed GPUs, and store a stack
        # trace for each kind that is not available, which takes longer than to make many models.
        seed = int(keys.root(experiment.seed, keys.purpose("model")))
        torch.default_generator.manual_seed(seed)
        if isinstance(given, Named):
            made = call(find(MODELS, given.name, "model"), shape, outputs, options=given.options)
            module = expect(made, nn.Module, f"model {given.name!r}")
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
    return group_norm(module) if experiment.norm == "group" else module


def _give_shapes(module: nn.Module, shape: tuple[int, int, int]) -> None:
    """Run a forward pass, in which layers such as LazyLinear create their weights."""
    was_training = module.training
    try:
        with torch.no_grad():
            module.eval()(torch.zeros(2, *shape))
    except Exception as error:  # a module of the user's own may raise anything
        raise _cannot_take(f"images of {shape}", error) from error
    for name, layer in module.named_modules():
        if any(map(is_lazy, layer.parameters(recurse=False))):
            raise ValueError(
                f"the model's layer {name!r} ({type(layer).__name__}) saw no images, from which it "
                "would take its size: use it in forward, or take it out"
            )
    module.train(was_training)


def _cannot_take(images: str, error: Exception) -> ValueError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    of_shapes = isinstance(error, RuntimeError)  # torch raises it where shapes do not fit
    return ValueError(
        ("" if of_shapes else mistake_of(error))
        or f"the model cannot take {images} ({reason}): choose a model for such images or, where "
        "the data set takes a size, another size"
    )


# Mean and std of ImageNet, with which torchvision's weights were trained.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

MeanAndStd = tuple[tuple[float, ...] | None, tuple[float, ...] | None]


def normalisation(experiment: Experiment, dataset: Dataset) -> MeanAndStd:
    """The mean and the std by which each channel of an image in [0, 1] is normalised."""
    if experiment.normalise == "dataset":
        return dataset.mean, dataset.std
    if dataset.train.images.is_floating_point():
        raise ValueError(
            f'normalise is "{experiment.normalise}", but the images of {dataset.name} are floats, '
            "which are used as they are: leave normalise out"
        )
    if experiment.normalise == "none":
        return None, None
    if dataset.shape[0] != len(IMAGENET[0]):
        shape = "×".join(map(str, dataset.shape))
        raise ValueError(
            f'normalise is "imagenet", but the images of {dataset.name} are {shape}, and those of '
            'ImageNet have 3 channels: choose "dataset" or "none"'
        )
    return IMAGENET


Networks = dict[str, tuple[Network, Loaded | None]]
"""Networks of related experiments, by everything that they depend on."""


def shared_network(
    experiment: Experiment, dataset: Dataset, made: Networks
) -> tuple[Network, Loaded | None]:
    """Return the network made for an experiment with the same model and seed, or a new one.

    Networks do not hold the weights of a run, so several runs can use one, and a sweep has few
    seeds. A model of the user's own may hold any state: each experiment gets its own.
    """
    if not isinstance(experiment.model, Named) or experiment.model.name not in MODELS:
        return make_network(experiment, dataset)
    one = experiment
    depends_on = one.model, one.outputs, one.norm, one.weights, one.train_last, one.precision
    key = repr((id(dataset), one.normalise, *depends_on, one.weights_sha256, one.seed))
    if key not in made:
        made[key] = make_network(experiment, dataset)
    return made[key]


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
    network = Network(module, *normalisation(experiment, dataset), dtype, compute)
    if experiment.norm in ("local", "frozen") and not network.layout.norm_layers:
        raise ValueError(
            f'norm is "{experiment.norm}", but the model has no such layers: leave norm out'
        )
    if not network.num_parameters:
        raise ValueError("the model has nothing to train: leave some parameters unfrozen")
    _try(network, dataset, experiment.outputs)
    return network, loaded


def _try(network: Network, dataset: Dataset, outputs: int | None) -> None:
    """Run one forward pass, to detect a model that does not fit the data."""
    part = dataset.train if len(dataset.train) else dataset.test
    try:
        logits = network.predict(network.params, network.buffers, part.images[:2])
    except ValueError:
        raise
    except Exception as error:  # a module of the user's own may raise anything
        raise _cannot_take(f"images of {dataset.name}, {dataset.shape}", error) from error
    wanted, shape = outputs or dataset.num_classes, tuple(logits.shape[1:])
    if shape != (wanted,):
        has = f"{dataset.name} has {wanted} classes" if outputs is None else f"outputs is {outputs}"
        more = len(shape) == 1 and shape[0] > dataset.num_classes
        raise ValueError(
            f"the model gives {shape} outputs an image, but {has}: give it {wanted} outputs"
            + f", or set outputs = {shape[0]}" * more
        )
    _try_training(network, part.images[:2])


def _try_training(network: Network, images: torch.Tensor) -> None:
    """Run one pass as in training, to detect random draws that do not depend on a key."""
    before = torch.get_rng_state()
    drew: list[nn.Module] = []
    try:
        with _watching_for_draws(drew):
            _train(network, network.single, images)
    except ValueError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"the model cannot be trained: {reason}") from error
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise ValueError(
            f"the model draws random numbers by itself{_where(network, drew)}, so that no run "
            f"could be repeated: {_remedy(drew)}"
        )


def stacking_fails(network: Network, images: torch.Tensor) -> str:
    """Why clients of this model cannot be trained side by side; "" if they can.

    A model that is run layer by layer can: its forward pass has no unknown operations.
    """
    if not isinstance(network.stacked, MappedModel):
        return ""
    try:
        _train(network, network.stacked, images)
    except Exception as error:  # torch.func.vmap may refuse any operation
        where = place_of_error(error).partition(": ")[0]
        why = reason(error).partition(". ")[0]  # the rest asks for a bug report
        return f"{where}: {why}" if where else why
    return ""


def _train(network: Network, model: Model, images: torch.Tensor) -> None:
    """Run one forward pass of one client, as in training."""
    params, buffers = (
        {n: t[None] for n, t in tree.items()} for tree in (network.params, network.buffers)
    )
    key = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        model(params, buffers, images[None], key, torch.ones(1, len(images)))


@contextmanager
def _watching_for_draws(drew: list[nn.Module]) -> Iterator[None]:
    """Collect the modules whose forward pass uses torch's generator, the innermost first."""
    states: list[torch.Tensor] = []

    def enter(*_: object) -> None:
        states.append(torch.get_rng_state())

    def leave(module: nn.Module, *_: object) -> None:
        if not torch.equal(states.pop(), torch.get_rng_state()):
            drew.append(module)

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _where(network: Network, drew: list[nn.Module]) -> str:
    if not drew:
        return ""
    kind = type(drew[0]).__name__
    names = [name for name, module in network.named_modules() if module is drew[0] and name]
    return f" in {names[0]} ({kind})" if names else f" in its forward ({kind})"


def _remedy(drew: list[nn.Module]) -> str:
    if drew and isinstance(drew[0], nn.MultiheadAttention):
        return (
            "set the attention's own dropout to 0 (`.self_attn.dropout = 0.0` of a "
            "TransformerEncoderLayer, whose other dropout may stay)"
        )
    return "use nn.Dropout layers in place of torch.nn.functional.dropout and the like"
