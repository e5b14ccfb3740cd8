"""Estimates: of warm rounds, stacks as they train, evaluations included."""

from dataclasses import replace

import pytest

from fedlens.config.experiment import (
    Clients,
    Evaluate,
    Experiment,
    LocalTraining,
    Named,
    Privacy,
)
from fedlens.recipes import RECIPES, estimate
from fedlens.recipes.estimate import Cost, Timing
from fedlens.recipes.recipe import Scale
from fedlens.recipes.reproduce import plan
from fedlens.runs.loop import run_to_end
from fedlens.runs.points import drawn_plan
from fedlens.runs.spread import SpreadPoints
from fedlens.runs.sweep import prepare

PLAIN = Experiment(
    dataset=Named("fashion-mnist-mini"),
    model=Named("linear"),
    rounds=20,
    engine="sequential",
    clients=Clients(count=20, per_round=4),
    local=LocalTraining(lr=0.05),
)
STACKED = replace(PLAIN, engine="stacked", device="cpu")


def seconds(timing, experiment):
    (found,) = timing.sweeps([{"one": experiment}])
    return found.seconds


def test_an_estimate_grows_with_the_rounds():
    timing = Timing([PLAIN])
    once = seconds(timing, PLAIN)
    assert once > 0
    assert seconds(timing, replace(PLAIN, rounds=200)) == pytest.approx(10 * once)


def test_a_private_run_of_fewer_rounds_than_are_timed_gets_noise_for_these():
    private = Privacy(epsilon=8.0, delta=1e-3)
    short = replace(STACKED, rounds=2, privacy=private)
    assert seconds(Timing([short]), short) > 0


def test_evaluations_count():
    timing = Timing([PLAIN])
    seconds(timing, PLAIN)
    often, seldom, at = (
        seconds(timing, replace(PLAIN, evaluate=evaluate))
        for evaluate in (Evaluate(), Evaluate(every=20), Evaluate(every=20, at=(1, 2, 30)))
    )
    (cost,) = (one.a_tested * 1000 for one in timing.costs.values())  # the mini set's test images
    assert often - seldom == pytest.approx(19 * cost)
    assert at - seldom == pytest.approx(2 * cost)
    assert cost > 0


def test_what_is_set_apart_is_shortened_too(monkeypatch):
    monkeypatch.setattr(estimate, "TESTED", 50)
    described = replace(PLAIN, evaluate=Evaluate(on=("validation", "train")))
    assert seconds(Timing([described]), described) > 0


def test_points_that_train_together_are_timed_together():
    points = {f"lr {lr}": replace(STACKED, local=LocalTraining(lr=lr)) for lr in (0.01, 0.1, 1.0)}
    points["fedavgm"] = replace(STACKED, algorithm=(Named("fedavgm"),))
    points["fedprox"] = replace(STACKED, algorithm=(Named("fedprox"),))
    timing = Timing(points.values())
    found = [one.names for one in timing.sweeps([points])]
    assert found == [[point.name for point in stack] for stack in prepare(points).stacks]
    assert [len(names) for names in found] == [4, 1]


@pytest.fixture
def made(monkeypatch):
    """The experiments that are made and checked, which takes long if there are thousands."""
    found, check = [], Experiment.__post_init__

    def note(self):
        found.append(self)
        check(self)

    monkeypatch.setattr(Experiment, "__post_init__", note)
    return found


def test_a_plan_checks_no_experiment_twice(made, tmp_path):
    recipe = RECIPES["hsu2020/figure8"](Scale("smoke"))
    count = len(made)
    planned = plan("hsu2020/figure8", "smoke", tmp_path)
    assert len(made) == 2 * count and list(planned.cells.values()) == list(recipe.cells.values())


def test_experiments_of_one_kind_share_a_setup(made):
    rates = {f"lr {lr}": replace(PLAIN, local=LocalTraining(lr=lr / 100)) for lr in range(1, 9)}
    counts = []
    for points in (dict(list(rates.items())[:2]), rates):
        made.clear()
        Timing(points.values()).sweeps([points])
        counts.append(len(made))
    assert counts[0] == counts[1]


def test_a_point_that_diverges_while_it_is_timed_leaves_an_estimate():
    lost = replace(
        STACKED, local=LocalTraining(lr=1.0, weight_decay=1e30), algorithm=(Named("fedavgm"),)
    )
    for points in ({"sound": STACKED, "lost": lost}, {"lost": lost}):
        (found,) = Timing(points.values()).sweeps([points])
        assert found.names == list(points)
        assert found.seconds > 0


def test_a_rate_at_which_runs_diverge_is_timed_as_any_other(monkeypatch):
    """Who diverges leaves its stack, and rounds of the others must first be recorded again."""
    rows: list[int] = []

    def watched(runs):
        results = run_to_end(runs)
        rows.extend(len(result.records) for result in results)
        return results

    monkeypatch.setattr(estimate, "run_to_end", watched)
    settings = {"sound": LocalTraining(lr=0.1), "lost": LocalTraining(lr=1e3, weight_decay=1e3)}
    points = {name: replace(STACKED, local=local) for name, local in settings.items()}
    Timing(points.values()).sweeps([points])
    assert rows and len(set(rows)) == 1, "none ended before the others"


def always(seconds: float) -> Cost:
    """Rounds that take as long, however much work they are."""
    return Cost(seconds, 0.0, 0.0)


@pytest.fixture
def as_if_ray(monkeypatch):
    """What is to run on Ray can be described where it is not installed."""
    monkeypatch.setattr("fedlens.engines.cluster.check", lambda: None)


@pytest.mark.usefixtures("as_if_ray")
@pytest.mark.parametrize(("workers", "expected"), [(1, 21.0), (2, 10.5), (3, 7.0), (9, 6.0)])
def test_points_that_are_spread_take_as_long_as_the_last_worker(workers, expected, monkeypatch):
    """Points of 1, 2, ... 6 s; none ends before its longest point."""
    monkeypatch.setattr(SpreadPoints, "among", SpreadPoints)
    monkeypatch.setattr(SpreadPoints, "num_workers", workers)
    monkeypatch.setattr(estimate, "cost", lambda _: always(1.0))
    ray = replace(PLAIN, engine="ray", device="cpu")
    points = {f"rounds {n}": replace(ray, rounds=n) for n in range(1, 7)}
    (found,) = Timing([ray]).sweeps([points])
    assert found.names == [*points]
    assert found.seconds == pytest.approx(expected)


@pytest.mark.usefixtures("as_if_ray")
def test_a_point_that_is_spread_is_timed_on_one_worker(monkeypatch):
    """And on all of them one that is not spread, since it starts from a file of weights."""
    timed = []

    def seen(setups):
        timed.append(setups[0].engine._most_workers)
        return always(len(timed))

    monkeypatch.setattr(SpreadPoints, "num_workers", 2)
    monkeypatch.setattr(estimate, "cost", seen)
    plain = replace(PLAIN, engine="ray", device="cpu", rounds=3)
    points = {f"seed {n}": replace(plain, seed=n) for n in range(4)}
    points["begun"] = replace(plain, weights="another/model.safetensors")
    begun, spread = Timing(points.values()).sweeps([points])
    assert timed == [None, 1]
    assert begun == (["begun"], 3.0)
    assert spread == ([f"seed {n}" for n in range(4)], 2 * 3 * 2.0)


MANY = replace(
    PLAIN, clients=Clients(count=40, per_round=40), local=LocalTraining(lr=0.05, epochs=20)
)
UNEVEN = replace(
    STACKED,
    clients=Clients(count=10, per_round=5, partition=Named("drawn", {"low": 1, "high": 60})),
    local=LocalTraining(lr=0.05, batch_size=4),
)


def setup_of(experiment):
    (setup,) = Timing([experiment]).setups.values()
    return setup


@pytest.fixture
def trained(monkeypatch):
    """How many examples the timed rounds train on; a clock that counts them takes the time."""
    found: list[float] = []

    def counted(runs):
        results = run_to_end(runs)
        for record in (record for result in results for record in result.records):
            record["seconds"] = 0.5 + 1e-4 * record["examples"]
            found.append(record["examples"])
        return results

    monkeypatch.setattr(estimate, "run_to_end", counted)
    return found


def test_of_many_clients_and_epochs_a_few_are_timed(trained):
    setup = setup_of(MANY)
    found = estimate.cost([setup])
    assert max(trained) <= 4 * estimate.BATCHES[1] * MANY.local.batch_size  # four clients
    work = estimate.work_of([setup])
    assert work == 20 * len(setup.dataset.train)
    assert found.of(work) == pytest.approx(0.5 + 1e-4 * work, rel=0.05)


def test_slow_rounds_are_timed_briefly(trained, monkeypatch):
    monkeypatch.setattr(estimate, "LONG_SECONDS", 0.0)
    found = estimate.cost([setup_of(MANY)])
    assert max(trained) <= 4 * MANY.local.batch_size
    assert found.a_round == 0.0 and found.a_unit > 0 and found.a_tested > 0


def test_side_by_side_a_round_grows_with_steps_between_the_longest_and_their_mean():
    setup = setup_of(UNEVEN)
    found = []
    for number in range(estimate.DRAWN):
        steps = drawn_plan(setup, number).steps.double()
        assert steps.max() > steps.mean()
        found.append(float(steps.max() + steps.mean()) / 2)
    assert estimate.work_of([setup]) == pytest.approx(sum(found) / len(found))
    assert seconds(Timing([UNEVEN]), UNEVEN) > 0


def test_noise_makes_no_cost_negative(monkeypatch):
    times = iter([(1.0, 0.0), (0.5, 0.0)])
    monkeypatch.setattr(estimate, "_time_rounds", lambda _: next(times))
    found = estimate.cost([setup_of(MANY)])
    assert found.a_unit == 0.0 and found.a_round == 1.0


def test_once_timing_has_taken_long_one_of_a_family_stands_for_the_others(monkeypatch):
    timed = []

    def slow(setups):
        timed.append(setups[0].experiment)
        return always(float(len(timed)))

    monkeypatch.setattr(estimate, "cost", slow)
    points = {loss: replace(PLAIN, loss=loss) for loss in ("cross_entropy", "focal")}
    points["other"] = replace(PLAIN, model=Named("lenet5"))
    monkeypatch.setattr(estimate, "SECONDS", 0.0)
    told = []
    found = Timing(points.values()).sweeps([points], lambda *counts: told.append(counts))
    assert len(timed) == 2  # one of each model
    assert [one.seconds for one in found] == [20.0, 20.0, 40.0]
    assert told[0] == (0, 3) and told[-1] == (3, 3)
