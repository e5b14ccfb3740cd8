"""local.reset = false carries a client's momentum to its next round, and nothing else."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Sgd
from fedlens.algorithms.admm import admm, ceadmm
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.liadmm import celiadmm, liadmm
from fedlens.algorithms.qfedavg import qfedavg
from fedlens.algorithms.scaffold import scaffold
from tests.federations import FEW, assert_equal, noisy_images, train
from tests.papers_under_test import BASE, PLAIN

WITH_MORE_IN_THEIR_SOLVER = {
    "admm, k0 = 2": compose(PLAIN, admm(rho=0.1, k0=2)),
    "ceadmm": compose(PLAIN, ceadmm(rho=0.1, k0=3)),
    "celiadmm": compose(PLAIN, celiadmm(gamma=0.1, k0=3)),
    "liadmm": compose(PLAIN, liadmm(gamma=0.1)),
    "fedprox with inexactness": compose(PLAIN, fedprox(0.1, inexactness=True)),
    "qfedavg": compose(PLAIN, qfedavg(q=1.0)),
    "scaffold": compose(PLAIN, scaffold()),
}


@pytest.mark.parametrize("name", WITH_MORE_IN_THEIR_SOLVER)
def test_without_momentum_there_is_nothing_to_carry(name):
    algorithm = WITH_MORE_IN_THEIR_SOLVER[name]
    federation = noisy_images(FEW)
    expected = train(algorithm, rounds=3, federation=federation)
    found = train(replace(algorithm, reset=False), rounds=3, federation=federation)
    assert_equal(found=found.params, expected=expected.params)


@pytest.mark.parametrize("wrap", [ceadmm(rho=0.1, k0=2), qfedavg(q=1.0)])
def test_momentum_is_carried_through_whatever_is_around_it(wrap):
    kept = train(replace(compose(BASE, wrap), reset=False), rounds=3)
    for row in kept.clients.rows.values():
        solver = {name for name in row if name.startswith("solver.")}
        assert solver == {"solver.velocity"}
    afresh = train(compose(BASE, wrap), rounds=3)
    assert any(not torch.equal(kept.params[n], p) for n, p in afresh.params.items())


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
@pytest.mark.parametrize("paper", [liadmm(gamma=0.1), celiadmm(gamma=0.1)])
def test_what_a_gradient_step_would_ignore_is_refused(paper, key):
    number: dict[str, Any] = {key: 0.5}
    solve = replace(Sgd(0.1), **number)
    with pytest.raises(ValueError, match=rf"takes plain gradient steps: set local\.{key} = 0"):
        compose(Algorithm(solve=solve), paper)


def test_liadmm_that_trains_takes_both():
    compose(BASE, liadmm(gamma=0.1, local="training"))
