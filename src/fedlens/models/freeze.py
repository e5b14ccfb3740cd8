"""Which layers of a model are trained.

A parameter that does not require a gradient is frozen: it belongs to the model, but it is neither
trained nor sent. If all parameters of a layer are frozen, its buffers do not change either.
"""

from __future__ import annotations

from torch import nn

from fedlens.network.layout import Layout


def train_last(module: nn.Module, count: int) -> None:
    """Freeze all but the last `count` layers that have weights, in the order they are declared.

    A normalisation layer belongs to the layer before it, and is not counted.
    """
    entries = Layout.of(module).entries.values()
    weighted = list(dict.fromkeys(e.layer for e in entries if e.role == "weight"))
    if count > len(weighted):
        raise ValueError(
            f"train_last is {count}, but the model has {len(weighted)} layers: "
            f"choose 1 to {len(weighted)}"
        )
    layers = list(dict.fromkeys(e.layer for e in entries))
    trained = layers[layers.index(weighted[-count]) :]
    kept = {id(p) for layer in trained for p in module.get_submodule(layer).parameters(False)}
    for p in module.parameters():
        p.requires_grad_(id(p) in kept)


def freeze_norms(module: nn.Module) -> None:
    """Freeze every normalisation layer: weights, biases and statistics."""
    for layer in Layout.of(module).norm_layers:
        norm = module.get_submodule(layer).requires_grad_(False)
        if list(norm.buffers()) and not list(norm.parameters()):
            raise ValueError(f"{layer} has statistics but no weights to freeze: set affine=True")
