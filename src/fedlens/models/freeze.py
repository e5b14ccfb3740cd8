"""Which layers of a model are trained.

A parameter that does not require a gradient is frozen: it belongs to the model, but it is neither
trained nor sent. If all parameters of a layer are frozen, its buffers do not change either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from fedlens.network.layout import NORMS, Layout


def weighted_layers(module: nn.Module) -> list[str]:
    """The layers that have weights, in the order they are declared; the last one is the head.

    A normalisation layer belongs to the layer before it, and is not among them.
    """
    entries = Layout.of(module).entries.values()
    return list(dict.fromkeys(e.layer for e in entries if e.role == "weight"))


def train_last(module: nn.Module, which: str | int) -> None:
    """Freeze all but the `head`, the `last-block` or so many of the last layers with weights."""
    weighted = weighted_layers(module)
    count = which if isinstance(which, int) else 1 if which == "head" else _num_last(weighted)
    if count > len(weighted):
        raise ValueError(
            f"train is {count}, but the model has {len(weighted)} layers: "
            f"choose 1 to {len(weighted)}"
        )
    layers = list(dict.fromkeys(e.layer for e in Layout.of(module).entries.values()))
    _freeze(module, layers[: layers.index(weighted[-count])])


def _num_last(weighted: Sequence[str]) -> int:
    """How many layers there are from the last block on.

    A block is numbered, as in torchvision's and timm's models, and has several layers.
    """
    for layer in reversed(weighted[:-1]):
        place = layer
        while place := place.rpartition(".")[0]:
            inside = [i for i, name in enumerate(weighted) if name.startswith(f"{place}.")]
            if place.rpartition(".")[2].isdigit() and len(inside) > 1:
                return len(weighted) - inside[0]
    raise ValueError(
        'train is "last-block", but the model has no numbered blocks of several layers: give a '
        "number of layers"
    )


def freeze_norms(module: nn.Module) -> None:
    """Freeze every normalisation layer: weights, biases and statistics."""
    _freeze(module, Layout.of(module).norm_layers)


def _freeze(module: nn.Module, layers: Iterable[str]) -> None:
    for layer in layers:
        part = module.get_submodule(layer)
        own = list(part.parameters(recurse=False))
        if isinstance(part, NORMS) and list(part.buffers()) and not own:
            raise ValueError(f"{layer} has statistics but no weights to freeze: set affine=True")
        for p in own:
            p.requires_grad_(False)
