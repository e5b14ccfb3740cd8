"""CUDA graphs: a step that is taken often is recorded once and then replayed by one launch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedlens.client import Inputs, Step, map_tensors
from fedlens.core import Local

WORTH_IT = 3  # how often a shape must come before it is recorded


@dataclass
class Recorded:
    """A recorded step, and the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    local: Local
    inputs: Inputs
    loss: Tensor


class Graphs:
    """Takes the steps of `stacked` on a GPU; it is used for one program only."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._recorded: dict[tuple[Any, ...], Recorded] = {}
        self._pool: Any = None

    def __call__(self, step: Step, local: Local, now: Inputs) -> tuple[Local, Tensor]:
        shape = tuple((t.shape, t.dtype) for t in _tensors((local.params, local.solver, now)))
        recorded = self._recorded.get(shape)
        if recorded is None:
            self._seen[shape] += 1
            if self._seen[shape] < WORTH_IT:
                return step(local, now)
            recorded = self._recorded[shape] = self._record(step, local, now)
        if local is not recorded.local:
            _copy(_plain(local), _plain(recorded.local))
        _copy(now, recorded.inputs)
        recorded.graph.replay()
        return recorded.local, recorded.loss

    def _record(self, step: Step, local: Local, now: Inputs) -> Recorded:
        kept: Local = map_tensors(_plain(local), lambda t: t.detach().clone())
        inputs: Inputs = map_tensors(now, torch.clone)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what a library sets up at its first call is not recorded
            for _ in range(2):
                step(map_tensors(kept, torch.clone), inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            moved, loss = step(replace(kept), inputs)
            _copy(
                (moved.params, moved.buffers, moved.solver),
                (kept.params, kept.buffers, kept.solver),
            )
        self._pool = graph.pool()
        return Recorded(graph, kept, inputs, loss)


def _plain(local: Local) -> Local:
    """Without what only the step under way knows."""
    return replace(local, step=None, count=None, loss=None)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


@torch.no_grad()
def _copy(source: Any, target: Any) -> None:
    pairs = [(a, b) for a, b in zip(_tensors(source), _tensors(target), strict=True) if a is not b]
    if pairs:
        torch._foreach_copy_([b for _, b in pairs], [a for a, _ in pairs])
