"""A module as a function of its tensors, images, and the keys and masks of its layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedlens.core import Tree
from fedlens.network.layers import side_inputs
from fedlens.network.model import Constants, Numerics


class FunctionalModule:
    """`torch.func.functional_call` of one module, with the place of each tensor looked up once.

    It also works under `torch.func.vmap`.
    """

    def __init__(self, module: nn.Module, numerics: Numerics, constants: Constants) -> None:
        self.module, self.numerics, self.constants = module, numerics, constants
        self.keyed, self.masked = side_inputs(module)
        self.mode, self._slots = TrainingMode(module), _slots(module)

    def __call__(
        self, tensors: Tree, inputs: Tensor, key: Tensor, mask: Tensor, *, training: bool
    ) -> Tensor:
        """(parameters and buffers, normalised images [B], key [], mask [B]) -> logits [B, L]"""
        self.mode.set(training)
        side = dict.fromkeys(self.keyed, key) | dict.fromkeys(self.masked, mask)
        every = self.numerics.cast(tensors) | self.constants.on(inputs.device) | side
        for name, tensor in every.items():
            for holder, attribute in self._slots[name]:
                holder[attribute] = tensor
        logits = self.module(inputs)
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"the model gives a {type(logits).__name__}: let it return its outputs alone, "
                "a tensor [images, classes]"
            )
        return logits.to(self.numerics.dtype)


class TrainingMode:
    """Switches a module between training and evaluation; frozen layers stay in evaluation."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._frozen = [layer for layer in module.modules() if is_frozen(layer)]

    def set(self, training: bool) -> None:
        if self.module.training is not training:
            self.module.train(training)
            for layer in self._frozen:
                layer.eval()


def is_frozen(layer: nn.Module) -> bool:
    """Whether a layer has parameters of its own, and none of them is trained."""
    own = list(layer.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own)


Slots = dict[str, list[tuple[dict[str, Any], str]]]


def _slots(module: nn.Module) -> Slots:
    """The layers' dicts that hold each parameter and buffer; a shared tensor is in several."""
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    slots: Slots = {name: [] for name in names.values()}
    for part in module.modules():
        holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in holders:
            for attribute, tensor in holder.items():
                if tensor is not None:
                    slots[names[id(tensor)]].append((holder, attribute))
    return slots
