"""Ctrl-C: one line about it, and the status of a command that was interrupted."""

import os
import signal
import sys
from typing import Any

INTERRUPTED = 130


class Stopped(Exception):
    """Ctrl-C in a command that can go on; the message says how."""


def stopped(how_to_go_on: str = "") -> int:
    """Say it; the status to end with."""
    above = "\n" if sys.stderr.isatty() else ""  # where the terminal has written ^C
    rest = f"; {how_to_go_on}" if how_to_go_on else ""
    print(f"{above}fedlens: stopped{rest}", file=sys.stderr, flush=True)
    return INTERRUPTED


def heed_signals() -> None:
    """Let SIGTERM do what Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell ignores it
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(*_: Any) -> None:
    # In C++ that is half imported an exception is lost, or ends the process with another message.
    # And before PyTorch is there, no command has begun anything.
    about = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(about, "_initializing", False):
        os._exit(stopped())
    raise KeyboardInterrupt
