"""Differential privacy of clients: what is clipped, what is added, its cost, what is refused."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import fedlens as fl
from fedlens.algorithm import compose
from fedlens.algorithm.pieces import Constant, Cyclic, Equally, Poisson, Uniformly, difference
from fedlens.algorithm.private import BELOW, ClipAndNoise, with_privacy
from fedlens.algorithm.slots import Select
from fedlens.algorithms import ALGORITHMS
from fedlens.algorithms.admm import fedadmm
from fedlens.algorithms.lambda_sum import lambda_sum
from fedlens.algorithms.own_layers import fedper
from fedlens.algorithms.quantize import quantize
from fedlens.core import Cohort, Local, Tree, Upload, keys, per_row
from fedlens.core.federation import Federation
from fedlens.engines import Sequential
from fedlens.network.layout import Layout
from fedlens.network.network import Network
from fedlens.privacy.accountant import epsilon
from fedlens.privacy.factorisation import Banded
from fedlens.privacy.factorisation import Tree as NoiseTree
from fedlens.privacy.mechanisms import Adaptive, BandedNoise, TreeNoise, tree
from fedlens.privacy.protection import Protection
from fedlens.rounds import State, begin, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.runs.folder import describe, restore
from fedlens.setup import build
from tests.federations import CPU, FEW, assert_equal, noisy_images, small_cnn, train
from tests.papers_under_test import BANDED, BASE, PLAIN, PROTECTION
from tests.privacy.trees import nodes_of, weights_of

FIXED = replace(PROTECTION, clip=0.5, sampling="fixed")
LAYOUT = Layout.of(torch.nn.Linear(2, 1, bias=False))
NONE = torch.zeros(0, dtype=torch.int64)
NOBODY = Cohort(NONE, NONE, NONE, NONE, None, num_clients=10, num_examples=0)
DOUBLE = torch.float64


def norms(update: Tree) -> Tensor:  # [C]
    return torch.stack([u.flatten(1).square().sum(1) for u in update.values()]).sum(0).sqrt()


def step(protection: Protection, share: float = 0.2) -> ClipAndNoise:
    return ClipAndNoise(protection, share)


@pytest.mark.parametrize("sampling", ["fixed", "all"])
def test_without_noise_and_with_a_clip_that_nobody_reaches_it_is_fedavg_with_equal_shares(sampling):
    cohort = 10 if sampling == "all" else 5
    plain = replace(BASE, select=Uniformly(cohort), weigh=Equally())
    loose = replace(
        *(PROTECTION,),
        noise=0.0,
        clip=math.inf,
        sampling=sampling,
        cohort=cohort,
        noise_cohort=cohort,
    )
    expected, found = train(plain, rounds=3), train(with_privacy(plain, loose), rounds=3)
    assert_equal(found=found.params, expected=expected.params)


@pytest.mark.parametrize("clip", [0.5, Adaptive(0.5, 0.5, 0.2, None)])
def test_no_client_sends_more_than_the_clip_whatever_its_update(clip):
    rows = [[0.0] * 6, [1e-300] * 6, [0.1] * 6, [3e38] * 6, [1e300] * 6, [math.nan] + [1.0] * 5]
    rows += [[math.inf] * 6, [-math.inf] + [0.0] * 5]
    whole = torch.tensor(rows, dtype=DOUBLE)
    update = {"a": whole[:, :2], "b": whole[:, 2:].view(-1, 2, 2)}
    one = step(replace(PROTECTION, clip=clip))
    memory = one.begin({"a": torch.zeros(2)})
    told = {name: {n: t[None] for n, t in tree.items()} for name, tree in memory.items()}
    sent = one.encode(update, told, torch.zeros(8, dtype=torch.int64), LAYOUT).update
    sent = {name: sent[name] for name in "ab"}
    assert bool((norms(sent) <= 0.5).all())
    assert float(norms(sent)[3]) == pytest.approx(0.5)
    for row in (0, 4, 5, 6, 7):  # zeros, too long for a float64 to square, not finite
        assert all(not sent[name][row].any() for name in "ab")
    assert_equal(found={"a": sent["a"][1:3]}, expected={"a": update["a"][1:3]})  # short ones stay


def test_all_that_a_client_sends_is_clipped_together_also_after_it_was_quantized():
    update = {"weight": torch.tensor([[[3.0, 4.0]]], dtype=DOUBLE), "bias": torch.tensor([[12.0]])}
    sent = step(replace(FIXED, clip=1.0)).encode(update, {}, torch.zeros(1), LAYOUT).update
    assert sent["weight"].flatten().tolist() == pytest.approx([3 / 13, 4 / 13])
    assert sent["bias"].item() == pytest.approx(12 / 13)
    made = with_privacy(compose(BASE, quantize(bits=4)), FIXED)
    assert [type(one).__name__ for one in made.channel] == ["Quantize", "ClipAndNoise"]


@pytest.mark.parametrize(("noise", "clip", "noise_cohort"), [(1.0, 0.5, 5), (0.3, 20.0, 50)])
def test_the_noise_of_a_round_has_the_variance_that_is_accounted_for(noise, clip, noise_cohort):
    numbers = 200_000
    protection = replace(
        FIXED, noise=noise, clip=clip, noise_cohort=noise_cohort, population=2 * noise_cohort
    )
    zeros = {
        "a": torch.zeros(numbers // 4, dtype=DOUBLE),
        "b": torch.zeros(3 * numbers // 4).double(),
    }
    sums, squares = [], []
    for round in range(2):
        sent = step(protection).decode(zeros, keys.root(3, round), NOBODY, {}, round).update
        whole = torch.cat([*sent.values()]) / (noise * clip / noise_cohort)
        squares.append(float(whole.square().mean()))
        sums.append(whole)
        within = float((whole.abs() < 1).double().mean())
        assert within == pytest.approx(math.erf(0.5**0.5), abs=6 * 0.5 / numbers**0.5)
    # Five standard errors of the mean of squares, and of products of two rounds.
    assert squares == pytest.approx([1, 1], abs=5 * (2 / numbers) ** 0.5)
    assert abs(float((sums[0] * sums[1]).mean())) < 5 / numbers**0.5


def test_the_result_lies_on_a_grid_a_thousandth_of_the_noise_and_nothing_finer():
    values = {"a": torch.linspace(-1, 1, 1001, dtype=DOUBLE) ** 3}
    one = step(replace(FIXED, noise=1.0, clip=1.0))
    found = one.decode(values, keys.root(0), NOBODY, {}, 0).update["a"]
    grid = 2.0 ** math.floor(math.log2(0.2 / 1024))
    assert bool(((found / grid) == (found / grid).round()).all())
    assert 0.2 / grid >= 1024


def test_the_noisy_count_that_moves_a_clip_lies_on_such_a_grid_too():
    clip = Adaptive(quantile=0.5, start=1.0, lr=1.0, count_noise=2.0)
    one = step(replace(FIXED, noise=1.0, clip=clip))
    memory, grid = one.begin({"a": torch.zeros(1)}), 2.0 ** math.floor(math.log2(2 / 5 / 1024))
    for round in range(4):
        sums = {"a": torch.zeros(1, dtype=DOUBLE), BELOW: torch.full((1,), 0.3, dtype=DOUBLE)}
        later = one.decode(sums, keys.root(0, round), NOBODY, memory, round).memory
        share = 0.5 - math.log(float(later["clip"]["clip"]))
        assert share / grid == pytest.approx(float(f"{share / grid:.0f}"), abs=1e-6)


@dataclass(frozen=True)
class These(Select):
    """The same clients in every round."""

    clients: tuple[int, ...]

    @property
    def cohort_size(self) -> int:
        return len(self.clients)

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor:
        return torch.tensor(self.clients, dtype=torch.int64)


def send_far(local: Local) -> Upload:
    """Updates of very different lengths, that point elsewhere for each client."""
    assert local.clients is not None
    far = {}
    for number, (name, u) in enumerate(difference(local).update.items()):
        own = keys.fold(local.clients, number)[:, None]
        drawn = keys.normal(keys.fold(own, torch.arange(u[0].numel()))).view(u.shape)
        far[name] = drawn * per_row(10.0 ** (local.clients - 4), u)
    return Upload(far)


@pytest.mark.parametrize("taken", range(5))
def test_one_client_more_or_less_moves_the_sum_by_at_most_one_clip(taken):
    private = with_privacy(replace(PLAIN, upload=send_far), replace(FIXED, noise=0.0))
    clients = tuple(range(2, 7))
    states = [
        train(replace(private, select=These(chosen)), rounds=1)
        for chosen in (clients, clients[:taken] + clients[taken + 1 :])
    ]
    moved = {name: (p - states[1].params[name])[None] for name, p in states[0].params.items()}
    assert float(norms(moved)) <= 0.5 / 5 * (1 + 1e-9)
    assert float(norms(moved)) > 1e-4


def test_an_empty_round_moves_the_model_by_noise_alone():
    private = with_privacy(BASE, replace(FIXED, noise=2.0))
    start, state = (
        Network(small_cnn(), dtype=DOUBLE).params,
        train(replace(private, select=These(())), rounds=1),
    )
    moved = torch.cat([(state.params[n] - p).flatten() for n, p in start.items()]) / (2 * 0.5 / 5)
    assert float(moved.square().mean()) == pytest.approx(1, abs=5 * (2 / len(moved)) ** 0.5)


def test_layers_that_clients_keep_get_no_noise():
    start = Network(small_cnn(), dtype=DOUBLE).params
    state = train(with_privacy(compose(PLAIN, fedper()), replace(FIXED, noise=1.0)), rounds=2)
    moved = {name for name, p in start.items() if not torch.equal(state.params[name], p)}
    assert moved == {name for name in start if not name.startswith("5.")}


def on_zeros(protection: Protection, rounds: int) -> list[Tensor]:
    """The noise of each round, in the unit of the independent noise."""
    one, found = step(protection), []
    assert isinstance(protection.clip, float)
    unit = protection.noise * protection.clip / protection.noise_cohort
    memory = one.begin({"a": torch.zeros(50)})
    for round in range(rounds):
        zeros = {"a": torch.zeros(50, dtype=DOUBLE)}
        decoded = one.decode(zeros, keys.root(1, round), NOBODY, memory, round)
        memory = dict(decoded.memory)
        found.append(decoded.update["a"] / unit)
    return found


def fresh(rounds: int) -> Tensor:
    return torch.stack([keys.normals(keys.fold(keys.root(1, t), 0), 50) for t in range(rounds)])


def test_what_noise_in_bands_hides_is_independent_noise_on_c_times_the_sums():
    released = torch.stack(on_zeros(replace(BANDED, noise=1.0), 9))
    columns = step(BANDED).begin({"a": torch.zeros(50)})["columns"]["columns"].numpy()
    matrix = torch.from_numpy(Banded(columns).matrix[:9, :9])
    torch.testing.assert_close(matrix @ released, fresh(9), rtol=0, atol=3e-3)  # of the grid


@pytest.mark.parametrize("restart", [None, 4, 3])
def test_noise_by_trees_is_the_noise_of_the_nodes(restart):
    protection = replace(BANDED, mechanism=tree(restart=restart), noise=1.0)
    released, drawn = on_zeros(protection, 11), fresh(11)
    whole = NoiseTree(11, restart or 11)
    end = {}  # the round that completes a node
    for t in range(11):
        for node in nodes_of(whole, t + 1) - nodes_of(whole, t):
            end[node] = t
    for t, found in enumerate(released):
        nodes = weights_of(whole, t)
        expected = sum(weight * drawn[end[node]] for node, weight in nodes.items())
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-3)


MECHANISMS: list[dict[str, Any]] = [
    {"sampling": "poisson"},
    {"sampling": "fixed"},
    {"sampling": "all", "cohort": 10, "noise_cohort": 10},
    {"sampling": "cyclic", "mechanism": BandedNoise(2)},
    {"sampling": "cyclic", "mechanism": TreeNoise()},
    {"sampling": "cyclic", "mechanism": TreeNoise(8), "cohort": 2, "noise_cohort": 2},
]


@pytest.mark.parametrize("changes", MECHANISMS)
def test_what_the_rounds_release_one_by_one_is_what_they_release_together(changes):
    protection = replace(FIXED, noise=1.5, rounds=20, **changes)
    for rounds in (1, 2, 7, 20):
        each = [one for t in range(rounds) if (one := protection.release(t)) is not None]
        together = protection.released(rounds)
        assert epsilon(each, 1e-5) == pytest.approx(epsilon(together, 1e-5), rel=1e-4)


def test_a_client_in_bands_pays_once_a_turn():
    protection = replace(BANDED, noise=2.0, clients=10, cohort=2, noise_cohort=2, rounds=20)
    protection = replace(protection, mechanism=BandedNoise(5))
    paying = [t for t in range(20) if protection.release(t) is not None]
    assert paying == [0, 5, 10, 15]
    assert protection.released(20)[0].noise == pytest.approx(2.0 / 4**0.5)


@pytest.mark.parametrize(("count", "clients"), [(3, 10), (5, 10), (4, 4), (7, 30)])
def test_clients_in_a_cycle_come_back_in_order_and_equally_often(count, clients):
    federation = noisy_images([1] * clients)
    turns: dict[int, list[int]] = {client: [] for client in range(clients)}
    for round in range(3 * clients):
        chosen = Cyclic(count, clients, 0)(federation, round, keys.root(0, round)).tolist()
        assert len(set(chosen)) == count
        for client in chosen:
            turns[client].append(round)
    assert {len(times) for times in turns.values()} == {3 * count}
    assert min(b - a for t in turns.values() for a, b in pairwise(t)) >= clients // count


def test_the_clip_follows_the_quantile_of_the_norms():
    """Andrew et al., equation 3: without noise, clip times exp(-lr (share below - quantile))."""
    clip = Adaptive(quantile=0.8, start=1.0, lr=0.5, count_noise=None)
    one = step(replace(FIXED, noise=0.0, clip=clip))
    memory = one.begin({"a": torch.zeros(1)})
    told = {"clip": {"clip": torch.ones(1, dtype=DOUBLE)}}
    update = {"a": torch.tensor([[0.2], [0.9], [1.5], [7.0], [math.nan]], dtype=DOUBLE)}
    sent = one.encode(update, told, torch.zeros(5), LAYOUT).update
    sums = {name: 0.2 * u.sum(0) for name, u in sent.items()}
    decoded = one.decode(sums, keys.root(0), NOBODY, memory, 0)
    assert float(decoded.memory["clip"]["clip"]) == pytest.approx(math.exp(-0.5 * (2 / 5 - 0.8)))
    assert list(decoded.update) == ["a"]


def test_the_count_of_an_adaptive_clip_has_a_share_of_the_budget():
    """Andrew et al., theorem 1: both together cost what the noise altogether would cost."""
    of_updates, of_count = Adaptive(0.5, 0.1, 0.2, None).split(1.1, 100)
    assert of_count == 5.0
    assert of_updates**-2 + (2 * of_count) ** -2 == pytest.approx(1.1**-2)
    with pytest.raises(ValueError, match="count_noise"):
        Adaptive(0.5, 0.1, 0.2, count_noise=0.5).split(1.1, 100)


@pytest.mark.parametrize(
    "protection", [PROTECTION, BANDED, replace(BANDED, mechanism=TreeNoise(3))]
)
def test_a_run_from_a_checkpoint_goes_on_byte_for_byte(protection):
    federation, network = noisy_images(FEW), Network(small_cnn(), dtype=DOUBLE)
    program = ClientProgram(with_privacy(BASE, protection), network.layout)
    engine = Sequential(network, federation.examples)
    state = begin(network, program, federation, CPU)
    for _ in range(3):
        state, _ = run_round(program, federation, engine, state, seed=0)
    tensors: Tree = {}
    described = describe(state, tensors)
    again = restore(State, described, {name: t.clone() for name, t in tensors.items()})
    for _ in range(3):
        state, _ = run_round(program, federation, engine, state, seed=0)
        again, _ = run_round(program, federation, engine, again, seed=0)
    assert_equal(found=again.params, expected=state.params)
    if isinstance(protection.clip, Adaptive):
        (mine,), (theirs,) = ([*one.told.values()] for one in (again, state))
        assert torch.equal(mine["clip"], theirs["clip"]) and float(mine["clip"]) != 0.3


def test_every_update_counts_as_the_algorithm_without_privacy_counts_equal_clients():
    shares = {
        1 / 5: BASE,
        1 / 10: compose(BASE, fedadmm(rho=0.1, start="cold")),
        0.3: compose(BASE, lambda_sum(0.3)),
    }
    for share, algorithm in shares.items():
        assert with_privacy(algorithm, FIXED).weigh == Constant(share)


def test_select_draws_as_is_counted_on():
    chosen = {
        name: with_privacy(BASE, replace(FIXED, sampling=name)).select
        for name in ("poisson", "fixed")
    }
    assert chosen == {"poisson": Poisson(0.5, 10), "fixed": Uniformly(5)}
    assert with_privacy(BASE, BANDED).select == Cyclic(5, 10, 0)


def experiment(privacy: dict[str, Any], **changes: Any) -> fl.Experiment:
    tables: dict[str, Any] = {
        "dataset": "fashion-mnist-mini",
        "model": "linear",
        "rounds": 10,
        "clients": {"count": 20, "per_round": 5},
        "privacy": {"noise": 1.0, **privacy},
        "engine": "sequential",
    }
    return fl.Experiment.of(tables | changes)


@pytest.mark.parametrize(
    ("privacy", "delta"),
    [
        ({}, 1e-5),
        ({"sampling": "fixed"}, 1e-5),
        ({"mechanism": {"name": "banded", "bands": 4}}, 1e-5),
        ({"clip": "adaptive"}, 1e-5),
        ({"noise_cohort": 1000, "population": 100_000, "delta": 1e-6}, 1e-6),
    ],
)
def test_noise_is_calibrated_to_the_epsilon_that_is_asked_for(privacy, delta):
    made = build(experiment({"noise": None, "epsilon": 3.0, **privacy})).program.algorithm
    (step,) = made.channel
    assert isinstance(step, ClipAndNoise)
    assert 2.99 < epsilon(step.privacy.released(10), delta) <= 3.0


COMPOSES = {
    *("fedavg", "lambda-sum", "fedprox", "fedavgm", "admm", "ceadmm", "fedadam", "fedyogi"),
    *("fedadagrad", "fedper", "fedbn", "liadmm", "celiadmm", "clip", "quantize", "top-k", "sign"),
    *("fine-tune", "lg-fedavg", "fedrep", "fedbabu", "ditto", "apfl", "pfedme", "per-fedavg"),
    *("moon", "fedala", "powersgd", "eden", "download"),
}
NEEDED: dict[str, dict[str, Any]] = {"fedvc": {"size": 32}, "bulyan": {"byzantine": 0}}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_composes_or_is_refused_in_one_line(name):
    table = {"name": name, **NEEDED.get(name, {})}
    tables = [{"name": "median"}, table] if name == "bucketing" else [table]
    described = experiment({}, algorithm=tables, model="lenet5")
    if name in COMPOSES:
        assert build(described).program.algorithm.covered
        return
    with pytest.raises(ValueError, match="privacy does not cover") as refused:
        build(described)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("privacy", "word"),
    [
        ({"noise": None}, "epsilon"),
        ({"epsilon": 1.0}, "exactly one|not both"),
        ({"noise": None, "epsilon": 0}, "privacy.epsilon"),
        ({"noise": -1.0}, "privacy.noise"),
        ({"clip": 0}, "privacy.clip"),
        ({"clip": {"name": "adaptive", "quantile": 2.0}}, "quantile"),
        ({"delta": 0.05}, "privacy.delta"),
        ({"delta": 0}, "privacy.delta"),
        ({"unit": "hospital"}, "privacy.unit"),
        ({"mechanism": "laplace"}, "laplace"),
        ({"mechanism": {"name": "banded", "bands": 5}}, "bands"),
        ({"mechanism": {"name": "banded", "bands": 40}}, "bands"),
        ({"mechanism": {"name": "tree", "restart": 0}}, "restart"),
        ({"mechanism": "tree", "clip": "adaptive"}, "adaptive"),
        ({"mechanism": "tree", "sampling": "poisson"}, "cyclic"),
        ({"sampling": "cyclic"}, "cyclic"),
        ({"sampling": "all"}, "per_round"),
        ({"population": 100}, "population"),
        ({"cllip": 1.0}, "clip"),
    ],
)
def test_a_bad_key_is_refused_in_one_line(privacy, word):
    with pytest.raises(ValueError, match=word) as refused:
        build(experiment(privacy))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("clients.holdout", {"clients": {"count": 20, "per_round": 5, "holdout": 0.2}}),
        ("clients.devices", {"clients": {"count": 20, "per_round": 5, "devices": "alike"}}),
        ("faults", {"faults": {"dropped": 0.1}}),
        ("reporting", {"reporting": {"deadline": 9.0}}),
        ("evaluate.on", {"evaluate": {"on": ["train", "test"]}}),
        ("evaluate.twin", {"evaluate": {"twin": True}}),
        ("evaluate.fine_tune", {"evaluate": {"fine_tune": 1}}),
        ("stop.batches", {"stop": {"batches": 5}}),
        ("group", {"model": {"name": "resnet18", "stem": "cifar"}}),
    ],
)
def test_what_would_tell_more_of_the_clients_is_refused_by_its_key(key, changes):
    with pytest.raises(ValueError, match=key):
        build(experiment({}, **changes))


def test_the_records_of_a_private_run_have_nothing_that_clients_measured(tmp_path):
    result = fl.run(experiment({"clip": "adaptive"}, rounds=2), tmp_path / "run")
    assert result.status == "finished"
    for record in result.records:
        assert "train_loss" not in record and record["clip"] > 0 and "test_accuracy" in record
    assert "train_loss" not in result.summary["final"]
