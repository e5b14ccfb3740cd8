"""What a CUDA graph does to memory, on a machine without a GPU."""

from collections.abc import Callable
from typing import Any

import torch

from fedlens.trees import copy_tensors, map_tensors


class EagerCapture:
    """A `graphs.Capture` that computes the function again on the captured memory at every play.

    It is as slow as no capture, and reads and writes what a graph would.
    """

    def __init__(self, function: Callable[..., Any], inputs: Any, pool: Any) -> None:
        self.function, self.inputs = function, inputs
        self.result = function(*map_tensors(inputs, torch.clone))

    def play(self) -> None:
        again = self.function(*self.inputs)
        with torch.no_grad():
            copy_tensors(again, self.result)
