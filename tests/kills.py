"""Work that is killed at random moments, begun again, and must come to the same."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

Work = Callable[[Path], object]


class Job(NamedTuple):
    """Work in a folder: called again, it goes on where it was; and what it came to."""

    work: Work
    outcome: Callable[[Path], Any]


def started(work: Work, folder: Path) -> int:
    """A process group of its own that does the work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child:
        with suppress(OSError):  # the child does it, too: whoever is first
            os.setpgid(child, child)
        return child
    try:
        os.setpgid(0, 0)
        work(folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(1)


def done(child: int, seconds: float = math.inf) -> float | None:
    """How long a process took; None if it took longer than that and was killed."""
    begun = time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        passed = time.monotonic() - begun
        if ended:
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed, see above"
            return None if os.WIFSIGNALED(status) else passed
        if passed > seconds:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)


def survives(job: Job, place: Path, seed: int, num_kills: int) -> None:
    """See that a job comes to the same after kills, some of them of what went on after one."""
    rng = random.Random(seed)
    whole, again = place / "whole", place / "again"
    job.work(whole)  # here: what it imports, children need not import again
    took = done(started(job.work, again))
    assert took is not None
    expected = job.outcome(whole)
    assert job.outcome(again) == expected
    kills = number = 0
    while kills < num_kills:
        folder = place / str(number)
        number += 1
        assert number < 20 * num_kills + 20, "it is over before it can be killed"
        for _ in range(rng.choice([1, 1, 2, 3])):
            passed = done(started(job.work, folder), rng.uniform(0, took))
            if passed is not None:
                took = min(took, passed)  # the machine was busy when it was measured
                break
            kills += 1
        assert done(started(job.work, folder)) is not None
        assert job.outcome(folder) == expected, f"after {kills} kills, seed {seed}"
        assert leftovers(folder) == []


def leftovers(folder: Path) -> list[Path]:
    """What nobody needs any more when the work is done."""
    beside = folder.parent.glob(f".{folder.name}*")
    return [*beside, *folder.rglob("*.part"), *folder.rglob(".*.new"), *folder.rglob(".lock")]
