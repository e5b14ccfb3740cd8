"""temporary"""

from __future__ import annotations

from torch import Tensor

from fedlens.core import Number, per_row


def local_step_(
    w: list[Tensor],
    g: list[Tensor],
    server: list[Tensor],
    drift: list[Tensor],
    lr: Number,
    decay: Number,
) -> None:
    if isinstance(lr, Tensor) or isinstance(decay, Tensor):
        for i, (p, grad, s) in enumerate(zip(w, g, server, strict=True)):
            total = grad + drift[i] if drift else grad
            p.copy_(s + per_row(decay, p) * (p - s) - per_row(lr, p) * total)
        return
    for p, grad, s in zip(w, g, server, strict=True):
        p.mul_(decay).add_(s, alpha=1 - decay).add_(grad, alpha=-lr)
    for p, d in zip(w, drift, strict=bool(drift)):
        p.add_(d, alpha=-lr)
