"""The `fedlens` command: its subcommands, and one clear line for every error."""

from __future__ import annotations

import errno
import logging
import re
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import click
import typer
import typer.core
from typer import Option

from fedlens.cli.arguments import FULL
from fedlens.cli.completion import known_keys
from fedlens.cli.stopping import INTERRUPTED, Stopped, heed_signals, stopped
from fedlens.config import consent
from fedlens.config.consent import mistake_of
from fedlens.config.options import did_you_mean, nearest
from fedlens.storage.reading import printable, reason, shortened
from fedlens.storage.run_files import RunFailed
from fedlens.version import __version__


class PlainStream:
    """A stream that escapes control characters: text from files may contain them."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream  # Rich takes this one: its bars move the cursor

    def write(self, text: str) -> int:
        # Click tries bytes to find out what a stream is, and expects the stream's own answer.
        plain = printable(text, kept="\n\t") if isinstance(text, str) else text
        return self.rich_proxied_file.write(plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


LONGEST_LINE = 20_000  # characters of an error message, which may name many files

VERBS = {
    **dict.fromkeys(("run", "resume", "sweep"), "run"),
    **dict.fromkeys(("report", "open"), "report"),
    "compare": "run",
    "attack": "attack",
    "watch": "report",
    **dict.fromkeys(("predict", "serve-model", "evaluate", "export"), "predict"),
    "reproduce": "reproduce",
    "new": "machine",
    **dict.fromkeys(("import", "partition"), "data"),
    **dict.fromkeys(("list", "explain", "schema"), "names"),
    **dict.fromkeys(("bench", "doctor"), "machine"),
}
"""The commands, and the module of each, which is imported only if it is asked for."""
GROUPS = ("data", "fleet", "privacy")

typer.core.HAS_RICH = False  # importing rich for the help texts takes longer than all the rest


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedlens {__version__}")
        raise typer.Exit


def fedlens_command(
    version: Annotated[
        bool, Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Federated learning for vision.

    Every command takes --help, --debug for tracebacks, and --trust-code to run the code that a run
    folder from elsewhere names.
    """


def app_of(*words: str) -> typer.Typer:
    """The command line with these commands and groups alone; without any, with all."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(fedlens_command)
    for word in words or (*VERBS, *GROUPS):
        module = import_module(f"fedlens.cli.{VERBS.get(word, word)}")
        if word in VERBS:
            app.command(word)(getattr(module, f"{word.replace('-', '_')}_command"))
        else:
            app.add_typer(getattr(module, f"{word}_app"), name=word)
    return app


def main() -> None:
    """Run the command line. All that it prints goes through a `PlainStream`."""
    with (
        redirect_stdout(cast(TextIO, PlainStream(sys.stdout))),
        redirect_stderr(cast(TextIO, PlainStream(sys.stderr))),
    ):
        raise SystemExit(_run())


def _run() -> int:
    """Run a command; print one clear line for an error, and a traceback with --debug."""
    debug = "--debug" in sys.argv
    consent.trusts_all = "--trust-code" in sys.argv
    arguments = [word for word in sys.argv[1:] if word not in ("--debug", "--trust-code")]
    heed_signals()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character it cannot encode must not raise
            stream.reconfigure(errors="backslashreplace")
    _say_what_is_logged()
    try:
        with consent.importable(Path.cwd(), trusted=consent.trusts_all):
            # Typer takes longer to set up the options of all commands than many commands take.
            asked = [word for word in arguments[:1] if word in VERBS or word in GROUPS]
            called = app_of(*asked)
            # Typer returns the exit status, and 130 after Ctrl-C.
            status = called(arguments, standalone_mode=False, prog_name="fedlens") or 0
        if status == INTERRUPTED:
            stopped()
    except (KeyboardInterrupt, click.exceptions.Abort):
        status = stopped()
    except Stopped as stop:
        status = stopped(str(stop))
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.message)
        status = 2
    except click.UsageError as error:
        status = _complain(_misused(error), 2, debug)
    except click.ClickException as error:
        status = _complain(error.format_message(), 2, debug)
    except RunFailed as error:
        status = _complain(_first_line(error), 1, debug)
    except ValueError as error:
        status = _complain(str(error), 2, debug)
    except OSError as error:
        status = _complain(*_machine_or_name(error), debug)
    except Exception as error:
        line = _machine_error(error) or mistake_of(error) or _internal_error(error)
        status = _complain(line, 1, debug)
    return status


def _misused(error: click.UsageError) -> str:
    """The error line for wrong arguments: with the nearest valid one, or a pointer to --help."""
    where = f"see {error.ctx.command_path if error.ctx else 'fedlens'} --help"
    if isinstance(error, click.NoSuchOption):
        told = _as_a_key(error) or _of_a_sweep(error)
        return told or f"No such option: {error.option_name}: {_near(error) or where}"
    if isinstance(error, click.BadParameter) and error.param is not None:
        kind, option = error.param.type, error.param.opts[0]
        if isinstance(kind, click.Choice):
            given = error.message.partition(" is not ")[0]  # includes its quotes
            called = option if option.startswith("-") else option.upper()
            return f"{called} is {given}: {did_you_mean(given[1:-1], kind.choices)}"
    line = error.format_message().rstrip(".")
    if line.endswith("?"):  # click already suggests something
        return line
    return f"{line}: {where}"


def _of_a_sweep(error: click.NoSuchOption) -> str:
    """A hint to `fedlens sweep` for its options `--seeds` and `--grid`; else empty.

    Without it the suggestion would be `--seed`, which is not what was meant.
    """
    is_run = error.ctx is not None and error.ctx.info_name == "run"
    if not is_run or error.option_name not in ("--seeds", "--grid"):
        return ""
    return f"{error.option_name} is an option of fedlens sweep: run the experiment by that command"


def _near(error: click.NoSuchOption) -> str:
    """A suggestion of the nearest option. Click's own counts the dashes as matching letters."""
    taken = error.ctx.command.params if error.ctx else ()
    words = [name[2:] for one in taken for name in one.opts if name.startswith("--")]
    near = nearest(error.option_name.lstrip("-"), [*words, "help"])
    return f"did you mean --{near[0]}?" if near else ""


def _as_a_key(error: click.NoSuchOption) -> str:
    """How to write an option that is a key of experiments, if the command takes keys."""
    taken = error.ctx.command.params if error.ctx else ()
    if not any(parameter.name in ("overrides", "words") for parameter in taken):
        return ""
    wanted = error.option_name.lstrip("-").replace("-", "_")
    keys = [key for key in known_keys() if wanted in (key, key.rpartition(".")[2])]
    if not keys:
        return ""
    ways = " or ".join(f"{key}=VALUE" for key in keys)
    return f"{error.option_name} is a key of the experiment, not an option: write {ways}"


def _say_what_is_logged() -> None:
    """Print the package's log messages, such as a damaged checkpoint, as lines on stderr.

    A message marked as `once` is not repeated for every run of a command.
    """
    said = set[str]()

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = printable(record.getMessage())
            if line not in said or not getattr(record, "once", False):
                print(f"fedlens: {line}", file=sys.stderr, flush=True)
            said.add(line)

    package = logging.getLogger("fedlens")
    package.handlers, package.propagate = [Said()], False


MISNAMED = (
    *(errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
)


def _machine_or_name(error: OSError) -> tuple[str, int]:
    """The error line and exit status for a wrong file name, a full disk or another OSError."""
    if error.errno in MISNAMED and error.filename is not None:
        name = shortened(str(error.filename), 80)
        return f"{name}: {reason(error).lower()}: choose another file or folder", 2
    if error.errno in FULL:
        return f"{reason(error)}: free some space, and run the command again", 1
    return _first_line(error), 1


def _complain(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    line = printable(shortened(message, LONGEST_LINE))
    print(f"fedlens: {line}", file=sys.stderr)
    return status


NO_MEMORY = re.compile(
    "out of memory|allocate memory|failed to map segment|size calculation overflow|start new thread"
)
"""What PyTorch, the loader of libraries and threads say where there is not enough memory."""


def _machine_error(error: Exception) -> str:
    """The error line for exhausted memory; empty for other errors."""
    if not isinstance(error, MemoryError) and not NO_MEMORY.search(str(error)):
        return ""
    return f"there is not enough memory: {_first_line(error)}".rstrip(": ")


def _internal_error(error: Exception) -> str:
    """The error line for an unexpected error; its traceback is written to a file to report."""
    what = f"internal error, {type(error).__name__}: {_first_line(error)}".rstrip(": ")
    whose = "this is a mistake in Fedlens; please report it with"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="fedlens-error-", suffix=".txt", delete=False
        ) as file:
            file.write(f"fedlens {__version__}\n{' '.join(sys.argv)}\n\n{traceback.format_exc()}")
    except OSError:
        return f"{what}: {whose} what --debug shows"
    return f"{what}: {whose} {file.name}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
