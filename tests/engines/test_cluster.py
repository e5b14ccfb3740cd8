"""Mistakes with a Ray cluster, told at once and before a file is written; Ray need not be there."""

import socket
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from fedlens.engines import cluster
from fedlens.fleet.flower import free_port

EXPERIMENT = """\
dataset = "fashion-mnist-mini"
model = "linear"
rounds = 1
engine = "ray"
device = "cpu"
"""


@pytest.fixture
def installed(monkeypatch):
    """Ray, as far as it is asked before a cluster is there."""
    ray = ModuleType("ray")
    ray.__spec__ = ModuleSpec("ray", None)
    ray.is_initialized = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("address", ["ray://somewhere:10001", "10.0.0.1", ":6379", "somewhere:"])
def test_an_address_needs_a_host_and_a_port(address, monkeypatch):
    monkeypatch.setenv(cluster.ADDRESS, address)
    with pytest.raises(ValueError, match="HOST"):
        cluster.check()


@pytest.mark.usefixtures("installed")
def test_a_cluster_that_is_not_there_is_told_at_once(monkeypatch):
    """Ray itself would try for many minutes."""
    monkeypatch.setenv(cluster.ADDRESS, f"127.0.0.1:{free_port()}")
    with pytest.raises(ValueError, match=r"no Ray cluster at .* start one with `ray start --head`"):
        cluster.connect()


def test_without_ray_no_run_folder_is_begun(fedlens, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    done = fedlens("run", path, "--out", tmp_path / "run")
    assert done.status == 2
    assert 'needs Ray: pip install "fedlens[ray]"' in done.err
    assert not (tmp_path / "run").exists()


class AtAddress:
    """In the place of Ray, connected to a head at an address."""

    def __init__(self, address: str) -> None:
        self.gcs_address = address

    def get_runtime_context(self) -> "AtAddress":
        return self


def test_a_head_that_is_gone_is_waited_for_and_then_told_with_the_remedy(monkeypatch, caplog):
    monkeypatch.setattr(cluster, "HEAD_LOOK_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        cluster.check_head(AtAddress(address))
    assert caplog.messages == []
    monkeypatch.setattr(cluster, "HEAD_SECONDS", 0.01)
    with pytest.raises(cluster.HeadLost, match=r"is gone: start it again, and go on from the last"):
        cluster.check_head(AtAddress(address))
    assert caplog.messages == [f"the head of the Ray cluster at {address} is gone: waiting for it"]
