"""Local optimisers and clipping: step by step what torch.optim does, for every client by itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedlens as fl
from fedlens.algorithm import compose
from fedlens.algorithm.pieces import ClippedByNorm, ClippedByValue, Epochs, Sgd, Uniformly
from fedlens.algorithm.pieces.optimizers import Adam
from fedlens.algorithm.slots import Solve
from fedlens.algorithms.fednova import fednova
from fedlens.algorithms.liadmm import celiadmm, liadmm
from fedlens.algorithms.qfedavg import qfedavg
from fedlens.algorithms.scaffold import scaffold
from fedlens.setup.algorithm import make_algorithm
from tests.federations import noisy_images, small_cnn, train
from tests.papers_under_test import BASE
from tests.toys import toy

SHAPES = {"weight": (3, 4), "bias": (3,), "kernel": (2, 1, 2, 2)}
CLIENTS, STEPS = 3, 5
NOBODY: Any = None  # no rule here asks who the client is

Reference = Callable[..., torch.optim.Optimizer]
RULES: dict[str, tuple[Callable[..., Solve], Reference]] = {
    "sgd": (
        lambda lr: Sgd(lr, momentum=0.9, weight_decay=0.1),
        lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9),
    ),
    "sgd, nesterov": (
        lambda lr: Sgd(lr, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9, nesterov=True),
    ),
    "sgd, weights decay": (
        lambda lr: Sgd(lr, weight_decay=0.1, weight_decay_on="weights"),
        lambda groups, lr: torch.optim.SGD(groups, lr),
    ),
    "adam": (
        lambda lr: Adam(lr, weight_decay=0.1),
        lambda groups, lr: torch.optim.Adam(groups, lr),
    ),
    "adam, other numbers": (
        lambda lr: Adam(lr, 0.7, 0.9, 1e-3, 0.1),
        lambda groups, lr: torch.optim.Adam(groups, lr, (0.7, 0.9), 1e-3),
    ),
    "adamw": (
        lambda lr: Adam(lr, weight_decay=0.1, decoupled=True),
        lambda groups, lr: torch.optim.AdamW(groups, lr),
    ),
    "adamw, weights decay": (
        lambda lr: Adam(lr, weight_decay=0.1, decoupled=True, weight_decay_on="weights"),
        lambda groups, lr: torch.optim.AdamW(groups, lr),
    ),
}


def drawn(seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(CLIENTS, *shape, generator=rng, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("lr", [0.1, (0.1, 0.02, 0.3)], ids=["one lr", "an lr a client"])
def test_steps_are_those_of_torch_optim(name, lr):
    make, reference = RULES[name]
    rates = (lr,) * CLIENTS if isinstance(lr, float) else lr
    solve = make(lr if isinstance(lr, float) else torch.tensor(lr, dtype=torch.float64))
    params = drawn(0)
    own = [{n: nn.Parameter(p[c].clone()) for n, p in params.items()} for c in range(CLIENTS)]
    masked = name.endswith("weights decay")
    theirs = [
        reference(
            [
                {"params": [p], "weight_decay": 0.0 if masked and n == "bias" else 0.1}
                for n, p in mine.items()
            ],
            rate,
        )
        for mine, rate in zip(own, rates, strict=True)
    ]
    memory = solve.init(params)
    for step in range(STEPS):
        grads = drawn(1 + step)
        for client, mine in enumerate(own):
            for n, p in mine.items():
                p.grad = grads[n][client].clone()
            theirs[client].step()
        params, memory = solve.update(grads, memory, params, NOBODY)
        for client, mine in enumerate(own):
            for n, p in mine.items():
                torch.testing.assert_close(params[n][client], p.detach(), rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class Unmoved(Solve):
    """Keeps the gradients that it is given, for a test to look at."""

    def init(self, params):
        return {}

    def update(self, grads, memory, params, local):
        return grads, memory


@pytest.mark.parametrize("limit", [0.5, 4.0, 100.0])
def test_clipping_is_that_of_torch_for_each_client_by_itself(limit):
    by_norm, _ = ClippedByNorm(Unmoved(), limit).update(drawn(1), {}, drawn(0), NOBODY)
    by_value, _ = ClippedByValue(Unmoved(), limit / 5).update(drawn(1), {}, drawn(0), NOBODY)
    for client in range(CLIENTS):
        for found, clip, most in (
            (by_norm, nn.utils.clip_grad_norm_, limit),
            (by_value, nn.utils.clip_grad_value_, limit / 5),
        ):
            own: list[Any] = [nn.Parameter(p[client]) for p in drawn(0).values()]
            for p, g in zip(own, drawn(1).values(), strict=True):
                p.grad = g[client].clone()
            clip(own, most)
            for name, p in zip(SHAPES, own, strict=True):
                torch.testing.assert_close(found[name][client], p.grad, rtol=1e-12, atol=1e-14)


def test_limits_may_differ_from_client_to_client():
    limits = (0.5, 2.0, 8.0)
    for wrap in (ClippedByNorm, ClippedByValue):
        together, _ = wrap(Unmoved(), torch.tensor(limits, dtype=torch.float64)).update(
            drawn(1), {}, drawn(0), NOBODY
        )
        for client, limit in enumerate(limits):
            alone, _ = wrap(Unmoved(), limit).update(drawn(1), {}, drawn(0), NOBODY)
            for name in SHAPES:
                torch.testing.assert_close(together[name][client], alone[name][client])


def test_one_client_that_keeps_what_adam_remembers_is_one_adam():
    federation = noisy_images([24])
    rule = Adam(0.01, weight_decay=0.1, decoupled=True)
    # A batch of all it holds: then rounds see the same batch, whatever its order.
    algorithm = fl.Algorithm(select=Uniformly(1), draw=Epochs(2, 24), solve=rule, reset=False)
    found = train(algorithm, rounds=3, federation=federation)
    module = small_cnn().double()
    optimizer = torch.optim.AdamW(module.parameters(), 0.01, weight_decay=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        logits = module(federation.examples.images)
        nn.functional.cross_entropy(logits, federation.examples.labels).backward()
        optimizer.step()
    for name, p in module.named_parameters():
        torch.testing.assert_close(found.params[name], p.detach(), rtol=1e-8, atol=1e-10)
    (row,) = found.clients.rows.values()
    assert row["solver.taken"]["steps"].item() == 6


ADAM = fl.Algorithm(select=BASE.select, draw=BASE.draw, solve=Adam(0.01))
CLIPPED = fl.Algorithm(select=BASE.select, draw=BASE.draw, solve=ClippedByNorm(Sgd(0.1), 1.0))


@pytest.mark.parametrize(
    "paper", [scaffold(), qfedavg(), fednova(), liadmm(gamma=0.1), celiadmm(gamma=0.1)]
)
def test_who_needs_the_steps_of_sgd_says_so(paper):
    with pytest.raises(ValueError, match=r"local\.optimizer"):
        compose(ADAM, paper)


@pytest.mark.parametrize("paper", [fednova(), liadmm(gamma=0.1)])
def test_who_needs_gradients_that_nobody_clips_says_so(paper):
    with pytest.raises(ValueError, match=r"local\.clip"):
        compose(CLIPPED, paper)
    compose(CLIPPED, scaffold())


def nothing(local):
    """No optimiser at all."""


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ({"optimizer": "adam", "momentum": 0.9}, "adam has beta1 for momentum: leave"),
        ({"optimizer": {"name": "sgd", "nesterov": True}}, "nesterov needs momentum: set"),
        ({"optimizer": {"name": "adamw", "beta2": 1.0}}, "beta2 is 1.0: choose"),
        ({"optimizer": {"name": "adam", "eps": 0.0}}, "eps is 0.0: choose"),
        ({"optimizer": "adm"}, "unknown optimizer 'adm': did you mean 'adam'"),
        ({"optimizer": {"name": "adam", "beta3": 0.1}}, "no option 'beta3'"),
        ({"optimizer": f"{__name__}:nothing"}, "gave NoneType: it must return Solve"),
        ({"clip": 0.0}, "local.clip is 0.0: choose a number above 0"),
        ({"clip_value": -1.0}, "local.clip_value is -1.0: choose"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(local, message):
    with pytest.raises(ValueError, match=message) as caught:
        fl.run(fl.Experiment(dataset=toy(), model="linear", rounds=1, local=local))
    assert "\n" not in str(caught.value)


def test_an_experiment_clips_and_steps_as_it_says():
    local = {"optimizer": "adamw", "clip": 1.0, "clip_value": 0.5, "weight_decay_on": "weights"}
    made = make_algorithm(fl.Experiment(dataset=toy(), model="linear", rounds=1, local=local))
    inner = Adam(0.1, decoupled=True, weight_decay_on="weights")
    assert made.solve == ClippedByValue(ClippedByNorm(inner, 1.0), 0.5)


def test_a_resumed_run_goes_on_with_what_adam_remembers(tmp_path):
    def described(rounds: int) -> fl.Experiment:
        local = {"optimizer": "adam", "lr": 0.01, "reset": False}
        clients = {"count": 4, "per_round": 2}
        return fl.Experiment(toy(), "linear", rounds=rounds, local=local, clients=clients)

    whole = fl.run(described(4))
    fl.run(described(2), tmp_path / "run")
    again = fl.resume(tmp_path / "run", rounds=4, experiment=described(2))
    assert all(torch.equal(again.model[name], p) for name, p in whole.model.items())
