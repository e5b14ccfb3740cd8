"""The layer, the role, and the axis of nodes (output units) of each tensor of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


Role = Literal["weight", "bias", "norm", "buffer"]


class Entry(NamedTuple):
    layer: str
    role: Role
    node_axis: int | None  # None for a tensor without nodes (a counter)


@dataclass(frozen=True)
class Layout:
    """A model's tensors by name, read from the module once."""

    entries: Mapping[str, Entry]
    norm_layers: Mapping[str, str | None]  # to the layer whose nodes each one normalises
    last: str | None  # the layer whose nodes are the classes

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        entries: dict[str, Entry] = {}
        norms: dict[str, str | None] = {}
        last = before = None
        nodes: dict[str, int] = {}
        for layer, part in module.named_modules():
            prefix = f"{layer}." if layer else ""
            weight = getattr(part, "weight", None)
            if isinstance(part, NORMS):
                size = getattr(part, "num_features", getattr(part, "num_channels", None))
                norms[layer] = before if before is not None and nodes[before] == size else None
            elif isinstance(weight, nn.Parameter) and weight.ndim > 1:
                before = layer
                nodes[layer] = weight.shape[1 if isinstance(part, TRANSPOSED) else 0]
            if isinstance(part, nn.Linear):
                last = layer
            for name, tensor in part.named_parameters(recurse=False):
                axis = 1 if name == "weight" and isinstance(part, TRANSPOSED) else 0
                role: Role = "norm" if layer in norms else "bias" if name == "bias" else "weight"
                entries[prefix + name] = Entry(layer, role, axis if tensor.ndim else None)
            for name, tensor in part.named_buffers(recurse=False):
                entries[prefix + name] = Entry(layer, "buffer", 0 if tensor.ndim else None)
        return cls(entries, norms, last)

    @property
    def norm_names(self) -> list[str]:
        """The parameters and buffers of normalisation layers."""
        return [name for name, entry in self.entries.items() if entry.layer in self.norm_layers]
