"""What a CUDA graph does to memory, on a machine without a GPU."""

from collections.abc import Callable
from typing import Any

import torch

from fedlens.core.trees import copy_tensors, map_tensors
from fedlens.engines.graphs import Captures


class EagerCapture:
    """A `graphs.Capture` that computes the function again on the captured memory at every replay.

    It is as slow as no capture, and reads and writes what a graph would.
    """

    def __init__(self, function: Callable[..., Any], inputs: Any, pool: Any) -> None:
        self.function, self.inputs = function, inputs
        self.result = function(*map_tensors(inputs, torch.clone))
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        again = self.function(*self.inputs)
        with torch.no_grad():
            copy_tensors(again, self.result)


def num_replays(recorder: Captures) -> int:
    """How often what it holds was replayed."""
    captures = [one.capture for one in recorder._captured.values()]
    return sum(one.num_replays for one in captures if isinstance(one, EagerCapture))
