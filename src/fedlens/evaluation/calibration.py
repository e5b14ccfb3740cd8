"""Calibration: how sure a model is, brought to how often it is right.

The logits are divided by one number, the temperature, found on held-out examples after the last
round (Guo et al. 2017, arXiv:1706.04599). No prediction changes, only its probability.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedlens.core import Tree
from fedlens.core.federation import Examples
from fedlens.engines import Engine
from fedlens.evaluation.evaluate import batch_of
from fedlens.evaluation.metrics import reliability
from fedlens.evaluation.reliability import BINS, Calibration
from fedlens.setup import Setup

MOST = 10_000  # examples: one number needs no more
COLDEST, HOTTEST = 0.01, 100.0  # temperatures
STEPS = 100  # of Newton at most; some six are usual


def temperature(logits: Tensor, labels: Tensor) -> float:  # [N, L], [N]
    """The T for which softmax(logits / T) has the least cross-entropy with the labels.

    That is convex in 1 / T, and found by Newton's method. One label in n + 1 counts as any class
    (compare Platt 1999): else few examples, all of them right, would make it sure of everything.
    """
    logits = logits.double()
    own, count = logits.gather(1, labels[:, None]).squeeze(1), len(labels)
    target = (count * own + logits.mean(1)) / (count + 1)
    low, high, scale = 1 / HOTTEST, 1 / COLDEST, 1.0
    for _ in range(STEPS):
        share = (scale * logits).softmax(1)
        mean = (share * logits).sum(1)
        spread = (share * (logits - mean[:, None]).square()).sum()
        slope, curvature = float((mean - target).sum()), float(spread)
        low, high = (low, scale) if slope > 0 else (scale, high)
        newton = scale - slope / curvature if curvature else math.inf
        before, scale = scale, newton if low < newton < high else math.sqrt(low * high)
        if abs(scale - before) <= 1e-9 * scale:
            break
    return 1 / scale


def calibration(setup: Setup, engine: Engine, model: Tree) -> Calibration | None:
    """The temperature of a model and its reliability before and after.

    None if no examples are held out, or if they may have several labels. What is said of calibrated
    probabilities is honest: those of one half of the examples have the temperature of the other.
    """
    found = _held_out(setup)
    if found is None or setup.dataset.multi_label:
        return None
    whose, examples, index = found
    index = index[:: -(-len(index) // MOST)].to(examples.labels.device)
    model = {name: t for name, t in model.items() if name not in setup.network.frozen}
    batches = torch.split(index, batch_of(engine, examples))
    logits = torch.cat([each.detach().clone() for each in engine.predict(model, examples, batches)])
    logits, labels = logits[:, : setup.dataset.num_classes].double(), examples.labels[index]
    after = logits.clone()
    for first in (0, 1) if len(labels) > 1 else ():
        other = slice(1 - first, None, 2)
        after[first::2] /= temperature(logits[other], labels[other])
    tables = [reliability(each, labels, BINS).tolist() for each in (logits, after)]
    return Calibration(whose, len(labels), temperature(logits, labels), *tables)


def _held_out(setup: Setup) -> tuple[str, Examples, Tensor] | None:
    """Examples that nobody trained on, a key of `HELD_OUT`, and which examples."""
    tests, parts = setup.client_tests, setup.parts
    for part in ("validation", "clients", "test"):
        if part in parts:
            return part, parts[part], torch.arange(len(parts[part]))
        if part == "clients" and tests is not None and tests.part == "train":
            here = setup.engine.reporting is None and setup.experiment.privacy is None
            if here and len(tests.holdings.index):
                return part, setup.federation.examples, tests.holdings.index
    return None
