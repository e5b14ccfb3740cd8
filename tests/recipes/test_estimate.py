"""Estimates: of warm rounds, stacks as they train, evaluations included."""

import math
from dataclasses import replace

import pytest
import torch

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.engines import Processes
from fedlens.recipes import RECIPES, estimate
from fedlens.recipes.estimate import Cost, Speed, Timing, Work
from fedlens.recipes.recipe import Scale
from fedlens.recipes.reproduce import plan
from fedlens.runs.loop import run_to_end
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
    seconds(timing, PLAIN)  # the first of a kind also counts what comes before it is warm
    once = seconds(timing, PLAIN)
    assert once > 0
    assert seconds(timing, replace(PLAIN, rounds=200)) == pytest.approx(10 * once)


def test_evaluations_count():
    timing = Timing([PLAIN])
    seconds(timing, PLAIN)
    often, seldom, at = (
        seconds(timing, replace(PLAIN, evaluate=evaluate))
        for evaluate in (Evaluate(), Evaluate(every=20), Evaluate(every=20, at=(1, 2, 30)))
    )
    cost = next(iter(timing.costs.values())).an_evaluation
    assert often - seldom == pytest.approx(19 * cost)
    assert at - seldom == pytest.approx(2 * cost)
    assert cost > 0


def test_what_is_set_apart_is_shortened_too(monkeypatch):
    monkeypatch.setattr(estimate, "TESTED", 50)
    monkeypatch.setattr(estimate, "FEW_TESTED", 20)
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


def pace_of_a_gpu(work: Work) -> Speed:
    """A fixed part, a part for each step, and a part for each example."""
    return Speed(work, 5.0 + 2.0 * work.steps + 0.25 * work.examples)


def test_steps_of_few_clients_and_of_many_are_told_apart():
    few, many, uneven = Work(1, 80), Work(4, 320), Work(4, 200)
    found = Speed.fitted(*map(pace_of_a_gpu, (few, many, uneven)))
    for work in (Work(4, 320), Work(100, 500), Work(100, 8000)):
        assert found.of(work) == pytest.approx(pace_of_a_gpu(work).seconds)


def test_where_clients_are_alike_a_round_grows_with_its_steps():
    few, many = (pace_of_a_gpu(Work(steps, 80 * steps)) for steps in (1, 4))
    whole = Work(100, 8000)
    assert Speed.fitted(few, many).of(whole) == pytest.approx(pace_of_a_gpu(whole).seconds)


def test_one_after_another_a_round_grows_with_its_examples():
    few, many, whole = (pace_of_a_gpu(Work(0, examples)) for examples in (80, 320, 5000))
    assert Speed.fitted(few, many).of(whole.work) == pytest.approx(whole.seconds)


def test_noise_makes_no_pace_negative():
    slower, faster = Speed(Work(1, 80), 3.0), Speed(Work(4, 320), 2.0)
    assert Speed.fitted(slower, faster).of(Work(100, 8000)) == 2.0
    found = Speed.fitted(Speed(Work(1, 80), 1.0), faster, Speed(Work(4, 200), 0.0))
    assert min(found.a_step, found.an_example) >= 0.0
    assert found.of(Work(100, 8000)) >= 2.0
    assert Speed.fitted(slower, slower).of(Work(1, 80)) == 3.0


def test_whole_rounds_set_the_pace_of_parts_of_them():
    few, many, whole = (Speed(Work(n, 80 * n), t) for n, t in ((1, 0.1), (4, 1.0), (40, 2.0)))
    found = Speed.fitted(few, many).scaled_to(whole)
    assert found.of(whole.work) == 2.0
    assert 0.2 < found.of(Work(10, 800)) < 1.0
    assert few.scaled_to(whole).of(Work(10, 800)) == 2.0


def test_points_of_a_stack_that_end_earlier_take_no_further_time(monkeypatch):
    an_example = Speed(Work(0.0, 0.0), 0.0, an_example=1.0)
    monkeypatch.setattr(estimate, "cost", lambda *_: Cost(0.0, an_example, 0.0))
    points = {"long": replace(STACKED, rounds=30), "short": replace(STACKED, rounds=20, seed=1)}
    timing = Timing(points.values())
    (both,) = timing.sweeps([points])
    assert both.names == [*points]
    alone = [seconds(timing, experiment) for experiment in points.values()]
    assert both.seconds == pytest.approx(sum(alone))


def test_clients_of_unequal_sizes_are_timed_uneven_too(monkeypatch):
    timed, rounds = [], estimate._rounds

    def seen(setups, batches):
        timed.append(batches)
        return rounds(setups, batches)

    monkeypatch.setattr(estimate, "WHOLE_SECONDS", 0.0)
    monkeypatch.setattr(estimate, "_rounds", seen)
    for partition in ("iid", "proportions"):
        options = {"sizes": "high"} if partition == "proportions" else {}
        clients = Clients(count=10, per_round=5, partition=Named(partition, options))
        described = replace(STACKED, clients=clients)
        assert seconds(Timing([described]), described) > 0
    assert timed == [(1, 1), (4, 4), (1, 1), (4, 4), (4, 1)]


def always(seconds: float) -> Cost:
    """Speed that take as long, however much work they are."""
    return Cost(0.0, Speed(Work(0.0, 0.0), seconds), 0.0)


@pytest.fixture
def as_if_ray(monkeypatch):
    """What is to run on Ray can be described where it is not installed."""
    monkeypatch.setattr("fedlens.engines.cluster.check", lambda: None)


@pytest.mark.usefixtures("as_if_ray")
@pytest.mark.parametrize(("workers", "expected"), [(1, 21.0), (2, 12.0), (3, 9.0), (9, 6.0)])
def test_points_that_are_spread_take_as_long_as_the_last_worker(workers, expected, monkeypatch):
    """Points of 1, 2, ... 6 s, in this order, each to the worker that is free first."""
    monkeypatch.setattr(SpreadPoints, "among", SpreadPoints)
    monkeypatch.setattr(SpreadPoints, "num_workers", workers)
    monkeypatch.setattr(estimate, "cost", lambda *_: always(1.0))
    ray = replace(PLAIN, engine="ray", device="cpu")
    points = {f"rounds {n}": replace(ray, rounds=n) for n in range(1, 7)}
    (found,) = Timing([ray]).sweeps([points])
    assert found.names == [*points]
    assert found.seconds == pytest.approx(expected)


@pytest.mark.usefixtures("as_if_ray")
def test_a_point_that_is_spread_is_timed_on_one_worker(monkeypatch):
    """And on all of them one that is not spread, since it starts from a file of weights."""
    timed = []

    def seen(setups, *_):
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


@pytest.fixture
def rounds_timed(monkeypatch):
    """What is timed: the batches of a client, and of how many examples the round is."""
    timed, rounds = [], estimate._rounds

    def seen(setups, batches, **options):
        found = rounds(setups, batches, **options)
        timed.append(batches)
        return found

    monkeypatch.setattr(estimate, "_rounds", seen)
    return timed


MANY = replace(
    PLAIN, clients=Clients(count=40, per_round=40), local=LocalTraining(lr=0.05, epochs=20)
)


def test_of_many_clients_and_epochs_a_few_are_timed(monkeypatch):
    trained: list[float] = []

    def seen(runs):
        results = run_to_end(runs)
        trained.extend(record["examples"] for result in results for record in result.records)
        return results

    monkeypatch.setattr(estimate, "WHOLE_SECONDS", 0.0)
    monkeypatch.setattr(estimate, "run_to_end", seen)
    timing = Timing([MANY])
    assert seconds(timing, MANY) > 0
    (found,) = timing.costs.values()
    batch = MANY.local.batch_size
    assert max(trained) <= 4 * 4 * batch  # four clients, four batches
    assert found.speed.work.examples >= 40 * batch  # and it counts as all of them


@pytest.mark.parametrize("allowed", [0.0, 1.0, 1e9])
def test_an_estimate_is_what_rounds_take_that_grow_with_their_examples(monkeypatch, allowed):
    """Whether they are timed briefly, shortened or whole: by a clock that counts examples."""

    def counted(runs):
        results = run_to_end(runs)
        for record in (record for result in results for record in result.records):
            record["seconds"] = 1e-4 * record["examples"]
        return results

    monkeypatch.setattr(estimate, "run_to_end", counted)
    (setup,) = [point.setup for point in Timing([MANY]).points.values()]
    work = estimate.work_of([setup])
    expected = 1e-4 * work.examples
    assert estimate.cost([setup], work, allowed).speed.of(work) == pytest.approx(expected, rel=0.05)


def test_slow_rounds_are_timed_briefly(monkeypatch, rounds_timed):
    monkeypatch.setattr(estimate, "ROUGH_SECONDS", 0.0)
    (setup,) = [point.setup for point in Timing([MANY]).points.values()]
    found = estimate.cost([setup], estimate.work_of([setup]), 0.0)
    assert rounds_timed == [(1, 1)]
    assert found.speed.an_example > 0 and found.an_evaluation > 0
    monkeypatch.setattr(estimate, "ROUGH_SECONDS", math.inf)
    estimate.cost([setup], estimate.work_of([setup]), 0.0)
    assert rounds_timed == [(1, 1), (1, 1), (4, 4)]


def test_once_timing_has_taken_long_one_of_a_family_stands_for_the_others(monkeypatch):
    timed = []

    def slow(setups, *_):
        timed.append(setups[0].experiment)
        return always(float(len(timed)))

    monkeypatch.setattr(estimate, "cost", slow)
    points = {loss: replace(PLAIN, loss=loss) for loss in ("cross_entropy", "focal")}
    points["other"] = replace(PLAIN, model=Named("lenet5"))
    monkeypatch.setattr(estimate, "CPU_SECONDS", 0.0)
    told = []
    found = Timing(points.values()).sweeps([points], lambda *counts: told.append(counts))
    assert len(timed) == 2  # one of each model
    assert [one.seconds for one in found] == [20.0, 20.0, 40.0]
    assert told[0] == (0, 9) and told[-1] == (9, 9)


def test_workers_predict_shortened_parts_too():
    setup = Timing([replace(PLAIN, engine="processes")]).points.popitem()[1].setup
    few = setup.parts["test"].take(torch.arange(10))
    assert isinstance(setup.engine, Processes)
    engine = setup.engine.with_examples([few])
    assert engine.example_sets[-1] is few and engine.num_workers == setup.engine.num_workers
