"""Recorders: a call that often recurs with one shape is captured once, then replayed.

A capture is a CUDA graph, which a single launch replays. Evaluations run on a side stream
(`aside`), so a round can run on the GPU beside the evaluation of the round before.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fedlens.core.trees import (
    copy_all,
    map_tensors,
    side_stream,
    stack,
    tensors_in,
    unstack,
    with_tensors,
)

T = TypeVar("T")

WORTH_IT = 3  # a shape is captured at this many calls
MOST_CAPTURES = 256  # that a recorder holds
MOST_SHAPES = 4096  # not captured yet, whose last calls are known
URGENT = -1  # a priority of CUDA streams: the others have 0, and lower goes first


class Capture(Protocol):
    """A captured function call with input tensors of its own."""

    result: Any  # every replay writes the function's result here

    def replay(self) -> None: ...


class CudaGraph:
    """A CUDA graph of `function(*inputs)`; graphs of one `pool` share their working memory.

    The GPU schedules `urgent` graphs first. They may run at the same time as other graphs: they are
    captured on another stream, and libraries have a workspace for each captured stream.
    """

    def __init__(
        self, function: Callable[..., Any], inputs: Any, pool: Any, urgent: bool = False
    ) -> None:
        self.function = function  # keeps the tensors that the graph reads
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up: what libraries set up at first is not captured
            function(*map_tensors(inputs, torch.clone))
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        stream = side_stream(torch.cuda.current_device(), URGENT) if urgent else None
        with torch.cuda.graph(self.graph, pool=pool, stream=stream), no_garbage_collected():
            self.result = function(*inputs)

    def replay(self) -> None:
        self.graph.replay()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Launch on a side stream, after all work that was launched so far.

    Later launches on the main stream do not wait for it. The caller must wait before it reads the
    results, and must keep the input tensors until then.
    """
    if device.type != "cuda":
        yield
        return
    side = side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield


def wait_for_aside(device: torch.device) -> None:
    """Make all later launches wait for the work on the side stream."""
    if device.type == "cuda":
        side = side_stream(torch.cuda.current_device())
        torch.cuda.current_stream().wait_stream(side)


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """Disable garbage collection, as no other CUDA graph must be freed during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass
class Captured:
    """A capture, and the memory that its inputs are copied to."""

    capture: Capture
    num_bytes: int  # of its own inputs and its result
    inputs: list[Tensor]
    copied: list[tuple[Tensor, int]]  # the tensors last copied to the inputs, with versions
    in_place: bool  # whether some inputs lie in the memory of `place`
    last: int = 0  # the turn in which it was last replayed

    def copy(self, given: list[Tensor]) -> None:
        """Copy the tensors that changed since the last copy."""
        there = zip(given, self.inputs, self.copied, strict=True)
        with torch.no_grad():
            copy_all(
                (t, m)
                for t, m, (old, v) in there
                if (t is not old or t._version != v) and t.data_ptr() != m.data_ptr()
            )
        self.copied = [(t, t._version) for t in given]


Shaped = tuple[object, tuple[tuple[torch.Size, torch.dtype], ...]]
"""A key, with the shapes and dtypes of the inputs."""


@dataclass
class Seen:
    """The calls of a shape that is not captured. Calls in a row have one turn."""

    calls: int = 0
    turns: deque[int] = field(default_factory=lambda: deque(maxlen=WORTH_IT))  # the last ones


@dataclass
class Captures:
    """A recorder (`recording.Recorder`) for one program.

    What it holds is bounded: in number, and once captures take `most_bytes`, no more are added. A
    new one then takes the place of the least recently replayed, if its shape had WORTH_IT turns
    since that replay. So captures of shapes that rarely recur do not displace each other.
    """

    make: Callable[..., Capture] = CudaGraph
    most_bytes: int = 2**62
    _turn: int = 0
    _latest: Shaped | None = None
    _seen: dict[Shaped, Seen] = field(default_factory=dict)  # least recently called first
    _captured: dict[Shaped, Captured] = field(default_factory=dict)
    _pool: Any = None
    _place: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def __call__(self, key: object, function: Callable[..., T], *inputs: Any) -> T | None:
        given = tensors_in(inputs)
        shapes = (key, tuple((t.shape, t.dtype) for t in given))
        if shapes != self._latest:
            self._turn, self._latest = self._turn + 1, shapes
        captured = self._captured.get(shapes)
        if captured is None:
            if not self._is_worth_it(shapes):
                return None
            captured = self._captured[shapes] = self._capture(function, inputs)
        captured.last = self._turn
        captured.copy(given)
        captured.capture.replay()
        result: T = captured.capture.result
        return result

    def _is_worth_it(self, shapes: Shaped) -> bool:
        """Whether to capture a shape at this call; if so, there is room for it."""
        seen = self._seen.pop(shapes, None) or Seen()
        self._seen[shapes] = seen
        if len(self._seen) > MOST_SHAPES:
            del self._seen[next(iter(self._seen))]
        seen.calls += 1
        if self._turn not in seen.turns:
            seen.turns.append(self._turn)
        if seen.calls < WORTH_IT:
            return False
        while self._captured and self._is_full:
            oldest = min(self._captured, key=lambda one: self._captured[one].last)
            if len(seen.turns) < WORTH_IT or self._captured[oldest].last > seen.turns[0]:
                return False
            self._forget([oldest])
        del self._seen[shapes]
        return True

    @property
    def _is_full(self) -> bool:
        taken = sum(one.num_bytes for one in self._captured.values())
        return len(self._captured) >= MOST_CAPTURES or taken >= self.most_bytes

    def _forget(self, gone: Iterable[Shaped]) -> None:
        for shapes in gone:
            del self._captured[shapes]
        if not self._captured:  # the pool is freed with the last graph that uses it
            self._pool = None

    def place(self, value: T) -> T:
        tensors, places = tensors_in(value), []
        for number, tensor in enumerate(tensors):
            name = number, tensor.dtype
            if name not in self._place or len(self._place[name]) < tensor.numel():
                self._place[name] = tensor.new_empty(tensor.numel())
                # These captures read the old memory, which is no longer used.
                self._forget([s for s, one in self._captured.items() if one.in_place])
            strides = torch.empty_like(tensor, device="meta").stride()
            places.append(self._place[name].as_strided(tensor.shape, strides))
        with torch.no_grad():
            copy_all(zip(tensors, places, strict=True))
        placed: T = with_tensors(value, places)
        return placed

    def _capture(self, function: Callable[..., Any], inputs: Any) -> Captured:
        places = {memory.untyped_storage().data_ptr() for memory in self._place.values()}
        given = tensors_in(inputs)
        in_place = any(t.untyped_storage().data_ptr() in places for t in given)
        own = _own(inputs, places)
        capture = self.make(function, own, self._pool)
        if isinstance(capture, CudaGraph):
            self._pool = capture.graph.pool()
        tensors = tensors_in(own)
        num_bytes = _bytes_of([*tensors, *tensors_in(capture.result)], places)
        copied = [(t, t._version) for t in tensors]
        return Captured(capture, num_bytes, tensors, copied, in_place)


def _bytes_of(tensors: Iterable[Tensor], places: set[int]) -> int:
    """The bytes of memory that tensors take, except in `places`."""
    memory = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(size for place, size in memory.items() if place not in places)


def _own(value: Any, places: set[int]) -> Any:
    """`value` with copies of its tensors, except those that lie in `places`.

    The items of a list become rows of stacked tensors.
    """

    def copied(tensor: Tensor) -> Tensor:
        stays = tensor.untyped_storage().data_ptr() in places
        return tensor.detach() if stays else tensor.detach().clone()

    if isinstance(value, list) and value:
        return unstack(stack(map_tensors(value, lambda t: t.detach().clone())), len(value))
    if isinstance(value, tuple):
        parts = [_own(part, places) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return map_tensors(value, copied)
