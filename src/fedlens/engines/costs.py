"""Estimates how long clients will take from how long others took."""

from collections import deque

import torch
from torch import Tensor

ENOUGH, MOST = 8, 512  # measured tasks: needed for an estimate, and kept


class Costs:
    """The seconds per step and per example, measured as clients train.

    A step has a fixed cost besides its examples, so neither count alone predicts the time.
    """

    def __init__(self) -> None:
        self.seen: deque[tuple[float, float, float]] = deque(maxlen=MOST)

    def learn(self, steps: float, examples: float, seconds: float) -> None:
        self.seen.append((steps, examples, seconds))

    @property
    def are_seconds(self) -> bool:
        """Whether enough tasks were measured to estimate seconds."""
        return len(self.seen) >= ENOUGH

    def of(self, steps: Tensor, examples: Tensor) -> list[float]:  # [C] each
        """The cost of each client: seconds, or its number of examples until enough are measured."""
        if not self.are_seconds:
            return [float(count) for count in examples]
        known = torch.tensor(list(self.seen), dtype=torch.float64)
        # Least squares; this driver also solves rank-deficient problems (all clients alike).
        prices = torch.linalg.lstsq(known[:, :2], known[:, 2:], driver="gelsd").solution
        work = torch.stack([steps, examples], 1).double()
        found: list[float] = (work @ prices.clamp(min=0)).flatten().tolist()
        return found
