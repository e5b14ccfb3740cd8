"""How good the server's model is, on whole sets and client by client."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedlens.core import Examples, Holdings, Tree
from fedlens.metrics import Tally, accuracy_by_client
from fedlens.network import Network
from fedlens.rounds import State

BATCH = 1000


def evaluate(
    network: Network,
    state: State,
    examples: Examples,
    num_classes: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Tally:
    """What the answers of the server's model add up to; `metrics` reads it."""
    tally = Tally.zero(num_classes, examples.labels.device)
    for start in range(0, len(examples), BATCH):
        labels = examples.labels[start : start + BATCH]
        images = examples.images[start : start + BATCH]
        logits = network.predict(state.params, state.buffers, images)
        losses = loss(logits.unsqueeze(0), labels.unsqueeze(0)).squeeze(0)
        tally = tally + Tally.of(logits, labels, num_classes, losses)
    return tally


def evaluate_clients(
    network: Network, state: State, examples: Examples, held_out: Holdings
) -> Tensor:  # [K]
    """The accuracy on each client's own held-out examples.

    A client that keeps normalisation layers of its own is tested with them.
    """
    index = held_out.index
    own = {client: row["norm"] for client, row in state.clients.rows.items() if "norm" in row}
    if not own:
        correct = [
            _correct(network, state, examples, index[start : start + BATCH], {})
            for start in range(0, len(index), BATCH)
        ]
    else:
        correct = [
            _correct(network, state, examples, held_out.members(client), own.get(client, {}))
            for client in range(len(held_out))
        ]
    return accuracy_by_client(torch.cat(correct) if correct else index.new_zeros(0), held_out)


def _correct(
    network: Network, state: State, examples: Examples, index: Tensor, own: Tree
) -> Tensor:
    if len(index) == 0:
        return torch.zeros(0, dtype=torch.bool)
    device = examples.labels.device
    index = index.to(device)
    model = state.params | state.buffers | {name: t.to(device) for name, t in own.items()}
    return (
        network.predict(model, {}, examples.images[index]).argmax(1) == examples.labels[index]
    ).cpu()
