"""Functions on all tensors in nested dicts, tuples, lists and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor


def map_tensors(value: Any, fn: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """`value` with `fn` applied to every tensor in it, down through dicts and records.

    Another `kind` is what stands in the place of tensors.
    """
    if isinstance(value, kind):
        return fn(value)
    if isinstance(value, dict):
        return {name: map_tensors(part, fn, kind) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(part, fn, kind) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if hasattr(value, "__dataclass_fields__"):
        names = value.__dataclass_fields__
        return type(value)(**{name: map_tensors(getattr(value, name), fn, kind) for name in names})
    return value


def with_tensors(value: Any, tensors: Iterable[Tensor]) -> Any:
    """`value` with these in the place of its tensors, in the order of `tensors_in`."""
    there = iter(tensors)
    return map_tensors(value, lambda _: next(there))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors that `map_tensors` visits, in its order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        parts = [*value.values()]
    elif isinstance(value, (tuple, list)):
        parts = [*value]
    else:
        parts = [getattr(value, name) for name in getattr(value, "__dataclass_fields__", ())]
    return [tensor for part in parts for tensor in tensors_in(part)]


def copy_tensors(source: Any, target: Any) -> None:
    """Copy the tensors of `source` into those of `target`, which has the same structure."""
    copy_all(zip(tensors_in(source), tensors_in(target), strict=True))


LARGE = 2**17
"""Elements from which on a tensor is copied separately: a kernel for many tensors has one block for
every 65,536 elements, and a large tensor would have too few blocks to keep a GPU busy."""


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the first of each pair into the second; on a GPU, one kernel per dtype for the small."""
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for a, b in pairs:
        if a is b:
            continue
        if a.numel() >= LARGE:
            b.copy_(a)
        else:
            by_dtype.setdefault(a.dtype, []).append((a, b))
    for some in by_dtype.values():
        torch._foreach_copy_([b for _, b in some], [a for a, _ in some])


def converted(tree: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies in another dtype; on a GPU, one kernel for all small tensors of a dtype."""
    made = {name: torch.empty_like(t, dtype=dtype) for name, t in tree.items()}
    copy_tensors(tree, made)
    return made


def copies(value: Any) -> Any:
    """`value` with copies of its tensors; on a GPU, one kernel for all small ones of a dtype."""
    found = tensors_in(value)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(found):
        if tensor.numel() >= LARGE or tensor.dtype is torch.bool:
            found[place] = tensor.clone()
        else:
            by_dtype.setdefault(tensor.dtype, []).append(place)
    for places in by_dtype.values():
        # Multiplication by 1 makes the copies: torch has no other way for many tensors at once.
        made = torch._foreach_mul([found[place] for place in places], 1)
        for place, copy in zip(places, made, strict=True):
            found[place] = copy
    return with_tensors(value, found)


def stack(values: Sequence[Any]) -> Any:
    """Values of the same structure as one, whose tensors have a row for each value.

    Nothing is copied if there is only one, or if they are all rows that `unstack` made. Without
    values the result is empty.
    """
    if not values:
        return {}
    first = values[0]
    if len(values) == 1:
        return map_tensors(first, lambda t: t.unsqueeze(0))
    if isinstance(first, Tensor):
        whole = first._base
        return whole if _are_rows(values, whole) else torch.stack(list(values))
    return {name: stack([value[name] for value in values]) for name in first}


def _are_rows(values: Sequence[Tensor], whole: Tensor | None) -> bool:
    if whole is None or not whole.ndim or len(whole) != len(values):
        return False
    each = whole.stride(0) * whole.itemsize
    return all(
        t._base is whole
        and (t.shape, t.stride()) == (whole.shape[1:], whole.stride()[1:])
        and t.data_ptr() == whole.data_ptr() + row * each
        for row, t in enumerate(values)
    )


def in_order(value: Any) -> Any:
    """The same with the keys of all nested dicts in alphabetical order."""
    if not isinstance(value, dict):
        return value
    return {name: in_order(value[name]) for name in sorted(value)}


def unstack(value: Any, count: int) -> list[Any]:
    """The `count` rows of `value`, each with its structure; the tensors are views."""
    return [map_tensors(value, itemgetter(row)) for row in range(count)]


def join(values: Sequence[Any]) -> Any:
    """Concatenate the rows of tensors, down through dicts and tuples; one value stays itself."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, dict):
        return {name: join([value[name] for value in values]) for name in first}
    if first is None:
        return None
    columns = map(join, zip(*values, strict=True))
    return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)


class HostCopy:
    """An asynchronous copy of tensors from a GPU to the host; `read` waits for this copy alone."""

    def __init__(self, value: Any) -> None:
        self.value, self.event = value, None
        if any(t.is_cuda for t in tensors_in(value)):
            self.value = on_host(value)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    @property
    def is_under_way(self) -> bool:
        return self.event is not None

    def read(self) -> Any:
        if self.event is not None:
            self.event.synchronize()
        return self.value


def on_host(value: Any) -> Any:
    """`value` with its tensors on their way from a GPU to the host, in the GPU's order of work."""
    return map_tensors(
        value,
        lambda t: torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True),
    )


def moved(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on the device, without waiting for the work queued there."""
    if device.type == "cpu":
        return value
    return map_tensors(
        value, lambda t: (t if t.is_cuda else t.pin_memory()).to(device, non_blocking=True)
    )


@cache
def side_stream(device: int, priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; no copy if it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
