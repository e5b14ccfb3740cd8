"""A round of every built-in network compiles for a GPU, without one: each kernel as it is launched.

    python -m tests.network.compiled_rounds [NETWORK ...]

Nothing is launched, so that the networks compute nothing; that does not matter to a compiler.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fedlens.models import MODELS
from fedlens.network import ops
from fedlens.network.kernels.launch import StandIn
from fedlens.runs.bench import Workload, experiment, rounds
from fedlens.setup import build
from tests.network.compiled_kernels import SHARED, Absent

SHAPE = (3, 64, 64)  # the smallest images that every network takes
PRECISIONS = ("bf16", "fp32")


def main(names: list[str]) -> None:
    driver.set_active(Absent())
    for name in names:
        for precision in PRECISIONS:
            launches = launched(name, precision)
            for kernel, compiled in launches.items():
                shared = compiled().metadata.shared
                assert shared <= SHARED, f"{name}, {precision}: {kernel[0]} takes {shared} bytes"
            print(f"{name}, {precision}: {len(launches)} kernels", flush=True)


def launched(name: str, precision: str) -> dict[Any, Callable[[], Any]]:
    """The different launches of a round of three clients, to be compiled."""
    found: dict[Any, Callable[[], Any]] = {}

    def note_it(kernel, grid):
        def launch(*arguments, **settings):
            key = kernel.fn.__name__, StandIn.of(arguments), str(settings)
            found[key] = partial(kernel.warmup, *StandIn.of(arguments), grid=(1,), **settings)

        return launch

    setup = build(experiment(Workload(name, SHAPE, 3, 2, 8), "stacked", "cpu", precision))
    with (
        mock.patch.object(ops, "_takes_triton", lambda x: x.dtype is not torch.float64),
        mock.patch.object(JITFunction, "__getitem__", note_it),
    ):
        rounds(setup)()
    return found


if __name__ == "__main__":
    main(sys.argv[1:] or [*MODELS])
