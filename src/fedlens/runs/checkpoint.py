"""States as files: their tensors as safetensors, their structure as JSON.

This module does not depend on the fields of `State`: a state is any nesting of dicts and
dataclasses with tensors and plain numbers. In the JSON description, a dict or dataclass is an
object with its names in order; a dict by client is a list of the clients and the description of
their values, stacked into one tensor for all clients; a tensor is its name in the safetensors file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor

from fedlens.core import Tree
from fedlens.core.trees import map_tensors, stack, tensors_in, unstack


def describe(value: Any, tensors: Tree, path: str = "") -> Any:
    """The JSON description of `value`; its tensors are added to `tensors`, by path."""
    if isinstance(value, Tensor):
        assert path not in tensors, f"two tensors of a state are called {path}"
        tensors[path] = value
        return path
    if isinstance(value, Mapping) and value and all(isinstance(key, int) for key in value):
        rows = list(value.values())
        if len({t.device for t in tensors_in(rows)}) > 1:  # some clients' memory is on the host
            rows = map_tensors(rows, Tensor.cpu)
        return [list(value), describe(stack(rows), tensors, path)]
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        prefix = f"{path}/" if path else ""
        return {name: describe(part, tensors, f"{prefix}{name}") for name, part in value.items()}
    assert value is None or isinstance(value, (int, float)), f"{path} of a state is {value!r}"
    return value


def restore(kind: Any, described: Any, tensors: Tree) -> Any:
    """The described object of type `kind`, with separate memory for the tensors of each client."""
    if isinstance(described, str):
        return tensors[described]
    if isinstance(described, list):
        clients, joint = described
        rows = unstack(restore(None, joint, tensors), len(clients))
        own = [map_tensors(row, torch.clone) for row in rows]
        return dict(zip(clients, own, strict=True))
    if isinstance(described, dict):
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        parts = {n: restore(hints.get(n), part, tensors) for n, part in described.items()}
        return cast(Any, kind)(**parts) if is_dataclass(kind) else parts
    return described


def to_bytes(tensors: Tree) -> bytes:
    """The tensors as a safetensors file, in which no two tensors may share memory."""
    from safetensors.torch import save

    own: Tree = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    content: bytes = save(own)
    return content


def from_bytes(content: bytes, device: torch.device) -> Tree:
    from safetensors.torch import load

    return {name: tensor.to(device) for name, tensor in load(content).items()}
