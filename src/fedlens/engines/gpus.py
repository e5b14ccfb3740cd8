"""What can only be asked in a process of its own.

Once a process has used a GPU, or only asked for one, workers forked from it cannot; nor can they
train once it has trained itself, if there is a GPU. So whoever forks workers asks a child.
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

T = TypeVar("T")

INTERRUPTS = {signal.SIGINT, signal.SIGTERM}

USED = (
    "this process has used a GPU already, so no worker can be forked for one: start anew, "
    'or choose engine = "stacked", or device = "cpu"'
)


def in_a_child(function: Callable[[], T]) -> T:
    """What a function gives in a process forked for it alone. This process is left as it was."""
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
    """Start a child, which calls `forked` first.

    Ctrl-C waits meanwhile: raised in the middle of a fork, Python would print it and go on. So does
    the collection of garbage: what this process has left over is not the child's to take down.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # Python warns of forking beside threads; a child starts none and takes no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        if collects:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)


def forked() -> None:
    """In a child: leave Ctrl-C to the parent, and end when it says so.

    Whatever the parent had stays as it is: an object that waits for its threads when it is freed,
    as a session of onnxruntime does, would wait for ever, since threads are not forked.
    """
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
    torch.set_num_threads(1)  # those of the parent are not there any more


@functools.cache
def gpu_names() -> tuple[str, ...]:
    """What the GPUs of this machine are called, as far as torch sees them."""
    if sys.platform != "linux":  # elsewhere workers use no GPU, and a fork is not safe
        return ()
    names = in_a_child(_names)
    if not names and torch.cuda.device_count():
        raise ValueError(USED)
    return names


@functools.cache
def all_have_bf16() -> bool:
    """Whether every GPU of this machine multiplies in bfloat16 itself."""
    return in_a_child(_have_bf16)


def check_unused() -> None:
    """See that workers forked from here could use GPUs, as far as that shows."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ValueError(USED)


def _names() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))


def _have_bf16() -> bool:
    return all(has_bf16(torch.device("cuda", i)) for i in range(torch.cuda.device_count()))


def has_bf16(device: torch.device) -> bool:
    """Whether a GPU, which this process may use, multiplies in bfloat16 itself."""
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
