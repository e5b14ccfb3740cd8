"""Every Triton kernel compiles for a GPU, without one: what interpretation does not notice.

Some layers of `interpreted_kernels` are called in bfloat16. Nothing is launched; each kernel is
compiled for an H100 (compute capability 9.0) as it would have been launched last: with most to do;
and once more for each set of arguments that are 1, which Triton takes for constants.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fedlens.network.kernels import linear
from fedlens.network.kernels.launch import compiled_at_the_end
from fedlens.network.ops import FACTORED_ROWS
from tests.network import (
    agreeing,
    interpreted_convolutions,
    interpreted_defences,
    interpreted_kernels,
)

# Between them all kernels of convolutions, the widest tiles last.
CONVOLUTIONS = [
    "padded pool, even and odd",
    "pool padded above, stride",
    "stride",
    "wider than a tile",
    "wider than a tile, no padding",
]
SHARED = 232_448  # bytes of shared memory that a program on an H100 can have


class Absent:
    """What Triton asks a driver for, of a GPU that is not there."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def main() -> None:
    driver.set_active(Absent())
    launches: dict[tuple[str, tuple[int, ...]], Callable[[], Any]] = {}

    def note_it(kernel, grid):
        def launch(*arguments, **settings):
            name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
            ones = tuple(i for i, a in enumerate(arguments) if type(a) is int and a == 1)
            launches[name, ones] = partial(kernel.warmup, *arguments, grid=grid, **settings)

        return launch

    unchanged, JITFunction.__getitem__ = JITFunction.__getitem__, note_it
    for module in (agreeing, interpreted_convolutions, interpreted_kernels):
        mock.patch.object(module, "agree", lambda *_: None).start()
    torch.testing.assert_close = lambda *_, **__: None
    torch.set_default_dtype(torch.bfloat16)
    interpreted_convolutions.convolutions(CONVOLUTIONS)
    interpreted_convolutions.depthwise_convolutions(["depthwise with stride, sides differ"])
    interpreted_kernels.group_norms(["norm, addition, relu, several tiles"])
    interpreted_kernels.batch_norms(["batch norm, addition, relu, several tiles"])
    interpreted_kernels.the_rest()
    interpreted_kernels.factors(batch=FACTORED_ROWS, features=600, out=600, steps=2)  # the largest
    interpreted_kernels.small_layer(batch=5, features=70, out=24, relu=True)
    torch.set_default_dtype(torch.float32)
    for check in (
        interpreted_kernels.steps,
        interpreted_kernels.noise,
        interpreted_kernels.of_clients,
        partial(interpreted_defences.order_statistics, [12]),
        interpreted_defences.row_products,
    ):
        check()
    for (name, _), compiled in launches.items():
        assert compiled().metadata.shared <= SHARED, f"{name} needs too much memory"
    JITFunction.__getitem__ = unchanged
    compiled_ahead()
    print(*sorted({name for name, _ in launches}))


def compiled_ahead() -> None:
    """Kernels that are compiled together are those that would have been launched."""
    kernels = [linear._forward_kernel.jit, linear._backward_kernel.jit]

    def num_compiled() -> list[int]:
        return [len(kernel.device_caches[0][0]) for kernel in kernels]

    layer = partial(interpreted_kernels.small_layer, batch=7, features=71, out=25, relu=False)
    torch.set_default_dtype(torch.bfloat16)
    before = num_compiled()
    with compiled_at_the_end():
        layer()
        assert num_compiled() == before
    assert num_compiled() == [count + 1 for count in before]
    JITFunction.__getitem__ = lambda kernel, grid: partial(kernel.warmup, grid=grid)
    layer()
    assert num_compiled() == [count + 1 for count in before]


if __name__ == "__main__":
    main()
