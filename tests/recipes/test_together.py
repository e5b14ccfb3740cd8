"""Several tables and figures at once: equal experiments are run once, all of them as one sweep."""

import json
from typing import Any

import pytest

from fedlens.recipes import reproduce as module
from fedlens.recipes.reproduce import Together, plan_all, reproduce, show
from fedlens.runs.sweep import prepare
from fedlens.storage.locks import is_locked, one_writer
from fedlens.storage.run_files import read_status

ITEMS = ["ghaemi/fedavg", "ghaemi/fedadmm"]
SHARED = {
    "iid-logits": "fedavg-iid",
    "non-iid-logits": "fedavg-non-iid",
    "iid-double-softmax": "fedavg-double-softmax-iid",
    "non-iid-double-softmax": "fedavg-double-softmax-non-iid",
}
NUM_RUNS = 5 + 9 - len(SHARED)  # the experiments of each, without those that are the same
NUM_ROUNDS = 2 * NUM_RUNS


pytestmark = pytest.mark.usefixtures("nothing_of_whoever_runs_the_tests")


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """The models of both items, each run by itself where it finds nothing of the other."""
    root = tmp_path_factory.mktemp("apart")
    for item in ITEMS:
        Together(plan_all([item], "smoke", root / item / "alone")).run()
    return {item: models(root / item / "alone") for item in ITEMS}


def models(out):
    return {path.parent.name: path.read_bytes() for path in out.glob("runs/*/model.safetensors")}


def place(root, item, name):
    return root / f"{item}-smoke" / "runs" / name


def is_same(root, file="model.safetensors"):
    """Whether both items have the very files of the runs that they share."""
    return all(
        (place(root, ITEMS[0], one) / file).samefile(place(root, ITEMS[1], two) / file)
        for one, two in SHARED.items()
    )


def run(root, items=ITEMS, stop_after=None, **options):
    """How many rounds were done in all, as a watch is told round by round."""
    seen: list[int] = []

    def watch(record):
        seen.append(record["done"])
        assert record["total"] == NUM_ROUNDS or len(items) == 1
        if len(seen) == stop_after:
            raise Stopped

    planned = plan_all(items, "smoke", root, **options)
    if stop_after is None:
        Together(planned).run(watch)
    else:
        with pytest.raises(Stopped):
            Together(planned).run(watch)
    return seen


def test_what_two_items_share_is_run_once_and_all_comes_to_what_it_would_alone(tmp_path, apart):
    assert run(tmp_path) == list(range(1, NUM_ROUNDS + 1))
    assert {item: models(tmp_path / f"{item}-smoke") for item in ITEMS} == apart
    assert is_same(tmp_path) and is_same(tmp_path, "rounds.jsonl")
    assert run(tmp_path) == []
    pages = [show(one).page for one in plan_all(ITEMS, "smoke", tmp_path)]
    assert pages == [tmp_path / f"{item}-smoke" / "report.html" for item in ITEMS]


@pytest.mark.parametrize("stop_after", [1, 3, 4, 11])
def test_what_was_interrupted_goes_on(stop_after, tmp_path, apart):
    before = run(tmp_path, stop_after=stop_after)
    assert before + run(tmp_path) == list(range(1, NUM_ROUNDS + 1))
    assert {item: models(tmp_path / f"{item}-smoke") for item in ITEMS} == apart
    assert is_same(tmp_path)


def test_a_run_that_one_item_has_begun_is_gone_on_with_for_both(tmp_path, apart):
    alone = tmp_path / f"{ITEMS[1]}-smoke"
    run(alone, ITEMS[1:], stop_after=1)
    assert read_status(alone / "runs" / "fedavg-iid") is not None
    assert run(tmp_path) == list(range(2, NUM_ROUNDS + 1))
    assert {item: models(tmp_path / f"{item}-smoke") for item in ITEMS} == apart
    assert is_same(tmp_path)


def test_of_a_run_that_both_have_begun_the_one_that_is_further_goes_on(tmp_path, apart):
    for item, name, rounds in ((ITEMS[0], "iid, logits", 2), (ITEMS[1], "FedAvg, iid", 3)):
        options = {"overrides": ["rounds=4"], "only": [name]}
        run(tmp_path / f"{item}-smoke", [item], stop_after=rounds, **options)
    planned = plan_all(ITEMS, "smoke", tmp_path, overrides=["rounds=4"])
    runs = Together(planned)
    assert (runs.rounds_done, runs.rounds) == (3, 2 * NUM_ROUNDS)
    assert place(tmp_path, ITEMS[1], "fedavg-iid") in runs.left
    assert len(runs.left) == runs.count == NUM_RUNS
    runs.run()
    assert is_same(tmp_path)


def test_a_run_of_another_version_is_kept_but_not_shared(tmp_path):
    first, second = plan_all(ITEMS, "smoke", tmp_path, only=["iid, logits", "FedAvg, iid"])
    Together([first]).run()
    manifest = place(tmp_path, ITEMS[0], "iid-logits") / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"fedlens": "0.0.1"}))
    runs = Together([first, second])
    assert (runs.count, runs.rounds_done, runs.rounds) == (2, 2, 4)
    runs.run()
    shared = place(tmp_path, ITEMS[1], "fedavg-iid")
    assert not (shared / "manifest.json").samefile(manifest)
    assert read_status(shared) == "finished"


def test_what_an_item_beside_has_done_is_not_left_to_do(tmp_path):
    first, second = ITEMS
    Together(plan_all([first], "smoke", tmp_path / "first")).run()
    runs = Together(plan_all([second], "smoke", tmp_path / "second"))
    assert {place.name for place in runs.left}.isdisjoint(SHARED.values())
    assert len(runs.left) == runs.count - len(SHARED)
    assert runs.rounds_done == runs.rounds - sum(one.rounds for one in runs.left.values())


def test_a_stage_has_runs_of_several_items_and_no_more_than_are_made_ready(tmp_path, monkeypatch):
    made = []

    def seen(points, *about, **options):
        made.append(list(points))
        return prepare(points, *about, **options)

    monkeypatch.setattr(module, "prepare", seen)
    monkeypatch.setattr(module, "AT_ONCE", 6)
    stages = [len(stage) for stage in Together(plan_all(ITEMS, "smoke", tmp_path)).stages]
    run(tmp_path)
    assert [len(names) for names in made] == stages == [6, 4]
    assert made[0][4:] == ["ghaemi/fedavg/non-iid-logits-lr-0.05", "ghaemi/fedadmm/fedadmm-iid"]


def test_runs_of_several_items_train_in_one_stack(tmp_path, monkeypatch):
    stacks: list[list[str]] = []

    def seen(*about, **options):
        made = prepare(*about, **options)
        stacks.extend([point.name for point in stack] for stack in made.stacks)
        return made

    monkeypatch.setattr(module, "prepare", seen)
    items = ["fedavg-cifar10/figure12", "fedavg-cifar10/figure14"]
    overrides, only = ["engine=stacked", "device=cpu"], ["FedAvg", "FedAvg, 1 a round"]
    planned = plan_all(items, "smoke", tmp_path, overrides=overrides, only=only)
    Together(planned).run()
    assert stacks == [[f"{items[1]}/fedavg-1-a-round", f"{items[0]}/fedavg"]]
    assert [one.left for one in planned] == [{}, {}]


def test_what_starts_from_another_run_comes_after_it_in_every_item(tmp_path):
    planned = plan_all(["hsu2020/table5", "hsu2020/figure9"], "smoke", tmp_path)
    runs = Together(planned)
    starts = {cell.weights for cell in runs.cells.values() if cell.weights}
    assert len(starts) == 2, "each item has the model that others start from in its own folder"
    assert not any(cell.weights for cell in next(runs.stages).values())
    runs.run()
    assert all(read_status(place) == "finished" for place in runs.cells)


def test_all_folders_are_locked_while_they_are_written(tmp_path):
    planned = plan_all(ITEMS, "smoke", tmp_path)
    locked = []

    def look(_):
        locked.append([is_locked(one.out) for one in planned])
        raise Stopped

    with pytest.raises(Stopped):
        Together(planned).run(look)
    assert locked == [[True, True]]
    assert not any(is_locked(one.out) for one in planned)
    with (
        one_writer(planned[0].out),
        pytest.raises(ValueError, match="being written"),
    ):
        Together(planned).run()


def test_no_lock_is_left_of_a_process_that_was_killed_when_an_item_was_done(tmp_path):
    planned = plan_all(ITEMS, "smoke", tmp_path)
    Together(planned[:1]).run()
    done = place(tmp_path, ITEMS[0], "iid-logits")
    for folder in (done, done.parent):
        (folder / ".lock").touch()
    Together(planned).run()
    assert [*tmp_path.rglob(".lock")] == []


def test_each_item_has_a_folder_of_its_own_and_counts_once(tmp_path):
    items = ["fedns/table1", "hsu2020/table1", "fedns/table1"]
    planned = plan_all(items, "smoke", tmp_path)
    assert [one.out for one in planned] == [
        tmp_path / "fedns" / "table1-smoke",
        tmp_path / "hsu2020" / "table1-smoke",
    ]
    assert [str(one.out) for one in plan_all(items, "smoke")] == [
        "reproductions/fedns/table1-smoke",
        "reproductions/hsu2020/table1-smoke",
    ]
    (one,) = plan_all(["fedns/table1", "fedns/table1"], "smoke", tmp_path)
    assert one.out == tmp_path


def test_patterns_choose_among_the_experiments_of_all_items(tmp_path):
    planned = plan_all(ITEMS, "smoke", tmp_path, only=["iid, *", "FedADMM, *"])
    assert [len(one.left) for one in planned] == [2, 5]
    (one,) = plan_all(ITEMS, "smoke", tmp_path, only=["FedADMM, iid"])
    assert one.name == ITEMS[1], "the other has no such experiment"
    assert one.out == tmp_path / f"{ITEMS[1]}-smoke"
    with pytest.raises(ValueError, match="'x'"):
        plan_all(ITEMS, "smoke", tmp_path, only=["iid, *", "x"])


def test_a_mistake_in_one_item_costs_no_run_of_another(tmp_path):
    reproduce(ITEMS[0], "smoke", tmp_path / f"{ITEMS[0]}-smoke", only=["iid, logits"])
    mistakes: dict[str, tuple[list[str], Any]] = {
        "unknown recipe 'ghaemi/fedadm'": ([ITEMS[0], "ghaemi/fedadm"], "smoke"),
        "fedlens data get fashion-mnist": (ITEMS, "paper"),
        "no table or figure is named": ([], "smoke"),
    }
    for words, (items, scale) in mistakes.items():
        with pytest.raises(ValueError, match=words):
            plan_all(items, scale, tmp_path, overwrite=True)
    assert read_status(place(tmp_path, ITEMS[0], "iid-logits")) == "finished"
    plan_all(ITEMS, "smoke", tmp_path, overwrite=True)
    assert not place(tmp_path, ITEMS[0], "iid-logits").exists()


def test_what_is_left_counts_down_to_nothing(tmp_path, monkeypatch):
    """Also where a stage at a time is made ready."""
    monkeypatch.setattr(module, "AT_ONCE", 3)
    runs = Together(plan_all(ITEMS, "smoke", tmp_path))
    seen: list[dict[str, Any]] = []
    total = runs.rounds
    runs.run(seen.append)
    left = [record["left"] for record in seen]
    assert len(left) == total and 0 < left[0] < total
    assert left == sorted(left, reverse=True) and left[-1] == pytest.approx(0.0)
