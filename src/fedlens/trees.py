"""Tensors wherever they stand: in dicts, in records, in records of dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `fn` applied to every tensor in it, down through dicts and records."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {name: map_tensors(part, fn) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(part, fn) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if hasattr(value, "__dataclass_fields__"):
        names = value.__dataclass_fields__
        return type(value)(**{name: map_tensors(getattr(value, name), fn) for name in names})
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors that `map_tensors` comes by, in its order."""
    found: list[Tensor] = []
    _find(value, found)
    return found


def _find(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, dict):
        for part in value.values():
            _find(part, found)
    elif isinstance(value, (tuple, list)):
        for part in value:
            _find(part, found)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            _find(getattr(value, name), found)


def copy_tensors(source: Any, target: Any) -> None:
    """The tensors of `source` into those of `target`, which is built alike."""
    copy_all(zip(tensors_in(source), tensors_in(target), strict=True))


LARGE = 2**17
"""Elements of a tensor that is copied by itself: a kernel of many tensors has one program for every
65,536 elements, and those of a large tensor would be too few to keep a GPU busy."""


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """The first of each pair into the second; on a GPU one kernel for the small of a dtype."""
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
    """Copies in another dtype; on a GPU one kernel for the small."""
    made = {name: torch.empty_like(t, dtype=dtype) for name, t in tree.items()}
    copy_tensors(tree, made)
    return made


def copies(value: Any) -> Any:
    """`value` with tensors of its own; on a GPU one kernel for the small of a dtype."""
    found = tensors_in(value)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(found):
        if tensor.numel() >= LARGE or tensor.dtype is torch.bool:
            found[place] = tensor.clone()
        else:
            by_dtype.setdefault(tensor.dtype, []).append(place)
    for places in by_dtype.values():
        # Times 1 is a copy, and torch makes no other of many tensors at once.
        made = torch._foreach_mul([found[place] for place in places], 1)
        for place, copy in zip(places, made, strict=True):
            found[place] = copy
    copied = iter(found)
    return map_tensors(value, lambda _: next(copied))


def stack(values: Sequence[Any]) -> Any:
    """Dicts that are built alike as one, whose tensors have a row of each.

    That is no copy if there is one alone, or if they are the rows of what was unstacked. Of none
    there is nothing.
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
    """The same with the names of its dicts in alphabetical order, one within another."""
    if not isinstance(value, dict):
        return value
    return {name: in_order(value[name]) for name in sorted(value)}


def unstack(value: Any, count: int) -> list[Any]:
    """The `count` rows of tensors, each as `value` is built: views."""
    return [map_tensors(value, itemgetter(row)) for row in range(count)]


def join(values: Sequence[Any]) -> Any:
    """Rows of tensors one after another, down through dicts and tuples with names."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, dict):
        return {name: join([value[name] for value in values]) for name in first}
    if first is None:
        return None
    columns = map(join, zip(*values, strict=True))
    return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)


class HostCopy:
    """A value whose tensors are on their way from a GPU, so that reading waits for nothing else."""

    def __init__(self, value: Any) -> None:
        self.value, self.event = value, None
        if any(t.is_cuda for t in tensors_in(value)):
            self.value = map_tensors(value, _on_its_way)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    @property
    def is_under_way(self) -> bool:
        return self.event is not None

    def read(self) -> Any:
        if self.event is not None:
            self.event.synchronize()
        return self.value


def _on_its_way(tensor: Tensor) -> Tensor:
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def moved(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on the device, without waiting for what is under way there."""
    if device.type == "cpu":
        return value
    return map_tensors(
        value, lambda t: t if t.device == device else t.pin_memory().to(device, non_blocking=True)
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """Its numbers as bytes, in the order of its axes, without a copy where they lie so on a CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
