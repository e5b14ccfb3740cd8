"""Low-rank adaptation (LoRA; Hu et al., ICLR 2022, arXiv 2106.09685).

A layer's weights W stay as they are, and a product of two thin matrices is trained beside them:

    y = (W + B A) x + b,        A [rank, ins], B [outs, rank].

B is 0 at first, so that training begins at the model as it is.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedlens.core import Tree
from fedlens.network.layers import replaced

LAYER, DOWN, UP = "layer", "lora_down", "lora_up"


class LowRank(nn.Module):
    """A linear layer or a convolution of one pixel that stays, and what is trained beside it."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_down: nn.Module
        self.lora_up: nn.Module
        if isinstance(layer, nn.Linear):
            self.lora_down = nn.Linear(layer.in_features, rank, bias=False)
            self.lora_up = nn.Linear(rank, layer.out_features, bias=False)
        else:
            self.lora_down = nn.Conv2d(layer.in_channels, rank, 1, layer.stride[0], bias=False)
            self.lora_up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.lora_up(self.lora_down(x))
        return out


def low_rank(module: nn.Module, rank: int, head: str) -> None:
    """Let the trained layers of a module learn by low rank, and those of other kinds not at all.

    The layer `head` is trained whole: it is new, or small.
    """
    found: list[nn.Module] = []

    def replacement(part: nn.Module) -> nn.Module:
        own = [p for p in part.parameters(recurse=False) if p.requires_grad]
        if not own or part is kept:
            return part
        if type(part) is nn.Linear or (type(part) is nn.Conv2d and _is_pixelwise(part)):
            found.append(part)
            return LowRank(part, rank)
        for p in own:
            p.requires_grad_(False)
        return part

    kept = module.get_submodule(head)
    replaced(module, replacement)
    if not found:
        raise ValueError(
            "lora is for linear layers and convolutions of 1 × 1 before the head, and the model "
            "trains none: leave lora out, or set train to more layers"
        )


def _is_pixelwise(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == (1, 1) and layer.groups == 1 and layer.padding == (0, 0)


def merged(tensors: Tree) -> Tree:
    """Tensors by the names of the model as it is without low rank, with W + B A for W."""
    made: Tree = {}
    for name, tensor in tensors.items():
        place, _, kind = name.rpartition(".")
        layer, _, part = place.rpartition(".")
        up = tensors.get(f"{layer}.{UP}.weight")
        if up is None or part not in (LAYER, DOWN, UP):
            made[name] = tensor
        elif part == LAYER:
            if kind == "weight":
                down = tensors[f"{layer}.{DOWN}.weight"]
                learned = (up.flatten(1) @ down.flatten(1)).view_as(tensor)
                tensor = tensor + learned.to(tensor.device)  # what is frozen is on the host
            made[f"{layer}.{kind}"] = tensor
    return made
