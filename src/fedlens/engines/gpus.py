"""Queries about GPUs in a child process, and how to fork safely.

Once a process has used a GPU, or only queried one, workers forked from it cannot use GPUs; nor can
they train once it has trained itself, if there is a GPU. So a process that forks workers lets a
child process make the queries.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from fedlens.engines.graphs import no_garbage_collected

T = TypeVar("T")

INTERRUPTS = {signal.SIGINT, signal.SIGTERM}

USED = (
    "this process has used a GPU already, so no worker can be forked for one: start anew, "
    'or choose engine = "stacked", or device = "cpu"'
)


def in_a_child(function: Callable[[], T]) -> T:
    """Run a function in a forked child process; return its result. This process is unchanged."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(function, theirs), daemon=True)
    fork(child)
    theirs.close()
    try:
        error, result = pickle.loads(ours.recv_bytes())
    except EOFError:
        raise ChildProcessError("a process was killed, perhaps because memory ran out") from None
    finally:
        child.join()
        ours.close()
    if error is not None:
        raise RuntimeError(f"a process failed:\n{error}")
    answer: T = result
    return answer


def fork(process: multiprocessing.process.BaseProcess) -> None:
    """Start a child process, which must call `forked` first.

    Ctrl-C is blocked meanwhile: raised in the middle of a fork, Python would print it and go on.
    Garbage collection is disabled, too: the child must not free the garbage of this process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        with warnings.catch_warnings(), no_garbage_collected():
            # Python warns about forks with threads; the child starts none and takes no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)


def forked() -> None:
    """Set up a forked child process: ignore Ctrl-C, and end on SIGTERM.

    Objects of the parent are never freed: one that waits for its threads when it is freed, such as
    a session of onnxruntime, would wait forever, since threads are not forked.
    """
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
    torch.set_num_threads(1)  # the threads of the parent do not exist here


@functools.cache
def gpu_names() -> tuple[str, ...]:
    """The names of the GPUs of this machine that torch sees."""
    if sys.platform != "linux":  # on other systems workers use no GPU, and forks are unsafe
        return ()
    names = in_a_child(_names)
    if not names and torch.cuda.device_count():
        raise ValueError(USED)
    return names


@functools.cache
def all_have_bf16() -> bool:
    """Whether every GPU of this machine has hardware for bfloat16."""
    return in_a_child(_have_bf16)


def check_unused() -> None:
    """Raise an error if workers forked from this process cannot use GPUs, as far as is known."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ValueError(USED)


def _names() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))


def _have_bf16() -> bool:
    return all(has_bf16(torch.device("cuda", i)) for i in range(torch.cuda.device_count()))


def has_bf16(device: torch.device) -> bool:
    """Whether a GPU has hardware for bfloat16. This process must be allowed to use the GPU."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _answer(function: Callable[[], object], pipe: Connection) -> None:
    forked()
    answer: object = None
    error = None
    try:
        answer = function()
    except Exception:
        error = traceback.format_exc()
    pipe.send_bytes(pickle.dumps((error, answer)))
    os._exit(0)
