"""Steps that are contractions are taken as such: the result is that of the solver and the penalty
themselves."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedlens.algorithm import compose
from fedlens.algorithm.pieces import Sgd, Uniformly
from fedlens.algorithm.slots import LocalStep, Solve
from fedlens.algorithms.admm import fedadmm
from fedlens.engines import Sequential, Stacked
from fedlens.network.network import Network
from fedlens.rounds import begin, run_round
from fedlens.rounds.client import ClientProgram
from tests.factoring import factoring, has_factored
from tests.federations import CPU, FEW, noisy_images, small_cnn, wide
from tests.papers_under_test import ALGORITHMS, PLAIN


@dataclass(frozen=True)
class Silent(Solve):
    """A solver that does not say what its steps are."""

    inner: Any

    def init(self, params):
        return self.inner.init(params)

    def update(self, *arguments):
        return self.inner.update(*arguments)


@pytest.mark.parametrize("name", ["fedprox", "admm", "fedadmm"])
@pytest.mark.parametrize("engine", [Sequential, Stacked])
def test_a_contraction_is_what_its_solver_does_step_by_step(name, engine):
    algorithm = ALGORITHMS[name]
    solver: Any = algorithm.solve
    plain = replace(solver, inner=Sgd(0.05)) if hasattr(solver, "inner") else Sgd(0.05)
    algorithm = replace(algorithm, solve=plain)
    assert algorithm.local_step is not None and not algorithm.local_step.is_plain
    federation = noisy_images(FEW)
    network = Network(small_cnn("group"), dtype=torch.float64)
    states = []
    for solve in (plain, Silent(plain)):
        program = ClientProgram(replace(algorithm, solve=solve), network.layout)
        state = begin(network, program, federation, CPU)
        made = engine(network, federation.examples)
        for _ in range(3):
            state, _ = run_round(program, federation, made, state, seed=0)
        states.append(state)
    torch.testing.assert_close(states[0].params, states[1].params, rtol=1e-10, atol=1e-12)
    for client, memory in states[0].clients.rows.items():
        torch.testing.assert_close(memory, states[1].clients.rows[client], rtol=1e-10, atol=1e-12)


def contracts(step: LocalStep | None) -> bool:
    return step is not None and step.contracts


def test_momentum_and_several_dual_steps_are_no_contractions():
    assert not contracts(Sgd(0.1, momentum=0.9).step)
    assert not contracts(Sgd(0.1, weight_decay=0.1).step)
    assert contracts(Sgd(torch.tensor([0.1, 0.2])).step)
    assert not contracts(ALGORITHMS["ceadmm"].local_step)


def test_clients_may_take_more_steps_than_those_of_rounds_before():
    federation = noisy_images([10] * 6 + [80] * 2)
    network = Network(wide(0.2), dtype=torch.float64)
    algorithm = replace(compose(PLAIN, fedadmm(rho=0.1)), select=Uniformly(2))
    program = ClientProgram(algorithm, network.layout)
    states, steps = [], []
    for factor in (True, False):
        engine = Stacked(network, federation.examples)
        state = begin(network, program, federation, CPU)
        for _ in range(8):
            with factoring(factor):
                state, outcome = run_round(program, federation, engine, state, seed=0)
            steps.append(outcome.batches)
        assert has_factored(engine) is factor
        states.append(state)
    assert max(steps) > steps[0], "a later round has more of them"
    torch.testing.assert_close(states[0].params, states[1].params, rtol=1e-10, atol=1e-12)
