"""How good the server's model is, on whole sets and client by client."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedlens.core import Examples, Holdings, Tree
from fedlens.metrics import Tally, metrics, per_client
from fedlens.network import Network
from fedlens.rounds import State

BATCH = 1000  # images at the most
PIXELS = 2**21  # and so many of them together, as activations grow with them


def evaluate(
    network: Network,
    state: State,
    examples: Examples,
    num_classes: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, float]:
    """Loss, accuracy, top-5 and macro precision, recall and F1 of the server's model."""
    tally = Tally.zero(num_classes, examples.labels.device)
    batch = _batch(examples)
    for start in range(0, len(examples), batch):
        labels = examples.labels[start : start + batch]
        images = examples.read(slice(start, start + batch))
        logits = network.predict(state.params, state.buffers, images)
        losses = loss(logits.unsqueeze(0), labels.unsqueeze(0)).squeeze(0)
        tally = tally + Tally.of(logits, labels, num_classes, losses)
    return metrics(tally)


def evaluate_clients(
    network: Network, state: State, examples: Examples, held_out: Holdings
) -> dict[str, float]:
    """How accuracy on clients' own held-out examples is spread over clients.

    A client that keeps normalisation layers of its own is tested with them.
    """
    own = {client: row["norm"] for client, row in state.clients.rows.items() if "norm" in row}
    if not own:
        return per_client(_correct(network, state, examples, held_out.index, {}), held_out)
    correct = [
        _correct(network, state, examples, held_out.members(client), own.get(client, {}))
        for client in range(len(held_out))
    ]
    return per_client(torch.cat(correct), held_out)


def _batch(examples: Examples) -> int:
    """How many images are evaluated together."""
    height, width = examples.images.shape[2:]
    return min(max(PIXELS // (height * width), 1), BATCH)


def _correct(
    network: Network, state: State, examples: Examples, index: Tensor, own: Tree
) -> Tensor:  # [n] bool
    device = examples.labels.device
    model = state.params | state.buffers | {name: t.to(device) for name, t in own.items()}
    found = [index.new_zeros(0, dtype=torch.bool)]
    for some in torch.split(index.to(device), _batch(examples)):
        if len(some):
            predicted = network.predict(model, {}, examples.read(some)).argmax(1)
            found.append((predicted == examples.labels[some]).cpu())
    return torch.cat(found)
