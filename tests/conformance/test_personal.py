"""Algorithms whose clients have models of their own, by their identities."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.algorithms import (
    apfl,
    ditto,
    fedala,
    fedbabu,
    fedper,
    fedproto,
    fedrep,
    fine_tune,
    lg_fedavg,
    local_only,
    moon,
    per_fedavg,
    pfedme,
)
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.traffic import bytes_sent, traffic
from tests.conformance.quadratics import close, follow, local_steps, path, plain, some
from tests.federations import RAGGED, assert_equal, noisy_images, small_cnn, train

BASE = Algorithm(Uniformly(10), Epochs(1, 8), solve=Sgd(0.1))
WHOLE = Algorithm(Uniformly(10), Epochs(1, 1000), solve=Sgd(0.1))  # full batches
MOVING = replace(BASE, solve=Sgd(0.1, momentum=0.5))
HEAD = {"5.weight", "5.bias"}


def models_of(algorithm, **options):
    """The models by which clients are measured."""
    state = train(algorithm, federation=noisy_images(RAGGED), **options)
    model = state.params | state.buffers
    return {k: algorithm.model_of(model, row) for k, row in sorted(state.clients.rows.items())}


def same_models(one, other, tolerance=1e-12):
    assert one.keys() == other.keys() and one
    for client, model in one.items():
        for name, tensor in model.items():
            close(tensor.double(), other[client][name].double(), tolerance)


def body_of(module):
    return nn.Sequential(*list(module.children())[:-1])


def head_of(module):
    return list(module.children())[-1]


def by_hand(model, federation, client, part, steps, lr=0.1):
    """Full-batch steps of the tensors in `part`, by PyTorch."""
    module = small_cnn().double()
    module.load_state_dict(model)
    members = federation.everyone(0).members(client)
    images, labels = federation.examples.images[members], federation.examples.labels[members]
    of_part = {"head": lambda n: n in HEAD, "body": lambda n: n not in HEAD, "all": lambda _: True}
    moving = [p for name, p in module.named_parameters() if of_part[part](name)]
    for _ in range(steps):
        loss = F.cross_entropy(module(images), labels)
        for p, g in zip(moving, torch.autograd.grad(loss, moving), strict=True):
            p.data -= lr * g
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("base", [BASE, MOVING, replace(MOVING, reset=False)])
@pytest.mark.parametrize("alone", [ditto(0.0), apfl(alpha=1.0, adaptive=False)])
def test_a_second_model_that_is_not_held_is_local_training(alone, base, norm):
    module = small_cnn(norm)
    found = models_of(compose(base, alone), module=module, rounds=3)
    same_models(found, models_of(compose(base, local_only()), module=module, rounds=3))


@pytest.mark.parametrize("second", [ditto(0.7), apfl(), fine_tune()])
def test_the_model_that_is_sent_beside_a_second_one_is_that_of_fedavg(second):
    assert_equal(train(compose(MOVING, second)).params, train(MOVING).params)


def test_ditto_with_lambda_one_over_lr_is_one_step_from_the_servers_model():
    """v - lr (grad(v) + (v - w) / lr) = w - lr grad(v), here with gradients a (v - c)."""
    problem = some(4)
    *_, (before, _), (state, _) = follow(compose(plain(4, 0.1), ditto(10.0)), problem, 3)
    for client, row in state.clients.rows.items():
        v = before.clients.rows[client]["own"]["w"]
        slope = problem.a[client] * (v - problem.c[client])
        close(row["own"]["w"], before.params["w"] - 0.1 * slope)


def test_a_second_model_that_is_held_ever_harder_becomes_the_one_that_fedavg_sends():
    """With lambda = 1 / lr as lambda grows: what is left is a step of length lr."""
    problem, apart = some(4), []
    for lam in (1e2, 1e4, 1e6):
        *_, (before, _), (state, _) = follow(
            compose(plain(4, 1 / lam, epochs=3), ditto(lam)), problem, 3
        )
        server = before.params["w"]
        rows = state.clients.rows.values()
        apart.append(max(float((row["own"]["w"] - server).norm()) for row in rows))
    assert apart[1] < apart[0] / 50 and apart[2] < apart[1] / 50


def test_ditto_is_the_papers_algorithm():
    problem, lam, lr = some(4), 0.8, 0.1
    v = problem.start.expand(4, -1)
    w = problem.start
    for state, _ in follow(compose(plain(4, lr, epochs=3), ditto(lam)), problem, 5):
        for _ in range(3):
            v = v - lr * (problem.a * (v - problem.c) + lam * (v - w))
        w = state.params["w"]
        for client, row in state.clients.rows.items():
            close(row["own"]["w"], v[client])


def test_apfl_with_alpha_zero_measures_clients_by_fedavgs_model():
    algorithm = compose(MOVING, apfl(alpha=0.0, adaptive=False))
    fedavg = train(MOVING, federation=noisy_images(RAGGED)).params
    for model in models_of(algorithm).values():
        same_models({0: model}, {0: fedavg})


def test_apfl_is_the_papers_algorithm():
    problem, lr = some(4), 0.02
    v, alpha = problem.start.expand(4, -1), torch.full((4, 1), 0.5).double()
    server = problem.start
    algorithm = compose(plain(4, lr, epochs=3), apfl())
    for state, _ in follow(algorithm, problem, 4):
        w = server.expand(4, -1)
        for step in range(3):
            slope = problem.a * (alpha * v + (1 - alpha) * w - problem.c)
            if step == 0:
                alpha = (alpha - lr * ((v - w) * slope).sum(1, keepdim=True)).clamp(0, 1)
            w, v = w - lr * problem.a * (w - problem.c), v - lr * alpha * slope
        server = state.params["w"]
        for client, row in state.clients.rows.items():
            close(row["own"]["w"], v[client])
            close(row["alpha"]["alpha"], alpha[client, 0])
            mixed = alpha[client] * v[client] + (1 - alpha[client]) * server
            close(algorithm.model_of(state.params, row)["w"], mixed)
    assert len(set(alpha.flatten().tolist())) > 1, "every client has learned its own"


def test_fedrep_trains_the_head_and_then_the_body():
    federation = noisy_images([20])
    algorithm = compose(replace(WHOLE, select=Uniformly(1)), fedrep(head_epochs=3))
    state = train(algorithm, federation=federation, rounds=1)
    start = Network(small_cnn(), dtype=torch.float64).params
    expected = by_hand(by_hand(start, federation, 0, "head", 3), federation, 0, "body", 1)
    same_models({0: algorithm.model_of(state.params, state.clients.rows[0])}, {0: expected})


def test_fedrep_leaves_the_momentum_of_what_does_not_move():
    """As in PyTorch, where a parameter without a gradient keeps its momentum."""
    base = replace(MOVING, select=Uniformly(1))
    found = train(compose(base, fedrep(head_epochs=1)), federation=noisy_images([20]), rounds=2)
    start = Network(small_cnn(), dtype=torch.float64).params
    assert all(not torch.equal(found.params[n], p) for n, p in start.items() if n not in HEAD)


def test_fedbabu_trains_the_body_under_the_first_head():
    federation = noisy_images([20])
    algorithm = compose(replace(WHOLE, select=Uniformly(1)), fedbabu())
    state = train(algorithm, federation=federation, rounds=2)
    start = Network(small_cnn(), dtype=torch.float64).params
    expected = by_hand(start, federation, 0, "body", 2)
    same_models({0: algorithm.model_of(state.params, state.clients.rows[0])}, {0: expected})
    for name in HEAD:
        assert torch.equal(state.params[name], start[name])


def test_lg_fedavg_averages_what_fedper_keeps():
    layout = Network(small_cnn()).layout
    kept = [
        set(ClientProgram(compose(BASE, one), layout).own_names) for one in (lg_fedavg(), fedper())
    ]
    assert kept[0] | kept[1] == layout.entries.keys() and not kept[0] & kept[1]


def test_local_only_sends_nothing_and_with_one_client_is_fedavg():
    network = Network(small_cnn())
    program = ClientProgram(compose(BASE, local_only()), network.layout)
    assert bytes_sent(program, network.params | network.buffers, {}) == 0
    base, alone = replace(BASE, select=Uniformly(1)), noisy_images([20])
    state = train(compose(base, local_only()), federation=alone)
    assert_equal(state.params, Network(small_cnn(), dtype=torch.float64).params)
    same_models({0: state.clients.rows[0]["own"]}, {0: train(base, federation=alone).params}, 1e-10)


def test_pfedme_is_the_papers_algorithm():
    problem, lr, own_lr, lam = some(4), 0.05, 0.02, 5.0
    server = problem.start
    algorithm = compose(plain(4, lr, epochs=3), pfedme(lambda_=lam, k=4, lr=own_lr))
    for state, _ in follow(algorithm, problem, 4):
        w = theta = server.expand(4, -1)
        for _ in range(3):
            for _ in range(4):
                theta = theta - own_lr * (problem.a * (theta - problem.c) + lam * (theta - w))
            w = w - lr * lam * (w - theta)
        server = w.mean(0)
        close(state.params["w"], server)
        for client, row in state.clients.rows.items():
            close(row["own"]["w"], theta[client])


def test_pfedme_with_one_inner_step_of_its_envelope_is_fedavg_with_equal_weights():
    """theta = w - lr grad, and w - lr_w lambda (w - theta) = theta where lr_w lambda = 1."""
    problem = some(4, equal=True)
    found = path(compose(plain(4, 0.1), pfedme(lambda_=10.0, k=1)), problem, 5)
    close(found, path(plain(4, 0.1), problem, 5))


@pytest.mark.parametrize(("alpha", "delta", "turn"), [(0.0, 0.0, 2), (0.0, 0.01, 3)])
def test_per_fedavg_without_an_inner_step_is_fedavg_with_a_step_a_turn(alpha, delta, turn):
    problem = some(4)
    found = path(compose(plain(4, 0.1, epochs=2 * turn), per_fedavg(alpha, delta)), problem, 3)
    close(found, path(plain(4, 0.1, epochs=2), problem, 3), 1e-10)


@pytest.mark.parametrize(("delta", "turn"), [(0.0, 2), (0.01, 3)])
@pytest.mark.parametrize("left_over", [0, 1])
def test_per_fedavg_is_the_papers_algorithm(delta, turn, left_over):
    """On quadratics, whose Hessian a is what finite differences find."""
    problem, lr, alpha = some(4), 0.1, 0.3
    bend = problem.a if delta else 0
    epochs = 2 * turn + left_over
    for state, _ in follow(compose(plain(4, lr, epochs), per_fedavg(alpha, delta)), problem, 1):
        w = problem.start.expand(4, -1)
        for _ in range(2):
            g = problem.a * (local_steps(problem, w, alpha, 1) - problem.c)
            w = w - lr * (g - alpha * bend * g)
        close(state.params["w"], (problem.shares * w).sum(0), 1e-10)


class Shuffled(nn.Module):
    """A model that no engine can read layer by layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.flatten(1))).roll(1, 1))


@pytest.mark.parametrize("make", [small_cnn, Shuffled])
def test_features_are_the_inputs_of_the_last_linear_layer_in_every_form(make):
    network, images = Network(make().double(), dtype=torch.float64), torch.randn(3, 5, 1, 8, 8)
    models = {n: torch.stack([p, 2 * p, p - 1]) for n, p in network.params.items()}
    keys, mask = torch.zeros(3, dtype=torch.int64), torch.ones(3, 5).double()
    given = images.double(), keys, mask
    logits, seen, _ = network.stacked.features(models, {}, *given)
    assert torch.equal(logits, network.stacked(models, {}, *given)[0])
    for client in range(3):
        mine = {n: t[client : client + 1] for n, t in models.items()}
        rows = (t[client : client + 1] for t in given)
        own_logits, own, _ = network.single.features(mine, {}, *rows)
        close(own, seen[client : client + 1], 1e-10)
        head = [t[client] for t in models.values()][-2:]
        close(F.linear(own[0], *head), own_logits[0], 1e-10)


def test_a_model_without_a_linear_layer_has_no_features():
    module = nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten())
    with pytest.raises(ValueError, match="features"):
        train(compose(BASE, moon()), module=module, rounds=1)


def test_moon_without_mu_is_fedavg():
    assert_equal(train(compose(MOVING, moon(mu=0.0))).params, train(MOVING).params)


def test_moon_is_the_papers_loss():
    """The second step of two clients' second round, by PyTorch."""
    federation, tau, mu = noisy_images([12, 9]), 0.5, 3.0
    base = replace(WHOLE, select=Uniformly(2))
    algorithm = compose(base, moon(mu, tau))
    before = train(algorithm, federation=federation, rounds=1)
    after = train(algorithm, federation=federation, rounds=2)

    def features(model, images):
        module = small_cnn().double()
        module.load_state_dict(model)
        return body_of(module)(images)

    for client in range(2):
        members = federation.everyone(0).members(client)
        images, labels = federation.examples.images[members], federation.examples.labels[members]
        module = small_cnn().double()
        module.load_state_dict(before.params)
        z = body_of(module)(images)
        previous = before.clients.rows[client]["previous"]
        to_server, to_own = (
            torch.exp(F.cosine_similarity(z, features(m, images).detach()) / tau)
            for m in (before.params, previous)
        )
        contrast = -torch.log(to_server / (to_server + to_own)).mean()
        loss = F.cross_entropy(head_of(module)(z), labels) + mu * contrast
        grads = torch.autograd.grad(loss, [*module.parameters()])
        for (name, p), g in zip(module.named_parameters(), grads, strict=True):
            close(after.clients.rows[client]["previous"][name], p.detach() - 0.1 * g, 1e-10)


def test_fedala_that_does_not_learn_its_mixture_is_fedavg():
    """Then it takes all of the server's; the passes that learn the mixture change nothing."""
    found = train(compose(WHOLE, fedala(eta=0.0)), federation=noisy_images(RAGGED))
    for name, p in train(WHOLE, federation=noisy_images(RAGGED)).params.items():
        close(found.params[name], p)


def test_fedala_is_the_papers_algorithm():
    federation, eta = noisy_images([12, 9]), 5.0
    algorithm = compose(replace(WHOLE, select=Uniformly(2)), fedala(eta=eta))
    before = train(algorithm, federation=federation, rounds=1)
    after = train(algorithm, federation=federation, rounds=2)
    for client in range(2):
        own = before.clients.rows[client]["own"]
        away = {n: before.params[n] - own[n] for n in HEAD}
        start = by_hand(before.params, federation, client, "head", 1, lr=eta)
        weights, model = {}, dict(before.params)
        for n in HEAD:
            step = before.params[n] - start[n]  # eta times the gradient
            weights[n] = (1 - step * away[n]).clamp(0, 1)
            close(after.clients.rows[client]["weights"][n], weights[n], 1e-10)
            model[n] = own[n] + away[n] * weights[n]
        expected = by_hand(model, federation, client, "all", 1)
        same_models({0: after.clients.rows[client]["own"]}, {0: expected}, 1e-10)
        assert float(min(w.min() for w in weights.values())) < 1


def test_fedproto_without_lambda_is_local_training():
    same_models(
        models_of(compose(MOVING, fedproto(lambda_=0.0))), models_of(compose(MOVING, local_only()))
    )


def test_prototypes_are_the_mean_features_of_each_class():
    federation = noisy_images([12, 9])
    state = train(
        compose(replace(WHOLE, select=Uniformly(2)), fedproto()), federation=federation, rounds=1
    )
    examples, module = federation.examples, small_cnn().double()
    features = body_of(module)(examples.images).detach()
    told = state.told["prototypes"]
    for label in range(4):
        chosen = examples.labels == label
        assert float(told["counts"][label]) == float(chosen.sum())
        mean = told["sums"][label] / told["counts"][label]
        close(mean, features[chosen].mean(0), 1e-10)


def test_fedproto_pulls_features_towards_prototypes():
    federation = noisy_images([12])
    base = replace(WHOLE, select=Uniformly(1))
    algorithm = compose(base, fedproto(lambda_=2.0))
    before, after = (train(algorithm, federation=federation, rounds=r) for r in (1, 2))
    images, labels = federation.examples.images, federation.examples.labels
    told = before.told["prototypes"]
    means = told["sums"] / told["counts"].clamp(min=1)[:, None]
    module = small_cnn().double()
    module.load_state_dict(before.clients.rows[0]["own"])
    z = body_of(module)(images)
    away = F.mse_loss(z, means[labels])
    loss = F.cross_entropy(head_of(module)(z), labels) + 2.0 * away
    grads = torch.autograd.grad(loss, [*module.parameters()])
    for (name, p), g in zip(module.named_parameters(), grads, strict=True):
        close(after.clients.rows[0]["own"][name], p.detach() - 0.1 * g, 1e-10)


def test_fedproto_sends_prototypes_alone():
    network = Network(small_cnn())
    program = ClientProgram(compose(BASE, fedproto()), network.layout)
    told = program.algorithm.tell[0].init(network.params, noisy_images([4]))
    assert traffic(program, network.params, network.buffers, told)[0] == 4 * (4 * 384 + 4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ditto(-1.0),
        lambda: moon(mu=-1.0),
        lambda: moon(tau=0.0),
        lambda: fedala(epochs=0),
        lambda: fedproto(lambda_=-1.0),
        lambda: ditto(20.0),
        lambda: apfl(alpha=1.5),
        lambda: fedrep(head_epochs=0),
        lambda: fine_tune(epochs=0),
        lambda: pfedme(lambda_=50.0),
        lambda: per_fedavg(alpha=-1.0),
    ],
)
def test_options_without_a_meaning_are_refused(wrong):
    name = wrong().name
    with pytest.raises(ValueError, match=name):
        compose(BASE, wrong())
