"""CUDA graphs: what comes often in one shape is recorded once, then replayed by one launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedlens.trees import copy_all, map_tensors, stack, tensors_in, unstack

T = TypeVar("T")

WORTH_IT = 3  # how often a shape must come before it is recorded


@dataclass
class Recorded:
    """A recorded function, and the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: Any
    seen: list[tuple[Tensor, int]]  # what was copied to the inputs last, with its version

    def take(self, given: list[Tensor]) -> None:
        """Copy what is not there yet."""
        there = zip(given, self.inputs, self.seen, strict=True)
        with torch.no_grad():
            copy_all([(t, m) for t, m, (old, v) in there if t is not old or t._version != v])
        self.seen = [(t, t._version) for t in given]


def _kept(value: Any) -> Any:
    """Copies of its tensors; those of a list are rows of one tensor each, which they stack to."""
    if isinstance(value, list) and value:
        return unstack(stack(map_tensors(value, lambda t: t.detach().clone())), len(value))
    if isinstance(value, tuple):
        parts = [_kept(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return map_tensors(value, lambda t: t.detach().clone())


class Graphs:
    """Records what `stacked` computes on a GPU; it is used for one program only."""

    def __init__(self) -> None:
        self._seen: Counter[object] = Counter()
        self._recorded: dict[object, Recorded] = {}
        self._pool: Any = None

    def __call__(self, key: object, function: Callable[..., T], *inputs: Any) -> T | None:
        given = tensors_in(inputs)
        shapes = (key, tuple((t.shape, t.dtype) for t in given))
        recorded = self._recorded.get(shapes)
        if recorded is None:
            self._seen[shapes] += 1
            if self._seen[shapes] < WORTH_IT:
                return None
            recorded = self._recorded[shapes] = self._record(function, inputs)
        recorded.take(given)
        recorded.graph.replay()
        result: T = recorded.result
        return result

    def _record(self, function: Callable[..., T], inputs: Any) -> Recorded:
        kept = _kept(inputs)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what a library sets up at its first call is not recorded
            function(*map_tensors(kept, torch.clone))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = function(*kept)
        self._pool = graph.pool()
        mine = tensors_in(kept)
        return Recorded(graph, mine, result, [(t, t._version) for t in mine])
