"""The Ray cluster that this process uses: an existing one, or its own on this machine.

Ray is imported only here and in `ray.py`, when it is needed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import shutil
import signal
import socket
import threading
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedlens.engines.gpus import all_have_bf16, gpu_names, has_bf16
from fedlens.storage.process_state import is_alive

NEEDED = 'engine "ray" needs Ray: pip install "fedlens[ray]", or choose engine = "processes"'
ADDRESS = "RAY_ADDRESS"  # environment variable with the address of a cluster
HOME = Path("/tmp")  # short: the path of a Unix socket has at most 107 bytes
PREFIX = "fedlens-ray-"  # of the folder of a process: for its own cluster, or the files of an actor
STORE = 2**30  # bytes for models and uploads, besides the examples; unused memory takes no room
GPU_SECONDS = 300.0  # timeout for queries to one GPU of each node
ANSWER = 10.0  # timeout in seconds for a connection to the cluster
HEAD_SECONDS = 20.0  # that a head node may be unreachable: some are restarted
HEAD_LOOK_SECONDS = 1.0
STARTS = 3  # attempts to start Ray here: where all cores are busy, it gives up after 30 s

logger = logging.getLogger(__name__)

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else raylets report lost workers on stdout
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning about GPUs
}


def connect(num_bytes: int = 0) -> Any:
    """Connect to a Ray cluster and return the module `ray`; the first call chooses the cluster.

    It is the cluster at RAY_ADDRESS, or else one that this process starts on all cores and GPUs of
    this machine, and that ends with it. `num_bytes` is the size of the examples.
    """
    address = os.environ.get(ADDRESS, "")
    if not address:  # use 127.0.0.1, which other machines cannot reach
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    ray = _ray()
    if ray.is_initialized():
        return ray
    check()
    silence = {"log_to_driver": False, "logging_level": "ERROR"}
    if address:
        try:
            _init(ray, address=address, **silence)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _no_cluster(address, first_line(error)) from error
        atexit.register(ray.shutdown)
        return ray
    remove_stale()
    place = own_folder()
    atexit.register(disconnect)
    room = shutil.disk_usage("/dev/shm").free * 3 // 4 if Path("/dev/shm").exists() else STORE
    own = partial(
        _init,
        ray,
        address="local",
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        include_dashboard=False,
        object_store_memory=max(min(2 * num_bytes + STORE, room), 80 * 2**20),
        _temp_dir=str(place),
        **silence,
    )
    for attempt in range(1, STARTS + 1):
        try:
            own()
            break
        except Exception as error:  # Ray has no exception class for this
            ray.shutdown()
            if attempt == STARTS:
                why = f"Ray did not start on this machine: {first_line(error)}"
                raise ChildProcessError(why) from error
    return ray


def check() -> None:
    """Raise an error early, before files are written, if Ray would fail or retry for long."""
    address = os.environ.get(ADDRESS, "")
    host, _, port = address.rpartition(":")
    if address not in ("", "auto", "local") and ("://" in host or not host or not port.isdecimal()):
        raise ValueError(
            f"the Ray address is {address!r}: give HOST:PORT or auto, on a node of the cluster"
        )
    if find_spec("ray") is None:
        raise ValueError(NEEDED)
    if host:
        try:
            _reach(address)
        except OSError as error:
            raise _no_cluster(address, error.strerror or "it is silent") from error


def _no_cluster(address: str, reason: str) -> ValueError:
    return ValueError(
        f"no Ray cluster at {address} ({reason}): start one with `ray start --head`, or leave the "
        "address out"
    )


def disconnect() -> None:
    """Shut down this process's own cluster, or disconnect from another one."""
    _ray().shutdown()
    shutil.rmtree(own_folder(), ignore_errors=True)


def alive_nodes(ray: Any) -> dict[str, dict[str, float]]:
    """The total resources (CPU, GPU, ...) of each live node, by its id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def check_head(ray: Any) -> None:
    """Raise an error if the head node is lost: a minute later Ray would end this process."""
    address = ray.get_runtime_context().gcs_address
    until, has_said = time.monotonic() + HEAD_SECONDS, False
    while True:
        try:
            _reach(address)
            return
        except OSError as error:
            if not has_said:
                has_said = True
                logger.warning("the head of the Ray cluster at %s is gone: waiting for it", address)
            if time.monotonic() > until:
                raise HeadLost(
                    f"the head of the Ray cluster at {address} is gone: start it again, and go on "
                    "from the last checkpoint"
                ) from error
        time.sleep(HEAD_LOOK_SECONDS)


def _reach(address: str) -> None:
    """Raise an OSError if no server listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its class if the message is empty."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


class HeadLost(ChildProcessError):
    """The head node is lost, so that the cluster cannot be used any more."""


class Gpu(NamedTuple):
    name: str
    has_bf16: bool


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs of the cluster, as it is now."""
    if not os.environ.get(ADDRESS):  # this machine's GPUs: no cluster is started for this
        return tuple(Gpu(name, all_have_bf16()) for name in gpu_names())
    ray = connect()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    counts = {n: int(has["GPU"]) for n, has in alive_nodes(ray).items() if has.get("GPU")}
    asked = [
        ray.remote(_gpu_here)
        .options(
            num_gpus=1,  # the GPUs of a node are alike, and others may be busy
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote()
        for node in counts
    ]
    try:
        found = ray.get(asked, timeout=GPU_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        raise ValueError(
            f"no GPU of a node of the Ray cluster was free within {GPU_SECONDS:.0f} s: wait for "
            'others, or choose device = "cpu"'
        ) from error
    return tuple(
        gpu for gpu, count in zip(found, counts.values(), strict=True) for _ in range(count)
    )


def _gpu_here() -> Gpu:
    return Gpu(torch.cuda.get_device_name(0), has_bf16(torch.device("cuda", 0)))


def _init(ray: Any, **options: Any) -> None:
    """Call `ray.init` and restore the handler of SIGTERM: Ray's own prints where it arrived."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(**options)
    if main:
        signal.signal(signal.SIGTERM, handler)


def _ray() -> Any:
    """Import Ray. It reads its settings at import, so it must not be imported before this."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ValueError(NEEDED) from error
    return ray


def own_folder() -> Path:
    """The folder for files of this process while it runs."""
    return HOME / f"{PREFIX}{os.getpid()}"


def remove_stale() -> None:
    """Remove the folders of processes that were killed."""
    for place in HOME.glob(f"{PREFIX}*"):
        pid = place.name.removeprefix(PREFIX)
        with contextlib.suppress(OSError):
            if pid.isdigit() and not is_alive(int(pid)):
                shutil.rmtree(place, ignore_errors=True)
