"""Work that is killed at random moments, begun again, and must come to the same."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.children import forked

Work = Callable[[Path], object]


class Job(NamedTuple):
    """Work in a folder: called again, it goes on where it was; and what it came to."""

    work: Work
    outcome: Callable[[Path], Any]


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
    took = done(forked(partial(job.work, again)))
    assert took is not None
    expected = job.outcome(whole)
    assert job.outcome(again) == expected
    kills = number = 0
    while kills < num_kills:
        folder = place / str(number)
        number += 1
        assert number < 20 * num_kills + 20, "it is over before it can be killed"
        for _ in range(rng.choice([1, 1, 2, 3])):
            passed = done(forked(partial(job.work, folder)), rng.uniform(0, took))
            if passed is not None:
                took = min(took, passed)  # the machine was busy when it was measured
                break
            kills += 1
        assert done(forked(partial(job.work, folder))) is not None
        assert job.outcome(folder) == expected, f"after {kills} kills, seed {seed}"
        assert leftovers(folder) == []


def leftovers(folder: Path) -> list[Path]:
    """What nobody needs any more when the work is done."""
    beside = folder.parent.glob(f".{folder.name}*")
    return [*beside, *folder.rglob("*.part"), *folder.rglob(".*.new"), *folder.rglob(".lock")]
