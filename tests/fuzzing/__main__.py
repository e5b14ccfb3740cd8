"""Every reader, given files that nobody wrote: a program, for it limits its own memory and time.

    python -m tests.fuzzing 2000        # so many cases in all
    python -m tests.fuzzing 200 idx     # of one reader

A reader may take a file or refuse it by a ValueError of one line that names the file. Anything else
fails: another error, more memory than `ROOM`, more seconds of the processor than `SECONDS` a case.
"""

from __future__ import annotations

import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzzing import data_files, descriptions, image_lists, run_folders
from tests.fuzzing.cases import Data, Reader

ROOM = 1 << 30  # bytes, besides what the program takes before it starts
SECONDS = 10  # of the processor, a case
READERS: dict[str, Reader] = {
    **data_files.READERS,
    **image_lists.READERS,
    **descriptions.READERS,
    **run_folders.READERS,
}


class TooLong(BaseException):
    """No reader may take this for a mistake in a file."""


def _too_long(*_: Any) -> None:
    raise TooLong


def attempt(reader: Reader, data: Data) -> None:
    """One case."""
    with tempfile.TemporaryDirectory() as made:
        file, read = reader(Path(made), data)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            read()
        except ValueError as error:
            lines = str(error).splitlines()
            assert len(lines) == 1, f"{len(lines)} lines: {error}"
            assert str(file) in lines[0] or file.name in lines[0], f"{file} is not named: {error}"
            assert not re.search(r"\b[A-Z]\w+Error\b", lines[0]), f"a type is named: {error}"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def fuzz(name: str, cases: int) -> None:
    @settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        phases=[Phase.explicit, Phase.generate],  # what fails is told at once
    )
    @given(st.data())
    def run(data: Data) -> None:
        attempt(READERS[name], data)

    run()


def main() -> None:
    cases, *names = sys.argv[1:]
    chosen = names or list(READERS)
    warnings.simplefilter("ignore")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM,) * 2)
    signal.signal(signal.SIGVTALRM, _too_long)
    failed = []
    for name in chosen:
        started = time.process_time()
        try:
            fuzz(name, -(-int(cases) // len(chosen)))
        except KeyboardInterrupt:
            raise
        except BaseException:
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {time.process_time() - started:.1f} s", flush=True)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} readers held; failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
