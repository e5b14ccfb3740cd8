"""The process of the command line: `fedlens`, and `python -m fedlens`."""

import atexit
import os
import sys
import threading

from fedlens.cli.stopping import stopped


def command() -> None:
    """Run a command to the end of its process.

    When all is written, Python would take torch down object by object, and a GPU with it, which
    takes longer than many a command: the process ends without that.
    """
    _open_closed_streams()
    try:
        from fedlens.cli.main import main  # here: Ctrl-C may come while it is imported

        main()
    except KeyboardInterrupt:
        raise SystemExit(stopped()) from None
    except SystemExit as end:
        others = [
            t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()
        ]
        if not isinstance(end.code, int) or others:  # which Python waits for
            raise
        atexit._run_exitfuncs()
        os._exit(_flushed(end.code))


def _open_closed_streams() -> None:
    """Have all three standard streams.

    The number of one that is closed would be the next file's, to which a library might complain.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _flushed(status: int) -> int:
    """The exit status of a process, whose last output may not be read by anybody."""
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except OSError:
        return status or 1
    return status


if __name__ == "__main__":
    command()
