"""Local training that protects single examples, and what cannot be combined with it."""

from __future__ import annotations

from dataclasses import replace

from fedlens.algorithm.algorithm import Algorithm
from fedlens.algorithm.pieces import (
    Epochs,
    GradientDescent,
    PerExample,
    PoissonBatches,
    Probed,
    Steps,
)
from fedlens.algorithm.pieces.objective import PenaltyBy
from fedlens.algorithm.slots import Solve
from fedlens.config.consent import place_of
from fedlens.core import Number, is_on

WHAT = "privacy of examples"


def protect_examples(
    base: Algorithm,
    clip: Number,
    noise: Number,
    count_noise: Number = 0.0,
) -> Algorithm:
    """`base` with Poisson batches, clipped gradients of single examples, and noise.

    Papers come after it: those that need batches of another kind refuse it.

    Args:
        count_noise: that of the label counts that clients send, if the algorithm needs them.
    """
    draw = base.draw
    if isinstance(draw, Epochs) and not draw.uneven:
        batches = PoissonBatches(draw.batch_size, draw.count)
    elif isinstance(draw, Steps) and draw.low == draw.high and draw.most is None:
        batches = PoissonBatches(draw.batch_size, draw.low, draw.of)
    else:
        raise ValueError(
            f"{WHAT} counts on as many steps in each round: give local.epochs or local.steps as a "
            "number, and leave max_steps out"
        )
    private = PerExample(clip, noise, draw.batch_size, count_noise)
    return replace(base, draw=batches, objective=replace(base.objective, private=private))


def at_a_site(algorithm: Algorithm) -> Algorithm:
    """With batches and noise from the operating system: the server knows all keys."""
    draw, objective = algorithm.draw, algorithm.objective
    assert isinstance(draw, PoissonBatches) and objective.private is not None
    private = replace(objective.private, secret=True)
    objective = replace(objective, private=private)
    return replace(algorithm, draw=replace(draw, secret=True), objective=objective)


def check_protected(algorithm: Algorithm) -> None:
    """Raise a ValueError if gradients of single examples are not all that clients send of data."""
    objective, draw, solve = algorithm.objective, algorithm.draw, algorithm.solve
    assert objective.private is not None
    for weight in objective.weights:
        raise ValueError(
            f"{WHAT} counts every example alike, and {type(weight).__name__} weighs them by what "
            "the client holds: leave fedir, local.class_balance and other weights out"
        )
    for penalty in objective.penalties:
        if penalty.reads_features:
            raise ValueError(
                f"{WHAT}: {type(penalty).__name__} reads features of the examples, and has no "
                "noise: choose another algorithm"
            )
        if isinstance(penalty, PenaltyBy):
            raise ValueError(
                f"{WHAT}: {place_of(penalty.function)} may read the data of a client, and has no "
                "noise: derive it from fedlens.algorithm.slots.Penalty if it reads none"
            )
    if not isinstance(draw, PoissonBatches):
        raise ValueError(
            f"{WHAT} needs Poisson batches, and {type(draw).__name__} draws others: leave out "
            "what sets what clients draw"
        )
    noised = {"label_counts"} if is_on(objective.private.count_noise) else set()
    if facts := sorted(algorithm.discloses - noised):
        raise ValueError(
            f"{WHAT} covers gradients alone, and clients would send their {', '.join(facts)}: set "
            "privacy.count_noise, or leave out what needs them (fedns, lastfc)"
        )
    if noised - algorithm.discloses:
        raise ValueError("privacy.count_noise has no effect, for no client sends counts: remove it")
    if algorithm.personal is not None and algorithm.personal.tune:
        raise ValueError(
            f"{WHAT} counts the steps of rounds, and clients would take more after the last, to "
            "tune the model: choose another algorithm"
        )
    if algorithm.pace is not None:
        raise ValueError(
            f"{WHAT} must know how often each client takes part, and in asynchronous rounds the "
            "fastest do most often: choose another algorithm"
        )
    if solve.reads_batch:
        raise ValueError(
            f"{WHAT}: {type(solve).__name__} reads gradients of a second model, which have no "
            "noise: choose another algorithm"
        )
    if isinstance(whole := _innermost(solve), GradientDescent | Probed):
        raise ValueError(
            f"{WHAT} needs steps that count alike, and {type(whole).__name__} goes through all "
            "examples: choose another algorithm or optimizer"
        )


def _innermost(solve: Solve) -> Solve:
    while not isinstance(solve, Probed) and (inner := getattr(solve, "inner", None)) is not None:
        solve = inner
    return solve
