"""Updates [C, D], some columns at a time: in pieces that stay in a cache, on all cores of a CPU.

Which pieces there are, and the order of results, does not depend on the number of cores.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from fedlens.storage.free_memory import num_cores

WIDE = 2**20  # columns of a piece on a GPU
NUMBERS = 2**15 - 2**8
"""Numbers of a piece on a CPU: torch divides more than 2^15 among threads of its own, and with a
power of two rows would lie at the same places of the cache."""
SPAN = 64  # pieces that a thread takes at once

T = TypeVar("T")


def by_span(rows: Tensor, function: Callable[[Sequence[slice]], T], times: int = 1) -> list[T]:
    """`function` of some pieces after the other, as slices of columns: all of them are taken.

    On a CPU they are so many times as wide, for products, which go through a cache by themselves.
    """
    clients, columns = rows.shape
    on_cpu = rows.device.type == "cpu"
    width = max(times * NUMBERS // max(clients, 1), 8) if on_cpu else WIDE
    pieces = [slice(start, start + width) for start in range(0, max(columns, 1), width)]
    each = SPAN // times
    spans = [pieces[start : start + each] for start in range(0, len(pieces), each)]
    if not on_cpu or len(spans) == 1:
        return [function(one) for one in spans]
    with ThreadPoolExecutor(num_cores()) as pool:
        return [*pool.map(function, spans)]
