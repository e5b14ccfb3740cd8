"""Tests a loss of the user's own before anything is trained or written."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlens.algorithm.pieces.losses import Loss, LossWith
from fedlens.config.own_code import place_of, place_of_error

CLIENTS, BATCH = 2, 3


def try_loss(loss: Loss, name: str, num_outputs: int, num_classes: int) -> None:
    """Call it as training does, on artificial logits [C, B, L]: it must return losses [C, B]."""
    labels = torch.arange(CLIENTS * BATCH).view(CLIENTS, BATCH) % num_classes
    numbers = torch.arange(CLIENTS * BATCH * num_outputs, dtype=torch.float32).sin()
    logits = numbers.view(CLIENTS, BATCH, num_outputs).requires_grad_()
    handed = f"logits [{CLIENTS}, {BATCH}, {num_outputs}] and labels [{CLIENTS}, {BATCH}]"
    try:
        given = loss(logits, labels)
    except Exception as error:  # it may raise anything
        where = place_of_error(error)
        raise ValueError(
            f"loss {name!r} cannot take {handed}, of clients and examples"
            + (f" ({where}): fix it there" if where else f" ({error}): change its parameters")
        ) from error
    if isinstance(given, Tensor) and given.shape == labels.shape and given.requires_grad:
        return
    if not isinstance(given, Tensor):
        found, remedy = type(given).__name__, "return the loss of each example"
    elif given.shape != labels.shape:
        found, remedy = f"a tensor {list(given.shape)}", "return the loss of each example, no mean"
    else:
        found, remedy = "losses without a gradient", "compute them from the logits, attached"
    function = loss.function if isinstance(loss, LossWith) else loss
    raise ValueError(f"loss {name!r}, {place_of(function)}, gave {found} for {handed}: {remedy}")
