"""Every Triton kernel compiles for a GPU, without one: what interpretation does not notice.

The layers of `interpreted_kernels` are called in bfloat16, and each kernel is compiled for an H100
(compute capability 9.0) in the place of being launched. What they compute is nothing.
"""

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import interpreted_kernels


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
    compiled = set()

    def compile_it(kernel, grid):
        def launch(*arguments, **settings):
            kernel.warmup(*arguments, grid=grid, **settings)
            compiled.add(kernel.fn.__name__)

        return launch

    JITFunction.__getitem__ = compile_it
    interpreted_kernels.agree = lambda *_: None
    interpreted_kernels.torch.testing.assert_close = lambda *_, **__: None
    torch.set_default_dtype(torch.bfloat16)
    interpreted_kernels.convolutions()
    interpreted_kernels.the_rest()
    interpreted_kernels.factors()
    interpreted_kernels.small_layers()
    torch.set_default_dtype(torch.float32)
    interpreted_kernels.adding()
    print(*sorted(compiled))


if __name__ == "__main__":
    main()
