"""A model to train: its tensors, and the forms in which engines run it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, fx, nn

from fedlens.core import Tree, tree_map
from fedlens.network.functional import (
    Constants,
    FunctionalModule,
    LayeredModel,
    MappedModel,
    Model,
    Numerics,
    SingleModel,
    TrainingMode,
    channels_last,
    is_frozen,
)
from fedlens.network.layers import prepare, side_inputs
from fedlens.network.layout import Layout
from fedlens.network.private import PrivateModel, private_model
from fedlens.network.single import winograd
from fedlens.network.single.layers import (
    FastLayer,
    FastPath,
    FusedConvolution,
    fuse,
    on_fast_path,
)
from fedlens.network.stacked.layers import read_module


class Network:
    """A model in Fedlens: the module provides the code, and never holds the weights of a run.

    `dtype` is the dtype of stored parameters; `compute`, if given, that of multiplications.
    A parameter that does not require a gradient is frozen. If all parameters of a layer are frozen,
    so are its buffers. Frozen tensors are constants: they are neither trained nor communicated.
    `kept` are those of a larger model whose last layers this is (`cut`).
    """

    def __init__(
        self,
        module: nn.Module,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
        compute: torch.dtype | None = None,
        kept: Tree | None = None,
    ) -> None:
        layout = Layout.of(module)
        if any(t.is_floating_point() and t.dtype != dtype for t in module.state_dict().values()):
            module = copy.deepcopy(module).to(dtype)
        self.module = prepare(module).eval()
        self._params, self._buffers, self._frozen = _tensors(self.module)
        self._kept = kept or {}
        own = self._params.keys() | self._buffers.keys()
        moving = {name: e for name, e in layout.entries.items() if name in own}
        self.layout = replace(layout, entries=moving)
        self.mean, self.std = mean, std
        self.dtype, self.compute = dtype, compute or dtype
        tracking = {e.layer for e in layout.entries.values() if e.role == "buffer"}
        uncast = frozenset(name for name, e in layout.entries.items() if e.layer in tracking)
        numerics = Numerics(mean, std, dtype, self.compute, uncast)
        constants = Constants(self._frozen, numerics)

        mode = TrainingMode(self.module)
        self._stacked = read_module(self.module.train())  # traced in training mode
        fused = fuse(self.module, self._stacked.nodes) if self._stacked else self.module
        fast = {name: m for name, m in fused.named_modules() if isinstance(m, FastLayer)}
        self._fast_layers = tuple(fast.values())
        self._winograd = {  # weights that `fast` may read in another layout
            f"{name}.weight"
            for name, layer in fast.items()
            if isinstance(layer, FusedConvolution) and layer.weight.shape[2] == winograd.KERNEL
        }
        self._functional = FunctionalModule(fused, numerics, constants, layout.last)
        mode.set(training=False)
        self._functional.mode.set(training=False)

        self.single: Model = SingleModel(self._functional)
        """One client (C = 1) whose batch has no padding: the plain module."""
        self.stacked: Model = (
            LayeredModel(self._stacked, mode, numerics, constants, layout.last)
            if self._stacked
            else MappedModel(self._functional)
        )
        """C clients at once: layer by layer if the module can be traced, else by vmap."""

    @cached_property
    def private(self) -> PrivateModel:
        """`stacked` with gradients that are clipped example by example."""
        return private_model(self.stacked, self.module)

    def forget(self) -> None:
        """Keep no initial weights, but their shapes: for where the weights come with each order."""
        everywhere = (*self.module.named_parameters(), *self._functional.module.named_parameters())
        for name, p in (*everywhere, *self._params.items()):
            if name in self._params:
                p.data = p.new_zeros(()).expand(p.shape)

    @property
    def initial(self) -> Tree:
        """The initial parameters and buffers of the module themselves: they are only read."""
        return self._params | self._buffers

    def starting_at(self, module: nn.Module) -> Network:
        """The same network with the initial tensors of another module with these layers."""
        other = copy.copy(self)
        held = dict(module.named_parameters()) | dict(module.named_buffers())
        for own in ("_params", "_buffers"):
            made = {name: held[name].detach().to(t) for name, t in getattr(self, own).items()}
            setattr(other, own, made)
        return other

    @property
    def params(self) -> Tree:
        """A copy of the initial parameters of the module."""
        return tree_map(torch.clone, self._params)

    @property
    def buffers(self) -> Tree:
        return tree_map(torch.clone, self._buffers)

    @property
    def frozen(self) -> Tree:
        """A copy of the frozen tensors, which never change."""
        return tree_map(torch.clone, self._frozen | self._kept)

    @property
    def nodes(self) -> list[fx.Node]:
        """The layers in the order of the forward pass; [] if it cannot be traced."""
        return self._stacked.nodes if self._stacked else []

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return sum(p.numel() for p in self._params.values())

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that `single` calls, under the names that the user's module gives them."""
        yield from self._functional.module.named_modules()

    def fast(self, lr: float | None) -> Model:
        """`single` with faster layers, whose results are rounded differently.

        With an `lr`, layers apply the step w -= lr * grad in the backward pass. If weights are cast
        to another dtype for multiplication, there is no fast path.
        """
        path = FastPath(lr) if self.compute is self.dtype else None
        return SingleModel(self._functional, self._fast_layers, path)

    def predict(self, params: Tree, buffers: Tree, images: Tensor, *, fast: bool = False) -> Tensor:
        """The logits [B, L] in evaluation; if `fast`, rounded differently."""
        no_key = torch.zeros((), dtype=torch.int64, device=images.device)
        path = FastPath() if fast and self.compute is self.dtype else None
        with torch.no_grad(), on_fast_path(self._fast_layers, path):
            inputs = channels_last(self._functional.numerics.normalise(images))
            no_mask = inputs.new_empty(0)
            return self._functional(params | buffers, inputs, no_key, no_mask, training=False)

    def predict_stacked(self, model: Tree, images: Tensor) -> Tensor:
        """The logits [B, L] by the layers of `stacked`, which are faster on a GPU."""
        models = {name: t.unsqueeze(0) for name, t in model.items()}
        return self.predict_each(models, images.unsqueeze(0)).squeeze(0)

    def predict_each(self, models: Tree, images: Tensor) -> Tensor:
        """The logits [C, B, L] of C models, each on its own images [C, B, ...], likewise."""
        if not isinstance(self.stacked, LayeredModel):
            each = [
                self.predict({name: t[number] for name, t in models.items()}, {}, some)
                for number, some in enumerate(images)
            ]
            return torch.stack(each)
        with torch.no_grad():
            return self.stacked.predict(self.lay_out_stacked(models), images).to(self.dtype)

    @cached_property
    def row_layers(self) -> dict[str, nn.Linear]:
        """The trained linear layers that `stacked` calls once, with rows [C, B, n], by name."""
        if self._stacked is None:
            return {}
        return {
            name: layer
            for name, layer in self.module.named_modules()
            if isinstance(layer, nn.Linear)
            and self._stacked.takes_rows(name)
            and f"{name}.weight" in self._params
        }

    def flattened_channels(self, layer: str) -> int | None:
        """The channels of the images that `stacked` flattens for this layer alone, or None."""
        return self._stacked.flattened_channels(layer) if self._stacked else None

    def lay_out_stacked(self, params: Tree) -> Tree:
        """The same parameters [G, ...], with kernels stored as [G, h, w, channels, out]."""
        if self._stacked is None:
            return params
        return {
            name: p.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2) if p.ndim == 5 else p
            for name, p in params.items()
        }

    def lay_out_single(self, params: Tree) -> Tree:
        """The same parameters [G, ...], with kernels in the memory layout that `fast` reads."""
        return {
            name: winograd.lay_out(p) if name in self._winograd else p for name, p in params.items()
        }


def _tensors(module: nn.Module) -> tuple[Tree, Tree, Tree]:
    """A module's trained parameters, copies of its buffers that change, and its frozen tensors."""
    params: Tree = {}
    buffers: Tree = {}
    frozen: Tree = {}
    keyed, masked = side_inputs(module)
    constant = {id(b) for m in module.modules() if is_frozen(m) for b in m.buffers(recurse=False)}
    for name, p in module.named_parameters():
        (params if p.requires_grad else frozen)[name] = p.detach()
    for name, b in module.named_buffers():
        if name not in {*keyed, *masked}:
            (frozen if id(b) in constant else buffers)[name] = b.detach().clone()
    return params, buffers, frozen
