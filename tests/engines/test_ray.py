"""Actors do what worker processes do, to the same bytes, also if some of them are lost."""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import fedlens as fl
from fedlens.algorithm import Algorithm
from fedlens.algorithm.pieces import Uniformly
from fedlens.algorithm.pieces.upload import difference
from fedlens.config.names import EngineName
from fedlens.core import Upload
from fedlens.engines import Processes, Ray, cluster, workers
from fedlens.engines.messages import arrays_of, pack, unpack
from fedlens.engines.ray import ActorInit, OnDisk
from fedlens.network.network import Network
from fedlens.rounds import State, begin, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Engine, Which
from tests.clusters import LONG, RAY_MARKS
from tests.federations import CPU, RAGGED, assert_equal, noisy_images, small_cnn
from tests.papers_under_test import ALGORITHMS, BASE
from tests.toys import toy

pytestmark = RAY_MARKS

FEDERATION = noisy_images(RAGGED)
NETWORK = Network(small_cnn("batch"), dtype=torch.float64)


@pytest.fixture(scope="module")
def engine(ray: None) -> Iterator[Ray]:
    """One for many tests, whose actors stay, unless a test needs their cores and closes it."""
    made = Ray(NETWORK, FEDERATION.examples)
    yield made
    made.close()


def after(engine: Engine, algorithm: Algorithm, rounds: int = 2) -> State:
    program = ClientProgram(algorithm, NETWORK.layout)
    state = begin(NETWORK, program, FEDERATION, CPU)
    for _ in range(rounds):
        state, _ = run_round(program, FEDERATION, engine, state, seed=0)
    return state


def assert_same(found: State, expected: State) -> None:
    """Byte for byte, all that a run remembers."""
    for part in ("params", "buffers"):
        assert_equal(getattr(found, part), getattr(expected, part))
    for mine, theirs in ((found.server, expected.server), (found.told, expected.told)):
        assert mine.keys() == theirs.keys()
        for name, tree in theirs.items():
            assert_equal(mine[name], tree)
    assert found.clients.rows.keys() == expected.clients.rows.keys()
    for client, memory in expected.clients.rows.items():
        for name, tree in memory.items():
            assert_equal(found.clients.rows[client][name], tree)


SHORT = ["fedavg", "fedprox without momentum", "scaffold", "median", "fedns", "fedbn"]
"""What each does differently: penalties, memory, what is told, uploads one by one, norms."""


@pytest.mark.parametrize("name", ALGORITHMS if LONG else SHORT)
def test_every_algorithm_ends_with_the_bytes_of_processes(engine, name):
    """Which agree with `sequential`: see test_engines.py."""
    forked = Processes(NETWORK, FEDERATION.examples, workers=2)
    try:
        expected = after(forked, ALGORITHMS[name])
    finally:
        forked.close()
    assert_same(after(engine, ALGORITHMS[name]), expected)


def test_larger_blocks_and_other_numbers_of_workers_change_no_byte(engine, monkeypatch):
    """Ten clients, which actors add up in blocks of different sizes, or one by one."""
    everyone = replace(BASE, select=Uniformly(10))
    forked = Processes(NETWORK, FEDERATION.examples, workers=3)
    try:
        expected = after(forked, everyone)
    finally:
        forked.close()
    for tasks in (8, 1):
        monkeypatch.setattr(workers, "TASKS", tasks)
        assert_same(after(engine, everyone), expected)
    engine.close()
    alone = engine.of_one_worker()
    try:
        assert_same(after(alone, everyone), expected)
        assert alone.num_workers == 1
    finally:
        alone.close()


def test_actors_with_devices_stack_their_blocks_as_processes_do(engine):
    engine.close()
    ends = []
    for kind in (Processes, Ray):
        made = kind(NETWORK, FEDERATION.examples, devices=[CPU] * 2, others=[FEDERATION.examples])
        try:
            state = after(made, BASE)
            model = state.params | state.buffers
            batches: list[Which] = [slice(0, 7), torch.tensor([5, 3, 250])]
            logits = list(made.predict(model, FEDERATION.examples, batches))
        finally:
            made.close()
        ends.append((state, logits))
    assert_same(ends[1][0], ends[0][0])
    assert all(map(torch.equal, ends[1][1], ends[0][1]))


def test_an_actor_trains_on_the_gpu_that_it_is_shown():
    """Which is its first: torch takes no GPU without a number for the current one."""
    made = Ray(NETWORK, FEDERATION.examples, devices=[torch.device("cuda", n) for n in range(2)])
    assert made.on_gpus
    assert made._device == torch.device("cuda", 0)


def one_actor(engine: Ray) -> int:
    """The process of an actor, any of them."""
    import ray

    pid: int = ray.get(
        random.choice(engine.workers).handle.__ray_call__.remote(lambda _: os.getpid())
    )
    return pid


def kill_one(engine: Ray, seconds: float) -> threading.Timer:
    """Kill an actor's process, so much later."""
    timer = threading.Timer(seconds, os.kill, (one_actor(engine), signal.SIGKILL))
    timer.start()
    return timer


def test_an_actor_killed_in_mid_round_changes_no_byte(engine):
    times = 10 if LONG else 1
    everyone = replace(BASE, select=Uniformly(10))
    whole = after(engine, everyone)
    begun = time.perf_counter()
    expected = after(engine, everyone)
    took = time.perf_counter() - begun
    assert_same(expected, whole)
    lost = engine.num_lost
    for _ in range(times):
        timer = kill_one(engine, random.uniform(0, took))
        assert_same(after(engine, everyone), expected)
        timer.join()
        after(engine, everyone, rounds=1)  # by which it has been noticed, and replaced
    assert engine.num_lost == lost + times


@dataclass(frozen=True)
class Raises:
    """upload: a client that fails."""

    def __call__(self, local) -> Upload:
        raise ArithmeticError("in its own words")


def test_what_goes_wrong_in_an_actor_is_told(engine):
    with pytest.raises(ValueError, match="ArithmeticError"):
        after(engine, replace(BASE, upload=Raises()))


@dataclass(frozen=True)
class DiesInItsTask:
    """upload: a client over which its worker is killed."""

    def __call__(self, local) -> Upload:
        os.kill(os.getpid(), signal.SIGKILL)
        return difference(local)


@pytest.mark.skipif(not LONG, reason="takes longer: make test-ray")
def test_clients_that_kill_their_worker_are_not_tried_for_ever(engine):
    with pytest.raises(ChildProcessError, match="lost 3 times"):
        after(engine, replace(BASE, upload=DiesInItsTask()))


def test_images_are_sent_once_or_opened_where_they_are():
    """Three sets: two share their images, and those of the third are on every disk."""
    images, held = FEDERATION.examples, noisy_images([5], seed=1).examples
    some = images.take(torch.tensor([7, 3]))
    on_disk = OnDisk([held.images], lambda: [held.images.clone()])
    init = ActorInit.of(NETWORK, [images, some, held], on_disk)
    sent = len(pickle.dumps(init.examples))
    assert images.images.nbytes < sent < images.images.nbytes + 10_000
    found = init.open_examples()
    assert found[1].images is found[0].images
    for mine, theirs in zip(found, (images, some, held), strict=True):
        assert torch.equal(mine.read(slice(0, 2)), theirs.read(slice(0, 2)))
        assert torch.equal(mine.labels, theirs.labels)
    other = init._replace(open_images=lambda: [held.images[:3]])
    with pytest.raises(ValueError, match="copy the data folder there"):
        other.open_examples()


EXPERIMENT = fl.Experiment(
    dataset=toy(),
    model=fl.Named("linear"),
    rounds=4,
    device="cpu",
    clients=fl.Clients(count=6, per_round=4),
    algorithm=fl.Named("scaffold"),
)


def test_workers_that_were_lost_are_in_the_record(engine, tmp_path, monkeypatch):
    engine.close()
    start, made = Ray.start, []

    def seen(self: Ray, *args: Any) -> None:
        made.append(self)
        start(self, *args)

    def kill(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            os.kill(one_actor(made[-1]), signal.SIGKILL)

    monkeypatch.setattr(Ray, "start", seen)
    killed = fl.run(replace(EXPERIMENT, engine="ray"), tmp_path / "run", watch=kill)
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line).get("workers_lost", 0) for line in lines] == [0, 0, 1, 0]
    assert_equal(killed.model, fl.run(replace(EXPERIMENT, engine="processes")).model)


def test_a_run_begun_on_ray_goes_on_without_it_and_the_other_way_round(engine, tmp_path):
    engine.close()
    experiment, model = EXPERIMENT, "model.safetensors"
    whole = fl.run(replace(experiment, engine="processes"), tmp_path / "whole")
    ways: list[tuple[EngineName, EngineName]] = [("ray", "processes"), ("processes", "ray")]
    for first, then in ways if LONG else ways[:1]:

        def stop(record: dict[str, object]) -> None:
            if record["round"] == 2:
                raise KeyboardInterrupt

        begun, out = replace(experiment, engine=first), tmp_path / first
        with pytest.raises(KeyboardInterrupt):
            fl.run(begun, out, watch=stop)
        done = fl.resume(out, experiment=begun, engine=then)
        assert done.summary["rounds"] == 4
        assert (out / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()
    with pytest.raises(ValueError, match="stacked"):
        fl.resume(tmp_path / "ray", experiment=replace(begun, engine="ray"), engine="stacked")
    assert whole.status == "finished"


def test_without_ray_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    made = Ray(NETWORK, FEDERATION.examples)
    with pytest.raises(ValueError, match=r'engine "ray" needs Ray: pip install "fedlens\[ray\]"'):
        after(made, BASE)


def test_ray_is_told_to_be_quiet_before_it_is_imported(monkeypatch):
    """It reads what it may print once; also where a cluster is asked for its GPUs first."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for name in cluster.QUIET:
        monkeypatch.delenv(name, raising=False)
    cluster.gpus.cache_clear()  # another test may have asked before
    with pytest.raises(ValueError, match='engine "ray" needs Ray'):
        cluster.gpus()
    assert cluster.QUIET.items() <= os.environ.items()


def test_folders_of_clusters_whose_process_was_killed_are_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "HOME", tmp_path)
    alive, dead = tmp_path / f"fedlens-ray-{os.getpid()}", tmp_path / "fedlens-ray-999999999"
    for place in (alive, dead):
        (place / "session").mkdir(parents=True)
    cluster.remove_stale()
    assert list(tmp_path.iterdir()) == [alive]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_cross_as_they_lie_in_memory(dtype):
    plain = torch.arange(120).reshape(2, 3, 4, 5).to(dtype)
    there = {
        "plain": plain,
        "channels last": plain.to(memory_format=torch.channels_last),
        "a column": plain[:, 1],
        "one number": plain[0, 0, 0, 1],
        "none": plain[:0],
    }
    here = unpack(pack((there, "more")))
    assert here[1] == "more"
    for name, tensor in there.items():
        assert torch.equal(here[0][name], tensor), name
        assert here[0][name].dtype is dtype
    assert here[0]["channels last"].stride() == there["channels last"].stride()
    (alone,) = arrays_of(pack(plain[:, 1].repeat(2000, 1, 1)))
    assert alone.nbytes == 2000 * plain[:, 1].nbytes, "nothing but its own numbers"


def test_import_needs_no_ray():
    code = "import sys, fedlens, fedlens.setup; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
