"""What clients keep of a model, and FedCM, by their identities."""

import pytest
import torch

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Epochs, OwnHead, Sgd, Uniformly
from fedlens.algorithms import clip, fedbn, fedcm, fedper, fedprox, scaffold
from fedlens.engines.stacked import predict_side_by_side
from fedlens.network.layout import Layout
from fedlens.network.network import Network
from tests.conformance.quadratics import close, path, plain, some
from tests.federations import RAGGED, assert_equal, noisy_images, small_cnn, train

BASE = Algorithm(Uniformly(10), Epochs(1, 8), solve=Sgd(0.1))
HEAD = {"5.weight", "5.bias"}


def test_a_head_is_each_clients_own_and_never_leaves():
    first = train(compose(BASE, fedper()), rounds=1, federation=noisy_images(RAGGED))
    state = train(compose(BASE, fedper()), rounds=3, federation=noisy_images(RAGGED))
    start = Network(small_cnn(), dtype=torch.float64).params
    for name, p in state.params.items():
        assert torch.equal(p, start[name]) == (name in HEAD)
    own = [row["own"] for row in state.clients.rows.values()]
    assert all(set(head) == HEAD for head in own)
    assert not torch.equal(own[0]["5.weight"], own[5]["5.weight"])
    before = first.clients.rows[4]["own"]["5.weight"]
    # It goes on where it was: the second round does not begin at the server's head again.
    far = state.clients.rows[4]["own"]["5.weight"] - start["5.weight"]
    assert float(far.norm()) > float((before - start["5.weight"]).norm())


def test_with_one_client_fedper_is_local_training():
    base = Algorithm(Uniformly(1), Epochs(1, 8), solve=Sgd(0.1))
    alone = noisy_images([24])
    state = train(compose(base, fedper()), rounds=3, federation=alone)
    plain_state = train(base, rounds=3, federation=alone)
    found = state.params | state.clients.rows[0]["own"]
    for name, p in plain_state.params.items():
        close(found[name], p, 1e-12)


def test_a_clipped_update_has_no_head_in_it():
    """So a head that moves far does not shorten what is sent of the layers below."""
    loose = train(compose(BASE, fedper(), clip(norm=1e6)), rounds=1)
    assert_equal(loose.params, train(compose(BASE, fedper()), rounds=1).params)


@pytest.mark.parametrize("more", [fedprox(mu=0.1), scaffold(), fedbn()])
def test_what_reads_the_whole_model_is_refused_beside_a_head_of_ones_own(more):
    with pytest.raises(ValueError, match="fedper"):
        compose(BASE, *((more, fedper()) if more.name == "fedbn" else (fedper(), more)))


@pytest.mark.parametrize(("layer", "names"), [(None, HEAD), ("0", {"0.weight", "0.bias"})])
def test_the_head_is_the_last_linear_layer_or_the_one_that_is_named(layer, names):
    assert set(OwnHead(layer).names(Layout.of(small_cnn()))) == names


@pytest.mark.parametrize("layer", ["fc", ""])
def test_a_head_that_is_not_in_the_model_is_refused(layer):
    with pytest.raises(ValueError, match="head"):
        OwnHead(layer).names(Layout.of(small_cnn()))


def test_models_of_their_own_are_evaluated_side_by_side_as_one_by_one():
    network = Network(small_cnn("batch"), dtype=torch.float64)
    examples = noisy_images([40]).examples
    models = []
    for number in range(5):
        model = network.params | network.buffers
        models.append({name: t + number * torch.ones_like(t) for name, t in model.items()})
    rows = [torch.arange(size) + 1 for size in (7, 0, 20, 3, 20)]
    found = predict_side_by_side(network, models.__getitem__, examples, rows, at_once=40)
    for number, (model, which) in enumerate(zip(models, rows, strict=True)):
        expected = network.predict(model, {}, examples.read(which))
        close(found[number], expected, 1e-9) if len(which) else None
        assert len(found[number]) == len(which)


def test_fedcm_with_alpha_one_is_fedavg():
    problem = some(4)
    base = plain(4, 0.1, epochs=3)
    close(path(compose(base, fedcm(alpha=1.0)), problem, 5), path(base, problem, 5), 1e-12)


def fedcm_in_numpy(problem, lr, alpha, steps, rounds):
    """Algorithm 1, with all clients in every round."""
    x, a, c = problem.start, problem.a, problem.c
    ahead, rows = torch.zeros_like(x), []
    for _ in range(rounds):
        y = x.expand(len(problem), -1).clone()
        for _ in range(steps):
            y = y - lr * (alpha * a * (y - c) + (1 - alpha) * ahead)
        ahead = (x - y).mean(0) / (lr * steps)
        x = x - lr * steps * ahead
        rows.append(x)
    return torch.stack(rows)


def test_fedcm_is_the_papers_algorithm():
    problem = some(4, equal=True)
    found = path(compose(plain(4, 0.1, epochs=5), fedcm(alpha=0.3)), problem, 8)
    close(found, fedcm_in_numpy(problem, 0.1, 0.3, 5, 8), 1e-11)


@pytest.mark.parametrize("alpha", [0.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        compose(BASE, fedcm(alpha=alpha))
