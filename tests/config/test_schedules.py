"""Numbers that change from round to round: what they are, and that every engine uses them."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer, lr_scheduler

import fedlens as fl
from fedlens.algorithm.pieces import ClippedByNorm, Sgd, Uniformly
from fedlens.config.names import SCHEDULES
from fedlens.config.options import Named
from fedlens.config.schedules import value_at
from fedlens.engines.graphs import Captures
from fedlens.engines.processes import Processes
from fedlens.engines.stacked import Stacked
from fedlens.network.network import Network
from fedlens.report.blocks import Curves
from fedlens.report.runs import run_blocks
from fedlens.rounds import State, begin, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.runs.records import read
from fedlens.runs.twin import stretched, twin
from fedlens.setup import build
from fedlens.setup.algorithm import make_algorithm
from tests.eager_capture import num_replays
from tests.federations import CPU, ENGINES, assert_equal, noisy_images, small_cnn
from tests.papers_under_test import PLAIN
from tests.runs.resumable import assert_same_run
from tests.toys import toy

ROUNDS = 12
SIZES = [3, 8, 12, 20]
COSINE = {"name": "cosine", "start": 0.1, "end": 0.01}


def values(name: str, of: int = ROUNDS, **options: Any) -> list[float]:
    schedule = SCHEDULES.fit(Named(name, options), "lr")
    return [value_at(schedule, round, of) for round in range(of)]


def by_torch(make: Any, lr: float = 0.1, **options: Any) -> list[float]:
    optimizer: Optimizer = SGD([torch.zeros(1)], lr=lr)
    schedule, found = make(optimizer, **options), []
    for _ in range(ROUNDS):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_schedules_are_those_of_pytorch():
    def agree(found: list[float], expected: list[float]) -> bool:
        return bool(found == pytest.approx(expected, rel=1e-12, abs=1e-15))

    found = values("exponential", start=0.1, decay=0.9)
    assert agree(found, by_torch(lr_scheduler.ExponentialLR, gamma=0.9))
    found = values("step", start=0.1, every=5, decay=0.3)
    expected = by_torch(lr_scheduler.StepLR, step_size=5, gamma=0.3)
    assert agree(found, expected)
    found = values("cosine", start=0.1, end=0.02)
    expected = by_torch(lr_scheduler.CosineAnnealingLR, T_max=ROUNDS, eta_min=0.02)
    assert agree(found, expected)
    found = values("polynomial", start=0.1, power=2.0, rounds=8)
    expected = by_torch(lr_scheduler.PolynomialLR, total_iters=8, power=2.0)
    assert agree(found, expected)
    found = values("piecewise", values=[0.1, 0.01, 0.001], at=[3, 7])
    expected = by_torch(lr_scheduler.MultiStepLR, milestones=[3, 7], gamma=0.1)
    assert agree(found, expected)
    found = values("warm-up", rounds=4, then=0.1)
    expected = by_torch(lr_scheduler.LinearLR, start_factor=1 / 4, total_iters=3)
    assert agree(found, expected)
    assert values("constant", start=0.1) == [0.1] * ROUNDS


def test_after_a_warm_up_another_schedule_begins_with_the_rounds_that_are_left():
    found = values("warm-up", rounds=4, then=COSINE)
    assert found[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert found[4:] == pytest.approx(values("cosine", ROUNDS - 4, start=0.1, end=0.01))


def described(**changes: Any) -> fl.Experiment:
    plain: dict[str, Any] = {"dataset": toy(), "model": "linear", "rounds": 4}
    plain |= {"engine": "sequential", "precision": "fp64", "clients": {"count": 4, "per_round": 2}}
    plain["local"] = {"lr": COSINE, "batch_size": 4}
    return fl.Experiment(**plain | changes)


def test_a_scheduled_run_is_one_whose_rounds_have_these_numbers():
    mu = {"name": "exponential", "start": 0.5, "decay": 0.5}
    server = {"lr": {"name": "step", "start": 1.0, "every": 2, "decay": 0.5}}
    algorithm = {"name": "fedprox", "mu": mu}
    piecewise = {"name": "piecewise", "at": [1, 3]}
    local: dict[str, Any] = {
        "lr": COSINE,
        "batch_size": 4,
        "momentum": {**piecewise, "values": [0.9, 0.5, 0.1]},
        "weight_decay": {**piecewise, "values": [0.01, 0.1, 0.02]},
        "clip": {**piecewise, "values": [5.0, 0.2, 0.1]},
        "clip_value": {**piecewise, "values": [0.5, 0.05, 1.0]},
    }
    result = fl.run(described(algorithm=algorithm, server=server, local=local))
    states: list[State] = []
    for round in range(4):
        numbers = value_at(Named.of(COSINE, ""), round, 4), [1.0, 1.0, 0.5, 0.5][round]
        place = [0, 1, 1, 2][round]
        others = {
            name: local[name]["values"][place] for name in local if name not in ("lr", "batch_size")
        }
        fixed = described(
            local={"lr": numbers[0], "batch_size": 4, **others},
            server={"lr": numbers[1]},
            algorithm={"name": "fedprox", "mu": 0.5 * 0.5**round},
        )
        setup = build(fixed)
        state = states[-1] if states else begin(setup.network, setup.program, setup.federation, CPU)
        states.append(run_round(setup.program, setup.federation, setup.engine, state, 0)[0])
        record = result.records[round]
        assert (record["lr"], record["server.lr"]) == numbers
        assert record["algorithm.fedprox.mu"] == 0.5 * 0.5**round
        assert {name: record[f"local.{name}"] for name in others} == others
    assert_equal(found=result.model, expected=states[-1].params)
    assert "lr" not in result.final and "server.lr" not in result.summary["best"]


def rounds_with(lrs: list[float], engine: Any, network: Network) -> State:
    """All clients in every round, each round with another number of a program of its own."""
    federation = noisy_images(SIZES)
    state = None
    for lr in lrs:
        solve = ClippedByNorm(Sgd(lr, momentum=4 * lr, weight_decay=lr / 5), norm=1 + lr)
        algorithm = replace(PLAIN, select=Uniformly(len(SIZES)), solve=solve)
        program = ClientProgram(algorithm, network.layout)
        state = state or begin(network, program, federation, CPU)
        state, _ = run_round(program, federation, engine, state, 0)
    assert state is not None
    return state


LRS = [0.2, 0.1, 0.05, 0.01]


@pytest.mark.parametrize(
    "engine", ["stacked", "stacked, recorded", "processes", "processes, two devices"]
)
def test_every_engine_takes_the_numbers_of_the_round(engine):
    network = Network(small_cnn(), dtype=torch.float64)
    examples = noisy_images(SIZES).examples
    expected = rounds_with(LRS, ENGINES["sequential"](network, examples), network).params
    made = ENGINES[engine](network, examples)
    try:
        found = rounds_with(LRS, made, network).params
    finally:
        made.close()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


def test_other_numbers_need_no_other_workers_and_no_other_record():
    network = Network(small_cnn(), dtype=torch.float64)
    examples = noisy_images(SIZES).examples
    workers = Processes(network, examples, workers=1)
    try:
        rounds_with(LRS[:1], workers, network)
        before = [*workers.workers]
        assert before
        rounds_with(LRS, workers, network)
        assert workers.workers == before
    finally:
        workers.close()
    recorded = ENGINES["stacked, recorded"](network, examples)
    assert isinstance(recorded, Stacked)
    rounds_with(LRS[:1], recorded, network)
    prepared = recorded._prepared
    rounds_with(LRS, recorded, network)
    assert recorded._prepared is prepared and prepared is not None
    assert isinstance(prepared.recorder, Captures) and num_replays(prepared.recorder)


def test_a_number_that_is_no_input_of_a_record_may_change_too():
    """A trimmed mean of four clients that leaves out none, and then one at each end."""
    share = {"name": "piecewise", "values": [0.0, 0.25], "at": [1]}
    clients, algorithm = {"count": 4}, {"name": "trimmed-mean", "share": share}
    for engine in ("sequential", "stacked", "processes"):
        found = described(rounds=2, engine=engine, clients=clients, algorithm=algorithm)
        setup = build(described(rounds=2, clients=clients, algorithm={**algorithm, "share": 0.0}))
        state = begin(setup.network, setup.program, setup.federation, CPU)
        for number in (0.0, 0.25):
            fixed = replace(found, algorithm=(Named("trimmed-mean", {"share": number}),))
            program = replace(setup.program, algorithm=make_algorithm(fixed, state.round))
            state, _ = run_round(program, setup.federation, setup.engine, state, 0)
        for name, value in fl.run(found).model.items():
            torch.testing.assert_close(value, state.params[name], rtol=1e-9, atol=1e-11)


def test_a_term_that_fades_to_nothing_is_remembered_and_comes_back():
    """v = beta v + g; w = w - v, by hand, where beta is 0, then 0.5, then 0 again."""
    momentum = {"name": "piecewise", "values": [0.0, 0.5, 0.0], "at": [2, 4]}
    algorithm = {"name": "fedavgm", "momentum": momentum}
    experiment = described(rounds=6, algorithm=algorithm)
    setup = build(experiment)
    state = begin(setup.network, setup.program, setup.federation, CPU)
    velocity = {name: torch.zeros_like(p) for name, p in state.params.items()}
    for round in range(6):
        plain = build(described(rounds=6, local=experiment.local)).program_of(round)
        fresh = begin(setup.network, plain, setup.federation, CPU)
        one = replace(fresh, round=round, params=state.params)
        averaged, _ = run_round(plain, setup.federation, setup.engine, one, 0)
        beta = 0.5 if round in (2, 3) else 0.0
        velocity = {
            name: beta * v + state.params[name] - averaged.params[name]
            for name, v in velocity.items()
        }
        expected = {name: p - velocity[name] for name, p in state.params.items()}
        program = setup.program_of(round)
        state, _ = run_round(program, setup.federation, setup.engine, state, 0)
        for name, p in expected.items():
            torch.testing.assert_close(state.params[name], p, rtol=1e-9, atol=1e-11)


def test_a_learning_rate_of_zero_leaves_the_model_where_it_is():
    lr = {"name": "piecewise", "values": [0.1, 0.0], "at": [2]}
    two, four = (
        fl.run(described(rounds=rounds, local={"lr": lr}, engine="processes")) for rounds in (2, 4)
    )
    assert four.records[3]["lr"] == 0.0
    for name, value in two.model.items():
        torch.testing.assert_close(four.model[name], value, rtol=0, atol=1e-30)


def test_schedules_are_swept_side_by_side():
    local = {"lr": COSINE, "batch_size": 4, "momentum": {**COSINE, "start": 0.9}}
    base = described(engine="stacked", algorithm={"name": "fedprox", "mu": COSINE}, local=local)
    axes = {"local.lr.start": [0.05, 0.2], "local.momentum.end": [0.0, 0.5]}
    points = fl.grid(base, axes | {"algorithm.fedprox.mu.end": [0.0, 0.1]})
    together = fl.sweep(points)
    assert len(together) == 8
    for name, experiment in points.items():
        alone, found = fl.run(experiment), together[name]
        assert [r["lr"] for r in found.records] == [r["lr"] for r in alone.records]
        for key, value in alone.model.items():
            torch.testing.assert_close(found.model[key], value, rtol=1e-8, atol=1e-10)


class Killed(Exception):
    pass


@pytest.mark.parametrize("engine", ["sequential", "stacked", "processes"])
def test_a_run_that_is_resumed_goes_on_with_its_schedule(engine, tmp_path):
    momentum = {"name": "warm-up", "rounds": 2, "then": {"name": "constant", "start": 0.9}}
    algorithm = {"name": "fedavgm", "momentum": momentum}
    local = {"lr": 0.1, "batch_size": 4, "momentum": {**COSINE, "start": 0.9}, "reset": False}
    experiment = described(engine=engine, algorithm=algorithm, local=local)
    fl.run(experiment, tmp_path / "whole")

    def kill(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise Killed

    with pytest.raises(Killed):
        fl.run(experiment, tmp_path / "cut", watch=kill)
    fl.resume(tmp_path / "cut", experiment=experiment)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_schedule_over_all_rounds_cannot_have_more_of_them(tmp_path):
    fl.run(described(), tmp_path / "cosine")
    with pytest.raises(ValueError, match=r"local\.lr .*4"):
        fl.resume(tmp_path / "cosine", rounds=6, experiment=described())
    lr = {"name": "exponential", "start": 0.1, "decay": 0.9}
    fl.run(described(local={"lr": lr}), tmp_path / "exponential")
    result = fl.resume(tmp_path / "exponential", rounds=6, experiment=described(local={"lr": lr}))
    assert [r["lr"] for r in result.records] == pytest.approx(
        values("exponential", 6, start=0.1, decay=0.9)
    )


def test_a_function_of_ones_own_is_a_schedule(tmp_path):
    own = "def halving(round, of, *, first: float):\n    return first / 2**round\n"
    (tmp_path / "own_schedules.py").write_text(own)
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(
        'dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 3\nengine = "sequential"\n'
        'clients = { per_round = 1 }\nlocal = { lr = { name = "warm-up", rounds = 1, '
        'then = { name = "own_schedules:halving", first = 0.4 } } }\n'
    )
    result = fl.run(fl.Experiment.read(experiment), tmp_path / "run")
    assert [record["lr"] for record in result.records] == [0.4, 0.4, 0.2]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["code"] == [str(tmp_path)], "where a resumed run finds it again"


def test_the_twin_goes_through_the_whole_schedule():
    lr = {"name": "exponential", "start": 0.1, "decay": 0.9}
    central = twin(described(rounds=8, local={"lr": lr, "epochs": 1}))
    assert central.rounds == 4, "half of the clients in 8 rounds: 4 passes"
    numbers = [make_algorithm(central, round).solve.learning_rate for round in range(4)]
    assert numbers == pytest.approx([0.1 * 0.9**round for round in (0, 2, 4, 6)])
    assert stretched(1, 4, schedule=Named.of(lr, "lr"), rounds=8) == pytest.approx(0.1 * 0.9**2)


def test_the_page_draws_a_number_that_changes(tmp_path):
    fl.run(described(server={"lr": {"name": "constant", "start": 0.5}}), tmp_path / "run")
    blocks = [block for block in run_blocks([read(tmp_path / "run")]) if isinstance(block, Curves)]
    (drawn,) = [block for block in blocks if block.slug.startswith("schedule")]
    assert drawn.slug == "schedule_of_local_lr", "and not the server's, which is a constant"
    assert drawn.lines[0].y == pytest.approx(values("cosine", 4, start=0.1, end=0.01))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local": {"lr": "cosine"}}, "schedule of local.lr 'cosine' needs 'start'"),
        ({"local": {"lr": {"start": 1.0}}}, "local.lr is {'start': 1.0}: give a name"),
        (
            {"local": {"lr": {"name": "cosin"}}},
            "unknown schedule of local.lr 'cosin': did you mean 'cosine'?",
        ),
        ({"local": {"lr": {"name": "cosine"}}}, "schedule of local.lr 'cosine' needs 'start'"),
        ({"local": {"lr": {**COSINE, "stop": 1}}}, "local.lr 'cosine' has no option 'stop'"),
        ({"local": {"lr": {**COSINE, "end": -1.0}}}, "local.lr is -0.8"),
        ({"local": {"lr": {**COSINE, "rounds": 0}}}, "rounds is 0: choose 1"),
        ({"server": {"lr": {"name": "step", "start": 1.0, "every": 0}}}, "every is 0"),
        (
            {"local": {"lr": {"name": "piecewise", "values": [0.1], "at": [2]}}},
            "piecewise: values has 1 and at 1: give one more value than rounds of at",
        ),
        (
            {"local": {"lr": {"name": "exponential", "start": 1.0, "decay": 1e30}}, "rounds": 400},
            "gave inf in round 12",
        ),
        (
            {"local": {"lr": {**COSINE, "end": -1.0}}, "rounds": 10**15},
            "local.lr is -1.0: choose 0 or more",
        ),
        (
            {
                "algorithm": {
                    "name": "fedavgm",
                    "momentum": {"name": "exponential", "start": 0.5, "decay": 1.5},
                }
            },
            "choose a number from 0 to below 1 \\(in round 4, by its schedule\\)",
        ),
        (
            {"local": {"momentum": {"name": "warm-up", "rounds": 3, "then": 1.5}}},
            "local.momentum is 1.5: choose 0 to below 1 \\(in round 3, by its schedule\\)",
        ),
        (
            {"algorithm": {"name": "trimmed-mean", "share": {**COSINE, "start": 0.7}}},
            "share is 0.7: choose 0 to below 0.5",
        ),
        ({"algorithm": {"name": "quantize", "bits": COSINE}}, "bits is .*expected a whole number"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_a_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        build(described(**changes))
    assert "\n" not in str(caught.value)
