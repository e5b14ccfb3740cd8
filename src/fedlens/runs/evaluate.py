"""How good the server's model is, on whole sets and client by client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens.build import Setup
from fedlens.core import Examples, Holdings, Tree
from fedlens.engines.engine import Which
from fedlens.experiment import Experiment
from fedlens.rounds import State
from fedlens.runs.measures import PARTS, measure_name
from fedlens.runs.metrics import Tally, accuracy_by_client, metrics, spread

Predict = Callable[[Tree, Examples, Sequence[Which]], Iterator[Tensor]]
"""(model, examples, batches) -> the logits [B, L] of one batch after another."""

BATCH = 1000  # images at the most; a GPU takes more of them, since launching is what costs there
PIXELS = 2**21  # and so many of them together, as activations grow with them
ON_GPU = 4  # times as many


class Twin(NamedTuple):
    """What the centralised twin of a run came to (see `twin.py`)."""

    accuracy: float
    cached: bool  # whether it had been trained before


class Details(NamedTuple):
    """An evaluation in detail."""

    part: str | None  # the primary part
    confusion: Tensor | None  # [L, L + 1] true label, prediction; the last column is "no label"
    client_accuracy: Tensor | None  # [K] on what each client held out

    def plain(self) -> dict[str, Any]:
        """What there is of it, ready for JSON."""
        found = {k: v for k, v in self._asdict().items() if v is not None}
        return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in found.items()}


def primary_part(experiment: Experiment) -> str:
    """The part by which a run is compared with others: test, else validation, else train."""
    return next(part for part in PARTS if part in experiment.evaluate.on)


def evaluate_run(setup: Setup, state: State, twin: Twin | None) -> tuple[dict[str, float], Details]:
    """All that the experiment asks of its model, by the names in `measures`, and the details."""
    found: dict[str, float] = {}
    primary = primary_part(setup.experiment) if setup.parts else None
    confusion, by_client = None, None
    loss, predict = setup.program.algorithm.objective.loss, setup.engine.predict
    for part, examples in setup.parts.items():
        tally = evaluate(predict, state, examples, setup.dataset.num_classes, loss)
        found |= {measure_name(part, key): value for key, value in metrics(tally).items()}
        if part == primary:
            confusion = tally.confusion
    if twin is not None:
        assert primary is not None, "a twin is compared on some part: evaluate.on was checked"
        own = found[measure_name(primary, "accuracy")]
        found["relative_accuracy"] = own / twin.accuracy if twin.accuracy else math.nan
    if setup.held_out is not None:
        examples = setup.federation.examples
        by_client = evaluate_clients(predict, state, examples, setup.held_out)
        found |= {f"client_accuracy_{key}": value for key, value in spread(by_client).items()}
    return found, Details(primary, confusion, by_client)


def evaluate(
    predict: Predict,
    state: State,
    examples: Examples,
    num_classes: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Tally:
    """What the answers of the server's model add up to; `metrics` reads it."""
    tally = Tally.zero(num_classes, examples.labels.device)
    batch = _batch(examples)
    batches = [slice(start, start + batch) for start in range(0, len(examples), batch)]
    model = state.params | state.buffers
    for which, logits in zip(batches, predict(model, examples, batches), strict=True):
        labels = examples.labels[which]
        losses = loss(logits.unsqueeze(0), labels.unsqueeze(0)).squeeze(0)
        tally = tally + Tally.of(logits, labels, num_classes, losses)
    return tally


def evaluate_clients(
    predict: Predict, state: State, examples: Examples, held_out: Holdings
) -> Tensor:  # [K]
    """The accuracy on each client's own held-out examples.

    A client that keeps normalisation layers of its own is tested with them.
    """
    own = {client: row["norm"] for client, row in state.clients.rows.items() if "norm" in row}
    if not own:
        return accuracy_by_client(_correct(predict, state, examples, held_out.index, {}), held_out)
    correct = [
        _correct(predict, state, examples, held_out.members(client), own.get(client, {}))
        for client in range(len(held_out))
    ]
    return accuracy_by_client(torch.cat(correct), held_out)


def _batch(examples: Examples) -> int:
    """How many images are evaluated together."""
    height, width = examples.images.shape[2:]
    times = ON_GPU if examples.images.is_cuda else 1
    return min(max(times * PIXELS // (height * width), 1), times * BATCH)


def _correct(
    predict: Predict, state: State, examples: Examples, index: Tensor, own: Tree
) -> Tensor:  # [n] bool
    device = examples.labels.device
    model = state.params | state.buffers | {name: t.to(device) for name, t in own.items()}
    found = [index.new_zeros(0, dtype=torch.bool)]
    batches = [some for some in torch.split(index.to(device), _batch(examples)) if len(some)]
    for some, logits in zip(batches, predict(model, examples, batches), strict=True):
        found.append((logits.argmax(1) == examples.labels[some]).cpu())
    return torch.cat(found)
