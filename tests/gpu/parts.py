"""All that `make test-gpu` runs: scripts of this folder and the kernels, in parts side by side.

    PYTHONPATH=src:. python -m tests.gpu.parts

Plain Python with torch. What a process printed is printed when it ends, under its name. The last
line says what failed; then the status is 1.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")

PART = "FEDLENS_PART"  # "2/5": the second of five processes
SCRIPTS = {  # with the number of processes that share it; what takes longest starts first
    "tests.gpu.models": 4,
    "tests.gpu.engines_agree": 5,
    "tests.network.interpreted_kernels": 3,
    "tests.gpu.recipes": 2,
    "tests.gpu.several": 1,
    "tests.gpu.evaluations": 1,
    "tests.gpu.client_memory": 1,
}
LIMIT = 900  # seconds after which a process has failed


def my_part(items: Sequence[T]) -> Sequence[T]:
    """Those of the items that this process is to take: all, if it is not one of several."""
    number, count = map(int, os.environ.get(PART, "1/1").split("/"))
    return items[number - 1 :: count]


def commands(scripts: Mapping[str, int]) -> dict[str, list[str]]:
    return {
        f"{script} {number}/{count}": [sys.executable, "-m", script]
        for script, count in scripts.items()
        for number in range(1, count + 1)
    }


def run(name: str, command: Sequence[str]) -> tuple[int, str, float]:
    """The status of a command, what it printed, and its seconds."""
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", **os.environ}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            env={**environment, PART: name.split()[-1]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        status, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, said = 1, f"{(error.output or b'').decode()}not done after {LIMIT} s\n"
    return status, said, time.perf_counter() - began


def side_by_side(commands: Mapping[str, Sequence[str]], at_once: int) -> int:
    """Run commands, at most `at_once` at a time; the number of those that failed."""
    began, failed = time.perf_counter(), []
    with ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(run, *each): each[0] for each in commands.items()}
        for one in as_completed(running):
            name, (status, said, seconds) = running[one], one.result()
            ended = "passed" if status == 0 else f"failed with status {status}"
            print(f"## {name}: {ended}, {seconds:.0f} s\n{said}", flush=True)
            failed += [name] if status else []
    outcome = f"failed: {', '.join(failed)}" if failed else "all passed"
    print(f"{len(commands)} processes, {time.perf_counter() - began:.0f} s; {outcome}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(side_by_side(commands(SCRIPTS), os.cpu_count() or 1) > 0)
