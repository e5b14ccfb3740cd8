"""FedAvg+lastFC and FedNS, by their own mathematics: node by node, by hand and in NumPy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedlens.algorithm import Algorithm, Amendment, compose
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly, WeightedSum
from fedlens.algorithms import fedns, lastfc
from fedlens.algorithms.fedns import NodeByNode
from fedlens.core import Cohort
from fedlens.core.federation import Fixed, Holdings
from fedlens.network.layout import Layout
from tests.conformance.quadratics import DOUBLE, close, rounds_of
from tests.federations import RAGGED, assert_equal, noisy_images, small_cnn, train

BASE = Algorithm(select=Uniformly(5), draw=Epochs(2, batch_size=8), solve=Sgd(0.1, momentum=0.5))
ONE = replace(BASE, select=Uniformly(1))


def net():
    torch.default_generator.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 3)
    )


LAYOUT = Layout.of(net())
SHAPES = {
    "0.weight": (4, 1, 3, 3),
    "0.bias": (4,),
    "1.weight": (4,),
    "1.bias": (4,),
    "1.running_mean": (4,),
    "1.running_var": (4,),
    "3.weight": (5, 16),
    "3.bias": (5,),
    "4.weight": (3, 5),
    "4.bias": (3,),
}


def some_updates(clients, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {n: torch.randn(clients, *s, generator=rng, dtype=DOUBLE) for n, s in SHAPES.items()}


def a_cohort(counts):
    """Clients who hold these numbers of each class. [C][L]"""
    counts = torch.tensor(counts)
    sizes, totals = counts.sum(1), counts.sum(0)
    shares = sizes / sizes.sum().double()
    by_label = torch.where(totals > 0, counts / totals.clamp(min=1).double(), shares[:, None])
    number = len(sizes)
    return Cohort(torch.arange(number), sizes, sizes, shares, by_label, number, int(sizes.sum()))


COUNTS = [[3, 1, 2], [0, 4, 9], [5, 5, 1], [2, 0, 1], [1, 1, 1], [9, 2, 0], [1, 6, 4]]


def combined(updates, cohort, **options):
    copies = {name: u.clone() for name, u in updates.items()}
    return NodeByNode(**options)(copies, cohort.size_shares, cohort, LAYOUT)


def by_hand(updates, counts, norm="tied"):
    """Equations 5 to 8, node by node, as facts and loops."""
    counts = np.array(counts, dtype=float)
    plain = counts.sum(1) / counts.sum()
    u = {name: t.numpy() for name, t in updates.items()}
    shares = {}
    for layer in ("0", "3"):
        weight = u[f"{layer}.weight"]
        nodes = []
        for node in range(weight.shape[1]):
            v = np.array([np.var(own[node].ravel()) for own in weight])
            inside = np.abs(v - v.mean()) <= 2 * v.std()
            v = np.where(inside, v, 0)
            nodes.append(v / v.sum())
        shares[layer] = np.array(nodes).T  # [C, nodes]
    tied = "0" if norm == "tied" else None
    owner = {"0": "0", "1": tied, "3": "3"}
    out = {}
    for name, t in u.items():
        layer = name.split(".")[0]
        if layer == "4":
            share = counts / counts.sum(0)
        elif (node_of := owner[layer]) is None:
            share = np.repeat(plain[:, None], t.shape[1], 1)
        else:
            share = shares[node_of]
        out[name] = torch.tensor(np.einsum("kn,kn...->n...", share, t))
    return out


@pytest.mark.parametrize("norm", ["tied", "fedavg"])
def test_fedns_is_the_papers_equations_written_as_loops(norm):
    """With one client whose convolution is far from the others', so that the filter acts."""
    updates = some_updates(7)
    updates["0.weight"][3] *= 30
    found = combined(updates, a_cohort(COUNTS), norm=norm)
    for name, expected in by_hand(updates, COUNTS, norm).items():
        close(found[name], expected)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("made", [fedns(), lastfc()], ids=["fedns", "lastfc"])
def test_one_client_a_round_is_fedavg_byte_for_byte(made, dtype):
    for norm in ("group", "batch"):
        one, two = (
            train(a, rounds=3, module=small_cnn(norm), dtype=dtype)
            for a in (ONE, compose(ONE, made))
        )
        assert_equal(found=two.params, expected=one.params)
        assert_equal(found=two.buffers, expected=one.buffers)


def test_equal_class_counts_make_lastfc_fedavg():
    federation = noisy_images([400])
    by_class = [(federation.examples.labels == label).nonzero()[:, 0] for label in range(4)]
    members = [torch.cat([of[k * 6 : (k + 1) * 6] for of in by_class]) for k in range(7)]
    federation = replace(federation, split=Fixed(Holdings.of(members)))
    one, two = (train(a, federation=federation) for a in (BASE, compose(BASE, lastfc())))
    for name, p in one.params.items():
        close(two.params[name], p)


def test_lastfc_weighs_each_class_by_its_examples_and_the_rest_as_fedavg():
    federation = noisy_images(RAGGED)
    everyone = replace(BASE, select=Uniformly(10), draw=Epochs(1, 1000), solve=Sgd(0.3))
    ((state, _),) = rounds_of(compose(everyone, lastfc()), federation, small_cnn(), 1)
    start = {n: p.detach().double() for n, p in small_cnn().named_parameters()}
    local = []
    for client in range(10):
        own = Fixed(Holdings.of([federation.everyone(0).members(client)]))
        alone = replace(everyone, select=Uniformly(1))
        local.append(train(alone, rounds=1, federation=replace(federation, split=own)).params)
    counts = federation.label_counts(federation.everyone(0)).double()
    for name in start:
        models = torch.stack([params[name] for params in local])
        if name.startswith("5."):
            share = counts / counts.sum(0)
        else:
            share = (counts.sum(1) / counts.sum())[:, None].expand(-1, models.shape[1])
        share = share.reshape(*share.shape, *[1] * (models.ndim - 2))
        close(state.params[name], (share * models).sum(0))


def test_clients_that_all_send_the_same_leave_it_as_it_is():
    one = some_updates(1)
    same = {name: u.expand(7, *u.shape[1:]) for name, u in one.items()}
    found = combined(same, a_cohort(COUNTS))
    for name, u in one.items():
        close(found[name], u[0])


@settings(max_examples=40, deadline=None)
@given(
    clients=st.integers(1, 12),
    seed=st.integers(0, 10_000),
    spread=st.floats(0.0, 3.0),
)
def test_every_element_lies_between_the_clients_own(clients, seed, spread):
    updates = some_updates(clients, seed)
    rng = torch.Generator().manual_seed(seed)
    scale = (spread * torch.randn(clients, generator=rng, dtype=DOUBLE)).exp()
    updates = {n: u * scale.view(-1, *[1] * (u.ndim - 1)) for n, u in updates.items()}
    counts = torch.randint(0, 5, (clients, 3), generator=rng) + 1
    found = combined(updates, a_cohort(counts.tolist()))
    for name, u in updates.items():
        assert (found[name] <= u.amax(0) + 1e-9).all() and (found[name] >= u.amin(0) - 1e-9).all()


def node_shares(v, sizes=None, **options):
    """The shares of clients whose update of a node of fan-in 2 has these variances."""
    v = torch.tensor(v, dtype=DOUBLE)
    rows = torch.stack([v.sqrt(), -v.sqrt()], 1)[:, None]  # [C, 1, 2]: the variance is v
    layout = Layout.of(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 3)))
    cohort = a_cohort([[s, 0, 0] for s in sizes or [1] * len(v)])
    updates = {"0.weight": rows}
    return NodeByNode(**options).node_weights("0.weight", updates, cohort, layout)[:, 0]


def test_an_update_scaled_by_s_weighs_s_squared():
    """1 : 1 : 9, of three clients, of which none is ever dropped."""
    updates = some_updates(3)
    for name in updates:
        updates[name][1] = updates[name][0]
        updates[name][2] = 3 * updates[name][0]
    weights = NodeByNode().node_weights("0.weight", updates, a_cohort(COUNTS[:3]), LAYOUT)
    expected = torch.tensor([1 / 11, 1 / 11, 9 / 11], dtype=DOUBLE)
    close(weights, expected[:, None].expand(3, 4))


def test_one_huge_client_of_ten_lies_at_three_sigma_and_is_dropped():
    found = node_shares([1.0] * 9 + [1e6])
    close(found, torch.tensor([1 / 9] * 9 + [0.0], dtype=DOUBLE))


def test_two_equal_huge_clients_of_ten_lie_at_two_sigma_stay_and_dominate():
    found = node_shares([1.0] * 8 + [1e6, 1e6])
    assert float(found[8:].sum()) > 0.999 and float(found[8]) == float(found[9])


@pytest.mark.parametrize("clients", [6, 9, 10, 17, 40])
def test_j_outliers_of_k_stay_from_a_z_of_two_on(clients):
    """z = sqrt((K - j) / j), so they are dropped just where K > 5 j."""
    for outliers in range(1, clients // 2):
        found = node_shares([1.0] * (clients - outliers) + [50.0] * outliers)
        assert (float(found[-1]) == 0) is (clients > 5 * outliers), outliers


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=5))
def test_five_clients_or_fewer_are_never_dropped(v):
    found = node_shares(v)
    close(found, torch.tensor(v, dtype=DOUBLE) / sum(v), 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-3, 1e9), min_size=6, max_size=30))
def test_fewer_than_a_quarter_are_dropped(v):
    dropped = int((node_shares(v) == 0).sum())
    assert dropped <= len(v) / 4


def test_equal_variances_give_the_plain_mean_whatever_clients_hold():
    found = node_shares([0.3] * 8, sizes=[1, 2, 3, 4, 50, 60, 70, 80])
    close(found, torch.full((8,), 1 / 8, dtype=DOUBLE))


def test_float_noise_in_equal_variances_drops_nobody():
    noise = 1 + 1e-15 * np.arange(12)
    noise[11] += 1e-13
    found = node_shares((0.1 * noise).tolist())
    close(found, torch.full((12,), 1 / 12, dtype=DOUBLE))


def test_a_pure_shift_weighs_nothing():
    """Variance, not norm: adding one number to a whole kernel counts as no movement."""
    updates = some_updates(4)
    updates["0.weight"][2, 1] = 7.0
    weights = NodeByNode().node_weights("0.weight", updates, a_cohort(COUNTS[:4]), LAYOUT)
    assert float(weights[2, 1]) < 1e-20
    assert (weights[[0, 1, 3], 1] > 0.01).all() and (weights[2, [0, 2, 3]] > 0.01).all()


def test_a_node_without_variance_goes_by_examples():
    expected = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=DOUBLE)
    close(node_shares([0.0] * 4, sizes=[1, 2, 3, 4]), expected)
    still = {name: torch.zeros_like(u) for name, u in some_updates(4).items()}
    still["0.bias"] = torch.arange(4, dtype=DOUBLE)[:, None].expand(4, 4).clone()
    cohort = a_cohort(COUNTS[:4])
    found = combined(still, cohort)["0.bias"]
    close(found, (cohort.size_shares * torch.arange(4)).sum().expand(4))


def test_classes_that_nobody_holds_go_by_examples():
    counts = [[3, 0, 1], [1, 0, 7]]
    updates = some_updates(2)
    for made in (combined(updates, a_cohort(counts)), last_only(updates, a_cohort(counts))):
        row = updates["4.weight"]
        close(made["4.weight"][1], (4 * row[0, 1] + 8 * row[1, 1]) / 12)
        close(made["4.weight"][0], (3 * row[0, 0] + 1 * row[1, 0]) / 4)
        close(made["4.bias"][2], (updates["4.bias"][0, 2] + 7 * updates["4.bias"][1, 2]) / 8)


def last_only(updates, cohort):
    copies = {name: u.clone() for name, u in updates.items()}
    return compose(BASE, lastfc()).combine(copies, cohort.size_shares, cohort, LAYOUT)


def test_lastfc_leaves_all_other_layers_to_fedavg():
    updates, cohort = some_updates(4), a_cohort(COUNTS[:4])
    copies = {name: u.clone() for name, u in updates.items()}
    mean = WeightedSum()(copies, cohort.size_shares, cohort, LAYOUT)
    found = last_only(updates, cohort)
    for name in SHAPES:
        assert torch.equal(found[name], mean[name]) is (not name.startswith("4."))


def test_bias_and_normalisation_go_with_their_node():
    """A client whose kernel 2 stands out loses that kernel's bias, gamma, beta, mean, variance."""
    updates = some_updates(10)
    updates["0.weight"][9, 2] *= 1000
    tied = ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var")
    other = {name: u.clone() for name, u in updates.items()}
    for name in tied:
        other[name][9, 2] += 5.0
    cohort = a_cohort([[1, 1, 1]] * 10)
    one, two = combined(updates, cohort), combined(other, cohort)
    for name in tied:
        assert torch.equal(one[name], two[name]), name
    by_examples = combined(other, cohort, norm="fedavg")["1.weight"][2]
    close(by_examples, other["1.weight"][:, 2].mean())


def test_the_nodes_of_a_transposed_convolution_lie_on_its_second_axis():
    rng = torch.Generator().manual_seed(0)
    updates = torch.randn(7, 2, 3, 2, 2, generator=rng, dtype=DOUBLE)
    found, plain = (
        NodeByNode().node_weights("0.weight", {"0.weight": u}, a_cohort(COUNTS), Layout.of(net))
        for net, u in (
            (nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Linear(1, 3)), updates),
            (nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(1, 3)), updates.transpose(1, 2)),
        )
    )
    assert found.shape == (7, 3)
    close(found, plain)


def test_a_bias_may_count_in_the_variance():
    v = some_updates(3)
    v["0.weight"] = torch.zeros_like(v["0.weight"])
    cohort = a_cohort(COUNTS[:3])
    found = NodeByNode(bias="included").node_weights("0.weight", v, cohort, LAYOUT)
    square = v["0.bias"].square()  # nine zeros and b: the variance is proportional to b^2
    close(found, square / square.sum(0))


def test_a_head_may_have_more_outputs_than_there_are_classes():
    """A 1000-way head of a published net: the outputs of no class go by examples."""
    torch.default_generator.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 1000))
    for made in (lastfc(), fedns()):
        state = train(compose(BASE, made), rounds=1, module=module)
        assert state.params["3.weight"].shape == (1000, 6)
        assert torch.isfinite(state.params["3.weight"]).all()
    fed = train(BASE, rounds=1, module=module)
    last = train(compose(BASE, lastfc()), rounds=1, module=module)
    close(last.params["3.weight"][4:], fed.params["3.weight"][4:])
    assert (last.params["3.weight"][:4] - fed.params["3.weight"][:4]).norm() > 1e-6


def test_the_last_layer_may_be_named_and_must_exist():
    def check(made: Amendment, layout: Layout) -> None:
        combine: Any = compose(BASE, made).combine
        combine.check(layout)

    with pytest.raises(ValueError, match="the model has"):
        check(fedns(layer="head"), LAYOUT)
    with pytest.raises(ValueError, match="name one with layer"):
        check(lastfc(), Layout.of(nn.Conv2d(1, 3, 3)))
    check(lastfc(layer="3"), LAYOUT)
