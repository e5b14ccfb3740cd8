"""Nodes that are lost and nodes that join, and what a driver that is stopped leaves behind."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedlens as fl
from fedlens.algorithm.pieces import Uniformly
from fedlens.engines import Processes, Ray, cluster
from fedlens.runs import spread
from fedlens.storage.run_files import MODEL, read_summary
from tests.clusters import LONG, RAY_MARKS
from tests.command_line import EXPERIMENT
from tests.engines.test_ray import FEDERATION, NETWORK, after, assert_same
from tests.federations import CPU
from tests.papers_under_test import BASE
from tests.runs.sweeps import base, records

pytestmark = [
    pytest.mark.skipif(not LONG, reason="takes longer: make test-ray"),
    *RAY_MARKS,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

SMALL = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
EVERYONE = replace(BASE, select=Uniformly(10))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of one node, to which others can be added."""
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    for name, value in cluster.QUIET.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    cluster.disconnect()
    found = Cluster(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    cluster.connect()
    yield found
    cluster.disconnect()
    found.shutdown()


def joined(engine: Ray, count: int) -> None:
    """Rounds, until so many workers take part."""
    begun = time.perf_counter()
    while engine.num_workers < count:
        assert time.perf_counter() - begun < 600
        after(engine, EVERYONE, rounds=1)
        time.sleep(0.2)


def test_a_node_lost_in_mid_round_changes_no_byte_and_one_that_joins_is_used(nodes):
    engine = Ray(NETWORK, FEDERATION.examples)
    try:
        expected = after(engine, EVERYONE, rounds=4)
        assert engine.num_workers == 1
        for times in range(10):
            other = nodes.add_node(**SMALL)
            joined(engine, 2)
            begun = time.perf_counter()
            assert_same(after(engine, EVERYONE, rounds=4), expected)
            took = time.perf_counter() - begun
            lost = threading.Timer(
                random.uniform(0, took), nodes.remove_node, (other,), {"allow_graceful": False}
            )
            lost.start()
            assert_same(after(engine, EVERYONE, rounds=4), expected)
            lost.join()
            after(engine, EVERYONE, rounds=2)  # by which it has been noticed
            assert engine.num_lost == times + 1
            assert engine.num_workers == 1
    finally:
        engine.close()


def test_actors_on_gpus_have_one_each_and_the_bytes_of_processes(nodes):
    """GPUs that Ray is told of, and that are cores: who gets which is Ray's own doing."""
    import ray

    nodes.add_node(**SMALL, num_gpus=2)
    forked = Processes(NETWORK, FEDERATION.examples, devices=[CPU] * 2)
    engine = Ray(NETWORK, FEDERATION.examples, devices=[CPU] * 2)
    engine.on_gpus = True
    try:
        assert_same(after(engine, EVERYONE), after(forked, EVERYONE))
        shown = [
            one.handle.__ray_call__.remote(lambda _: os.environ["CUDA_VISIBLE_DEVICES"])
            for one in engine.workers
        ]
        assert sorted(ray.get(shown)) == ["0", "1"]
    finally:
        engine.close()
        forked.close()


def test_points_of_a_sweep_are_stacked_on_gpus(nodes, tmp_path, monkeypatch):
    nodes.add_node(**SMALL, num_gpus=2)
    monkeypatch.setattr(spread.SpreadPoints, "on_gpus", True)
    monkeypatch.setattr(spread, "ON_GPU", ("cpu", True))
    for engine in ("ray", "stacked"):
        fl.sweep(fl.grid(base(engine=engine, device="cpu"), {}, seeds=4), tmp_path / engine)
    padded = [f"seed={seed}" for seed in range(4)]
    padded = [name for name in padded if "padding_share" in read_summary(tmp_path / "ray" / name)]
    assert padded == ["seed=0", "seed=2"], "the first of each stack says what all were padded"
    for seed in range(4):
        there, here = (tmp_path / engine / f"seed={seed}" for engine in ("ray", "stacked"))
        assert records(there) == records(here)
        assert (there / MODEL).read_bytes() == (here / MODEL).read_bytes()


def started_by(pid: int) -> list[int]:
    """The processes of a session besides its first, if they are not dead yet."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (place / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == pid != int(place.name) and state != "Z":
                found.append(int(place.name))
    return found


@pytest.mark.parametrize(
    "sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda sign: sign.name
)
def test_nothing_is_left_of_a_driver_that_is_stopped(tmp_path, sign, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "a.toml").write_text(EXPERIMENT)
    command = [sys.executable, "-m", "fedlens", "run", "a.toml", "rounds=100000", "engine=ray"]
    with subprocess.Popen(
        [*command, "device=cpu", "--out", "run", "-q"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            records = tmp_path / "run" / "rounds.jsonl"
            wait_for(lambda: records.is_file() and records.stat().st_size > 0)
            time.sleep(random.uniform(0, 1))
            assert len(started_by(run.pid)) > 5, "those of Ray"
            if sign is signal.SIGINT:
                os.killpg(run.pid, sign)  # as a terminal does
            else:
                run.send_signal(sign)
            out, err = run.communicate(timeout=600)
        finally:
            run.kill()
    assert run.returncode == (-signal.SIGKILL if sign is signal.SIGKILL else 130)
    assert out == ""
    told = [] if sign is signal.SIGKILL else ["fedlens: stopped; go on with: fedlens resume run"]
    # Python itself says what it cleans up after a process that was killed.
    own = ("multiprocessing/resource_tracker.py", "warnings.warn(")
    assert [one for one in err.splitlines() if one and not any(o in one for o in own)] == told
    wait_for(lambda: not started_by(run.pid))  # some look only now and then who lives
    cluster.remove_stale()
    assert not (cluster.HOME / f"{cluster.PREFIX}{run.pid}").exists()


def wait_for(condition: Callable[[], bool], seconds: float = 600.0) -> None:
    begun = time.perf_counter()
    while not condition():
        assert time.perf_counter() - begun < seconds
        time.sleep(0.1)
