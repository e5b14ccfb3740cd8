"""Which tiles are fastest for the convolutions of large maps, on this GPU?

    python benchmarks/convolution_tiles.py

For the layers of ResNet-18 on 32 px (10 clients of 32 images), and for each direction, it times the
Triton kernels with several tiles, beside a batched product of the same size. Kernels are compiled
first, in processes side by side.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor

from fedlens.network.kernels import convolution, convolution_gradient
from fedlens.network.kernels.sizes import Frame, Geometry, sizes_of

CLIENTS, BATCH = 10, 32
LAYERS = [(64, 32), (128, 16), (256, 8), (512, 4)]  # channels, and the side of a map
PRODUCTS = {  # BM, BN, BK, warps, stages
    64: [
        (128, 64, 64, 4, 3),
        (128, 64, 64, 4, 4),
        (128, 64, 64, 8, 3),
        (256, 64, 64, 8, 3),
        (256, 64, 64, 4, 3),
        (128, 64, 32, 4, 5),
        (64, 64, 64, 4, 4),
    ],
    128: [
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (128, 256, 64, 8, 3),
        (256, 128, 64, 8, 3),
        (128, 64, 64, 4, 4),
    ],
}
GRADIENTS = {  # BM, BN, BK, warps, stages
    64: [
        (64, 64, 64, 4, 3),
        (64, 64, 64, 4, 5),
        (128, 64, 64, 4, 3),
        (128, 64, 64, 4, 4),
        (128, 64, 64, 8, 3),
    ],
    128: [
        (64, 128, 128, 8, 3),
        (64, 128, 128, 8, 4),
        (64, 128, 128, 4, 3),
        (128, 128, 128, 8, 3),
        (64, 128, 64, 4, 4),
        (64, 256, 128, 8, 3),
    ],
}
SPLITS = (1, 2, 4)  # times as many programs as `_splits` says
Work = Callable[[], object]


def work_of(channels: int, side: int) -> Iterator[tuple[str, Work]]:
    shape = CLIENTS * BATCH, side, side, channels
    x, grads = torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16)
    kernel = torch.randn(CLIENTS, 9 * channels, channels, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    padding = 1, 1, 1, 1
    s = sizes_of(x, (side, side), channels, Geometry((3, 3)), padding)
    total = BATCH * side * side
    patches = torch.randn(CLIENTS, total, 9 * channels, device="cuda", dtype=torch.bfloat16)
    yield "batched product", lambda: torch.bmm(patches, kernel)
    grad_rows = grads.view(CLIENTS, total, channels)
    yield (
        "batched product, weights",
        lambda: torch.bmm(patches.mT, grad_rows, out_dtype=torch.float32),
    )
    wide = min(channels, 128)

    def product(turned: bool, tiles: tuple[int, ...]) -> Work:
        rows, columns, deep, warps, stages = tiles
        grid = triton.cdiv(total, rows), CLIENTS, triton.cdiv(channels, columns)
        return lambda: convolution._taps_kernel[grid](
            x, kernel, kernel, out, BATCH, s, BORDER=True, HAS_BIAS=False, RELU=False,
            TURNED=turned, BM=rows, BN=columns, BK=deep, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    for turned in (False, True):
        for tiles in PRODUCTS[wide]:
            yield f"{'backward' if turned else 'forward'} {tiles}", product(turned, tiles)

    def gradient(tiles: tuple[int, ...], more: int) -> Work:
        rows, columns, deep, warps, stages = tiles
        programs = CLIENTS * 9 * triton.cdiv(channels, deep) * triton.cdiv(channels, columns)
        splits = convolution_gradient._splits(programs, total) * more
        parts = torch.empty(splits, CLIENTS, 9 * channels, channels, device="cuda")
        tall_tiles, wide_tiles = triton.cdiv(channels, deep), triton.cdiv(channels, columns)

        def run() -> Tensor:
            convolution_gradient._shifted_gradient_kernel[
                (9 * tall_tiles, CLIENTS, splits * wide_tiles)
            ](
                x, grads, parts, CLIENTS, BATCH, splits, s, Frame(side, side, 0, 0),
                MASKED=True, HAS_BIAS=False, BM=rows, BN=columns, BK=deep,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
            return parts.sum(0) if splits > 1 else parts

        return run

    for tiles in GRADIENTS[wide]:
        for more in SPLITS:
            yield f"weights {tiles} x{more}", gradient(tiles, more)


def milliseconds(work: Work) -> float:
    work()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(10):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 10


def compile_some(part: int, parts: int) -> None:
    number = 0
    for layer in LAYERS:
        for what, work in work_of(*layer):
            if what.endswith(("x2", "x4")):
                continue
            number += 1
            if number % parts == part:
                try:
                    work()
                except Exception as error:
                    print(what, str(error)[:80])


def main() -> None:
    if len(sys.argv) > 1:
        compile_some(int(sys.argv[1]), int(sys.argv[2]))
        return
    parts = max((os.cpu_count() or 2) - 2, 1)
    workers = [
        subprocess.Popen([sys.executable, __file__, str(i), str(parts)]) for i in range(parts)
    ]
    for worker in workers:
        worker.wait()
    for channels, side in LAYERS:
        operations = 2 * CLIENTS * BATCH * side**2 * 9 * channels**2
        print(f"{channels} channels, {side} x {side}")
        for what, work in work_of(channels, side):
            try:
                taken = milliseconds(work)
            except Exception as error:
                print(f"  {what:<40} {str(error)[:60]}")
                continue
            print(
                f"  {what:<40} {1e3 * taken:7.0f} us  {operations / taken / 1e9:5.0f} TFLOP/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
