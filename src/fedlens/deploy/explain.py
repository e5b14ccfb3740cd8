"""Grad-CAM: where in an image a model sees a class (Selvaraju et al. 2017, arXiv:1610.02391).

The feature maps A_k [H, W] are those that come of the last convolution, just before they are pooled
or flattened. Each counts as much as the class's logit y grows with its mean:

    heat = max(sum_k a_k A_k, 0),  a_k = mean over positions of dy / dA_k

If the maps are averaged and a linear layer follows, a_k is that layer's weight over H W: the class
activation map (Zhou et al. 2016).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

AT_ONCE = 8  # images: a graph of a large network fills memory
SMALLEST = 256  # pixels that a side of a picture has, or more
HOT = (255, 96, 0)
OPAQUE = 0.75  # the hottest places


class NoMaps(ValueError):
    """A model without a convolution."""


class _LastMaps(TorchFunctionMode):
    """Keeps what became of the output of the last convolution while it has the same size."""

    maps: Tensor | None = None  # [N, channels, H, W]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not isinstance(made, Tensor) or made.ndim != 4 or made.shape[2:].numel() == 1:
            return made
        if func is torch.conv2d or (
            self.maps is not None and made.shape[2:] == self.maps.shape[2:]
        ):
            self.maps = made
        return made


def heat_maps(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:  # [N, H, W]
    """Where in each image, prepared for the module, it sees a class, between 0 and 1.

    H and W are those of the feature maps. All is 0 if nothing speaks for the class.
    """
    found = []
    for some, own in zip(torch.split(images, AT_ONCE), torch.split(labels, AT_ONCE), strict=True):
        with torch.enable_grad(), _LastMaps() as last:
            logits: Tensor = module(some.detach().requires_grad_())
            score = logits.gather(1, own[:, None]).sum()
        if last.maps is None:
            kind = type(module).__name__
            raise NoMaps(
                f"--explain: the model ({kind}) has no convolution, so it has no places to show: "
                "leave --explain out"
            )
        (slopes,) = torch.autograd.grad(score, last.maps)
        heat = (slopes.mean((2, 3), keepdim=True) * last.maps).sum(1).relu().detach()
        found.append(heat / heat.amax((1, 2), keepdim=True).clamp(min=torch.finfo(heat.dtype).tiny))
    return torch.cat(found)


def picture(pixels: Tensor, heat: Tensor) -> bytes:  # uint8 [channels, H, W], [h, w] -> PNG
    """The image as the model sees it, in gray, under its heat map."""
    from PIL import Image

    larger = -(-SMALLEST // min(pixels.shape[1:]))
    size = [larger * side for side in pixels.shape[1:]]
    gray = F.interpolate(pixels.float().mean(0)[None, None], size)[0, 0]
    cover = OPAQUE * F.interpolate(heat[None, None].float(), size, mode="bilinear")[0, 0].cpu()
    layers = [gray * (1 - cover) + colour * cover for colour in HOT]
    content = io.BytesIO()
    Image.fromarray(torch.stack(layers, 2).round().byte().numpy()).save(content, "PNG")
    return content.getvalue()
