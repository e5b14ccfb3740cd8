"""What composes with what; memory of clients."""

import itertools
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.algorithms import (
    ALGORITHMS,
    fedadam,
    fedadmm,
    fedavgm,
    fedbn,
    feddyn,
    fedir,
    fednova,
    fedns,
    fedprox,
    fedvc,
    krum,
    lambda_sum,
    lastfc,
    median,
    scaffold,
    trimmed_mean,
)
from fedlens.core.federation import Fixed, Holdings
from fedlens.engines import Sequential
from fedlens.network.network import Network
from fedlens.rounds import begin, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.runs.folder import RunFolder
from tests.checkpoints import load_state
from tests.conformance.quadratics import Quadratics, close, end, plain, some
from tests.federations import CPU, assert_equal, noisy_images, small_cnn, train

ROOT = Path(__file__).parents[2]
BASE = Algorithm(select=Uniformly(5), draw=Epochs(2, batch_size=8), solve=Sgd(0.1))
OPTIONS: dict[str, dict[str, Any]] = {"fedavg": {"over": "population"}, "fedvc": {"size": 16}}


def made(name):
    return ALGORITHMS[name](**OPTIONS.get(name, {}))


def refusal(*names):
    try:
        compose(BASE, *map(made, names))
    except ValueError as error:
        return str(error)
    return None


def test_what_composes_does_not_depend_on_the_order():
    for one, other in itertools.combinations(ALGORITHMS, 2):
        if {"bucketing", "nnm"} & {one, other}:
            continue  # they go after the combination that they wrap
        there, back = refusal(one, other), refusal(other, one)
        assert (there is None) == (back is None), (one, other, there, back)


def test_a_refusal_names_a_paper_and_what_to_do():
    for names in itertools.permutations(ALGORITHMS, 2):
        message = refusal(*names)
        if message is not None:
            assert any(name in message for name in names) and ": " in message, message


@pytest.mark.parametrize(
    ("one", "other", "slot"),
    [
        ("fedavgm", "fedadam", "advance"),
        ("fedadam", "fedavgm", "advance"),
        ("fedadmm", "fedavgm", "advance"),
        ("fedns", "lastfc", "combine"),
        ("median", "krum", "combine"),
        ("lambda-sum", "fedavg", "weigh"),
        ("fednova", "fedvc", "weigh"),
    ],
)
def test_two_papers_that_refill_one_slot_are_both_named(one, other, slot):
    assert refusal(one, other) == f"{one} and {other} both refill `{slot}`: leave one out"


@pytest.mark.parametrize("combine", [lastfc(), fedns(), krum(), median(), trimmed_mean()])
@pytest.mark.parametrize("weigh", [lambda_sum(), fednova(), fedvc(size=16), scaffold()])
def test_weights_that_nobody_would_look_at_are_refused(combine, weigh):
    for pair in ((combine, weigh), (weigh, combine)):
        with pytest.raises(ValueError) as refused:
            compose(BASE, *pair)
        assert combine.name in str(refused.value) and weigh.name in str(refused.value)


def test_the_same_filling_by_two_papers_is_fine():
    compose(BASE, fedvc(size=16, replacement=False), scaffold())  # both weigh equally


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_paper_stands_twice(name):
    """Its term would count twice, or its step be taken twice."""
    assert refusal(name, name) == f"{name} is in algorithm twice: leave one out"


@pytest.mark.parametrize("twice", [fedvc(size=16), fedprox(sampling="by-size")])
@pytest.mark.parametrize("remembers", [scaffold(), feddyn(), fedbn()])
def test_a_client_that_may_be_drawn_twice_cannot_remember(twice, remembers):
    """It would keep one of two controls, and the server would add up both."""
    for pair in ((twice, remembers), (remembers, twice)):
        with pytest.raises(ValueError, match="replacement"):
            compose(BASE, *pair)


@pytest.mark.parametrize("papers", [*itertools.permutations(("fedvc", "fedir", "fedavgm"))])
def test_the_combinations_of_paper_2_give_one_model_in_any_order(papers):
    expected = train(compose(BASE, fedvc(size=16), fedir(), fedavgm()))
    assert_equal(train(compose(BASE, *map(made, papers))).params, expected.params)
    without = train(compose(BASE, fedvc(size=16), fedavgm()))
    assert not torch.equal(without.params["5.weight"], expected.params["5.weight"])


def permuted(problem, order):
    return Quadratics(problem.a[order], problem.c[order], problem.sizes[order], problem.start)


OF_LAYERS = {  # which need a model with a last layer
    *("lastfc", "fedns", "fedper", "fedrep", "fedbabu", "lg-fedavg", "moon", "fedala", "fedproto")
}
# Who is drawn, how a client rounds, who starts first, and whom the server trusts:
BY_NUMBER = ("fedvc", "quantize", "eden", "fedbuff", "fedasync", "bucketing", "fltrust")


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in BY_NUMBER])
def test_no_algorithm_cares_how_clients_are_numbered(name):
    """All of them take part, with full batches, for three rounds."""
    problem, order = some(7), torch.tensor([4, 2, 6, 0, 5, 3, 1])
    if name in OF_LAYERS:
        whole = noisy_images([12] * 7)
        members = [whole.everyone(0).members(client) for client in order.tolist()]
        split = Fixed(Holdings.of(members))
        algorithm = Algorithm(Uniformly(7), Epochs(2, 1000), solve=Sgd(0.1))
        one, two = (
            train(compose(algorithm, made(name)), rounds=3, federation=federation)
            for federation in (whole, replace(whole, split=split))
        )
        for key, p in one.params.items():
            close(two.params[key], p, 1e-10)
        return
    algorithm = compose(plain(7, 0.1, epochs=2), made(name))
    close(end(algorithm, permuted(problem, order), 3), end(algorithm, problem, 3), 1e-10)


def test_the_page_of_compositions_is_what_compose_accepts(capsys):
    runpy.run_path(str(ROOT / "tools" / "make_compositions.py"), run_name="__main__")
    page = (ROOT / "docs" / "compositions.md").read_text()
    assert page == capsys.readouterr().out, (
        "run python tools/make_compositions.py > docs/compositions.md"
    )


REMEMBER = {
    "scaffold": compose(BASE, scaffold()),
    "feddyn": compose(BASE, feddyn(0.1)),
    "fedadmm": compose(BASE, fedadmm(0.1)),
    "momentum": replace(BASE, solve=Sgd(0.1, 0.9), reset=False),
    "fedadam": compose(BASE, fedadam()),
}


@pytest.mark.parametrize("name", REMEMBER)
def test_a_state_survives_its_checkpoint_exactly(name, tmp_path):
    federation, network = noisy_images([6] * 40), Network(small_cnn("batch"))
    program = ClientProgram(REMEMBER[name], network.layout)
    engine = Sequential(network, federation.examples)
    state = begin(network, program, federation, CPU)
    for _ in range(2):
        state, _ = run_round(program, federation, engine, state, 0)
    if name != "fedadam":
        assert 5 <= len(state.clients.rows) <= 10  # those never selected cost nothing

    folder = RunFolder(tmp_path)
    folder.save_state(state)
    loaded = load_state(folder)
    assert loaded.clients.rows.keys() == state.clients.rows.keys()
    one, _ = run_round(program, federation, engine, state, 0)
    two, _ = run_round(program, federation, engine, loaded, 0)
    assert_equal(two.params, one.params)
    assert_equal(two.buffers, one.buffers)
    for client, memory in one.clients.rows.items():
        assert memory.keys() == two.clients.rows[client].keys()
        for kind, tree in memory.items():
            assert_equal(two.clients.rows[client][kind], tree)
    for kind, tree in one.server.items():
        assert_equal(two.server[kind], tree)
