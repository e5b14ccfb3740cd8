"""Work that is killed at random moments, begun again, and must come to the same."""

from __future__ import annotations

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


def done(child: int) -> bool:
    """Whether a process came to its end; False if it was killed."""
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed, see above"
    return not os.WIFSIGNALED(status)


def is_killed(work: Work, folder: Path, seconds: float) -> bool:
    """Do the work, unless it takes longer than that: then its process is killed."""
    child = started(work, folder)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return not done(child)


def survives(job: Job, place: Path, seed: int, num_kills: int) -> None:
    """See that a job comes to the same after kills, some of them of what went on after one."""
    rng = random.Random(seed)
    whole, again = place / "whole", place / "again"
    job.work(whole)  # here: what it imports, children need not import again
    begun = time.monotonic()
    assert done(started(job.work, again))
    took = time.monotonic() - begun
    expected = job.outcome(whole)
    assert job.outcome(again) == expected
    kills = number = 0
    while kills < num_kills:
        folder = place / str(number)
        number += 1
        assert number < 20 * num_kills + 20, "it is over before it can be killed"
        for _ in range(rng.choice([1, 1, 2, 3])):
            if not is_killed(job.work, folder, rng.uniform(0, took)):
                break
            kills += 1
        assert done(started(job.work, folder))
        assert job.outcome(folder) == expected, f"after {kills} kills, seed {seed}"
        assert leftovers(folder) == []


def leftovers(folder: Path) -> list[Path]:
    """What nobody needs any more when the work is done."""
    beside = folder.parent.glob(f".{folder.name}*")
    return [*beside, *folder.rglob("*.part"), *folder.rglob(".*.new"), *folder.rglob(".lock")]
