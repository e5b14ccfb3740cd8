"""What work takes, counted and not timed: the same on every machine, however busy it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


def num_calls(work: Callable[[], object]) -> int:
    """How many functions are called, those of Python and those of C, while `work` runs."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


ALLOCATES = ("aten::empty", "aten::new_empty")


class Operations(TorchDispatchMode):
    """Counts the operations of torch that compute something: on a GPU each launches a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_view = any(a.alias_info is not None for a in func._schema.returns)
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if (writes or not is_view) and not func._schema.name.startswith(ALLOCATES):
            self.count += 1
        return func(*args, **(kwargs or {}))
