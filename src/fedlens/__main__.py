"""The entry point of the command line: `fedlens`, and `python -m fedlens`."""

import atexit
import os
import sys
import threading

from fedlens.cli.stopping import stopped


def command() -> None:
    """Run a command, then end the process.

    The normal exit of Python destroys the objects of torch one by one and shuts down the GPU, which
    takes longer than many commands. So the process ends by `os._exit` once all output is written.
    """
    _open_closed_streams()
    try:
        from fedlens.cli.main import main  # in `try`: Ctrl-C may come during the import

        main()
    except KeyboardInterrupt:
        raise SystemExit(stopped()) from None
    except SystemExit as end:
        others = [
            t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()
        ]
        if not isinstance(end.code, int) or others:  # Python waits for such threads
            raise
        atexit._run_exitfuncs()
        os._exit(_flushed(end.code))


def _open_closed_streams() -> None:
    """Open each closed standard stream (stdin, stdout, stderr) on /dev/null.

    Otherwise the next file would get its descriptor, and a library could print into that file.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _flushed(status: int) -> int:
    """Flush the output and return the exit status, not 0 if the output cannot be written."""
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except OSError:
        return status or 1
    return status


if __name__ == "__main__":
    command()
