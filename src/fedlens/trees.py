"""Tensors wherever they stand: in dicts, in records, in records of dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    found: list[Tensor] = []
    map_tensors(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


def copy_tensors(source: Any, target: Any) -> None:
    """The tensors of `source` into those of `target`, which is built alike."""
    copy_all(zip(tensors_in(source), tensors_in(target), strict=True))


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """The first tensor of each pair into the second; on a GPU in one kernel for each dtype."""
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for a, b in pairs:
        if a is not b:
            by_dtype.setdefault(a.dtype, []).append((a, b))
    for some in by_dtype.values():
        torch._foreach_copy_([b for _, b in some], [a for a, _ in some])


def join(values: Sequence[Any]) -> Any:
    """Rows of tensors one after another, down through dicts and tuples with names."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, dict):
        return {name: join([value[name] for value in values]) for name in first}
    if first is None:
        return None
    return type(first)(*map(join, zip(*values, strict=True)))


def moved(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on the device, without waiting for what is under way there."""
    if device.type == "cpu":
        return value
    return map_tensors(
        value, lambda t: t if t.device == device else t.pin_memory().to(device, non_blocking=True)
    )
