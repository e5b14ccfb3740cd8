"""Rounds of several experiments, whose clients train as one cohort: each as it would be alone."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from federations import CPU, ENGINES, RAGGED, assert_equal, noisy_images, small_cnn
from fedlens.algorithm import Algorithm, alike, side_by_side
from fedlens.client import ClientProgram
from fedlens.core import Federation, Fixed, Holdings, Number
from fedlens.network import Network
from fedlens.pieces import GradientDescent, Objective, Sgd
from fedlens.rounds import State, Turn, begin, run_rounds
from papers_under_test import ALGORITHMS, BASE

DOUBLE = torch.zeros(0, dtype=torch.float64)
SIZES = [RAGGED, [20, 40, 25, 35, 10, 50, 30, 30, 45, 15]]  # by seed


def other(filling: Any) -> Any:
    """The same filling with other numbers."""
    if isinstance(filling, tuple):
        return tuple(map(other, filling))
    if not is_dataclass(filling) or isinstance(filling, type):
        return filling
    changes = {}
    for f in fields(filling):
        value = getattr(filling, f.name)
        changes[f.name] = 0.9 * value if f.type in (Number, "Number") else other(value)
    return replace(filling, **changes)


def net(norm: str) -> Network:
    return Network(small_cnn(norm, dropout=0.2), dtype=torch.float64)


def points(algorithm: Algorithm, norm: str) -> list[Turn]:
    """Two seeds and other numbers: they differ in clients, initial models, draws and numbers."""
    images = noisy_images(RAGGED)
    turns = []
    for seed, chosen in ((0, algorithm), (0, other(algorithm)), (1, algorithm)):
        order = torch.randperm(sum(RAGGED), generator=torch.Generator().manual_seed(seed))
        holdings = Holdings.of(order.split(SIZES[seed]))
        federation = Federation(images.examples, images.num_classes, Fixed(holdings))
        network = net(norm)
        program = ClientProgram(chosen, network.layout)
        state = begin(network, program, federation, CPU)
        moved = {name: p * (1 + seed / 10) for name, p in state.params.items()}
        turns.append(Turn(program, federation, replace(state, params=moved), seed))
    return turns


def train(engine: str, norm: str, turns: list[Turn]) -> tuple[list[State], list[dict]]:
    """Two rounds: the states after them, and what was recorded."""
    made = ENGINES[engine](net(norm), turns[0].federation.examples)
    together = ClientProgram.together([turn.program for turn in turns], DOUBLE)
    records: list[dict] = [{} for _ in turns]
    for number in range(2):
        after = run_rounds(together, made, turns)
        turns = [replace(turn, state=s) for turn, (s, _) in zip(turns, after, strict=True)]
        for record, (_, outcome) in zip(records, after, strict=True):
            record |= {f"{name} {number}": value for name, value in outcome.scalars.items()}
            record[f"loss {number}"] = outcome.train_loss
            record[f"counts {number}"] = torch.tensor(outcome[1:5])
    return [turn.state for turn in turns], records


def everything(state: State) -> dict[str, torch.Tensor]:
    """All that a state holds, by name."""
    found = {**state.params, **state.buffers}
    memories = {"server": state.server, "told": state.told, **state.clients.rows}
    for whose, memory in memories.items():
        for kind, tree in memory.items():
            found |= {f"{whose} {kind} {name}": t for name, t in tree.items()}
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_experiment_is_what_it_would_be_alone(name):
    turns = points(ALGORITHMS[name], "batch")
    found, records = train("stacked", "batch", turns)
    for turn, state, record in zip(turns, found, records, strict=True):
        (alone,), (expected,) = train("stacked", "batch", [turn])
        torch.testing.assert_close(everything(state), everything(alone), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(record, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("engine", ["sequential", "stacked, two at a time"])
def test_engines_agree_on_several_experiments(engine):
    turns = points(ALGORITHMS["fedprox"], "batch")
    expected, _ = train("stacked", "batch", turns)
    found, _ = train(engine, "batch", turns)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(everything(one), everything(two), rtol=1e-9, atol=1e-11)


def test_a_cohort_of_two_seeds_has_the_same_bytes_as_alone():
    first, _, last = points(BASE, "none")
    found, _ = train("stacked", "none", [first, last])
    for turn, state in zip((first, last), found, strict=True):
        (alone,), _ = train("stacked", "none", [turn])
        assert_equal(found=state.params, expected=alone.params)


def test_an_experiment_that_is_lost_takes_no_other_with_it():
    first, second, _ = points(BASE, "batch")
    broken = {name: torch.full_like(p, torch.nan) for name, p in second.state.params.items()}
    lost = replace(second, state=replace(second.state, params=broken))
    (sound, unsound), _ = train("stacked", "batch", [first, lost])
    (alone,), _ = train("stacked", "batch", [first])
    torch.testing.assert_close(everything(sound), everything(alone), rtol=1e-9, atol=1e-11)
    assert all(p.isnan().any() for p in unsound.params.values())


@dataclass(frozen=True)
class Penalty:
    """One of a user's own, which does not say that its number may be a tensor."""

    mu: float

    def __call__(self, local):
        return torch.stack([self.mu * p.abs().sum() for p in local.params.values()]).sum()


def test_fillings_are_alike_if_they_differ_in_numbers_alone():
    assert alike(Sgd(0.1), Sgd(0.2, momentum=0.9))
    assert not alike(Sgd(0.1), Sgd(0.1, nesterov=True))
    assert not alike(GradientDescent(0.1), Sgd(0.1))
    assert not alike(GradientDescent(0.1, passes=1), GradientDescent(0.1, passes=2))
    one, two = (Objective(penalties=(Penalty(mu),)) for mu in (0.1, 0.2))
    assert alike(one, one) and not alike(one, two)
    assert not alike(one, Objective())


def test_only_numbers_that_differ_become_tensors():
    merged = side_by_side([Sgd(0.1, 0.9), Sgd(0.2, 0.9)], DOUBLE)
    assert merged.momentum == 0.9
    assert merged.lr.tolist() == [0.1, 0.2]
