"""The Ray cluster that this process uses: one that runs somewhere, or its own on this machine.

Ray is imported here and in `actor_group.py`, when it is asked for, and nowhere else.
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
from fedlens.process_state import is_alive

NEEDED = 'engine "ray" needs Ray: pip install "fedlens[ray]", or choose engine = "processes"'
ADDRESS = "RAY_ADDRESS"  # the variable that names a cluster
HOME = Path("/tmp")  # the path of a socket may have 107 bytes: a longer place would not do
PREFIX = "fedlens-ray-"  # of the folders of processes: a cluster of one's own, or an actor's files
STORE = 2**30  # bytes for models and uploads, besides the examples; what is not used takes no room
GPU_SECONDS = 300.0  # until a GPU of each node has said what it is
ANSWER = 10.0  # seconds for which a cluster may be silent
HEAD_SECONDS = 20.0  # for which a head may be gone: some are started again
HEAD_LOOK_SECONDS = 1.0
STARTS = 3  # of Ray on this machine: where all cores are busy, it gives up after 30 s

logger = logging.getLogger(__name__)

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else what raylets say of lost workers goes to stdout
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning about GPUs
}


def connect(num_bytes: int = 0) -> Any:
    """Ray, connected; the first call decides to which cluster.

    That is the cluster that RAY_ADDRESS names, or else one of this process's own, which ends with
    it, on all cores and GPUs of this machine. `num_bytes` is what the examples take.
    """
    address = os.environ.get(ADDRESS, "")
    if not address:  # all on 127.0.0.1, not on an address that others can reach
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
        except Exception as error:  # Ray has no class of its own for this
            ray.shutdown()
            if attempt == STARTS:
                why = f"Ray did not start on this machine: {first_line(error)}"
                raise ChildProcessError(why) from error
    return ray


def check() -> None:
    """Refuse at once, before files are written, what Ray cannot do or would try for long."""
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
    """End a cluster of one's own, or leave another."""
    _ray().shutdown()
    shutil.rmtree(own_folder(), ignore_errors=True)


def alive_nodes(ray: Any) -> dict[str, dict[str, float]]:
    """What each node that lives has in all (CPU, GPU, ...), by its id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def check_head(ray: Any) -> None:
    """Raise while somebody can be told: Ray ends this process a minute after its head is gone."""
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
    """Raise an OSError if nobody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()


def first_line(error: Exception) -> str:
    """What an error says first, or its class if it says nothing."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


class HeadLost(ChildProcessError):
    """Nothing more can be asked of the cluster."""


class Gpu(NamedTuple):
    name: str
    has_bf16: bool


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs of the cluster, as it is now."""
    if not os.environ.get(ADDRESS):  # that of this machine, which is not started for this
        return tuple(Gpu(name, all_have_bf16()) for name in gpu_names())
    ray = connect()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    counts = {n: int(has["GPU"]) for n, has in alive_nodes(ray).items() if has.get("GPU")}
    asked = [
        ray.remote(_gpu_here)
        .options(
            num_gpus=1,  # those of a node are alike, and others may be at work
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
    """`ray.init`, which would take SIGTERM for itself and print where it came."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(**options)
    if main:
        signal.signal(signal.SIGTERM, handler)


def _ray() -> Any:
    """Ray, which reads its settings as it is imported: so nothing may import it before this."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ValueError(NEEDED) from error
    return ray


def own_folder() -> Path:
    """Where this process may keep files while it lives."""
    return HOME / f"{PREFIX}{os.getpid()}"


def remove_stale() -> None:
    """Remove the folders of processes that were killed."""
    for place in HOME.glob(f"{PREFIX}*"):
        pid = place.name.removeprefix(PREFIX)
        with contextlib.suppress(OSError):
            if pid.isdigit() and not is_alive(int(pid)):
                shutil.rmtree(place, ignore_errors=True)
