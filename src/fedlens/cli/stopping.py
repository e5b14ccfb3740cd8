"""Ctrl-C and SIGTERM: the message and the exit status of an interrupted command."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130


class Stopped(Exception):
    """An interrupted command that can be continued; the message says how."""


@contextmanager
def going_on_by(how: str, can: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Add to an interruption how to go on, if that `can` be done."""
    try:
        yield
    except KeyboardInterrupt as error:
        if can():
            raise Stopped(how) from error
        raise


def stopped(how_to_go_on: str = "") -> int:
    """Print that the command was stopped; return the exit status."""
    above = "\n" if sys.stderr.isatty() else ""  # the terminal has printed ^C in this line
    rest = f"; {how_to_go_on}" if how_to_go_on else ""
    print(f"{above}fedlens: stopped{rest}", file=sys.stderr, flush=True)
    return INTERRUPTED


def heed_signals() -> None:
    """Handle SIGTERM as Ctrl-C is handled."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell disabled it
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(*_: Any) -> None:
    # While PyTorch is being imported, its C++ code loses an exception or ends the process with
    # another message. Exiting at once is safe: no command has begun its work at that time.
    about = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(about, "_initializing", False):
        os._exit(stopped())
    raise KeyboardInterrupt
