"""What a run folder says of how sure a model is and how often it is right. It needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

BINS = 100  # of confidence: thresholds are hundredths
DRAWN = 10  # bins of a figure

HELD_OUT = {
    "validation": "validation images",
    "clients": "images that clients set apart",
    "test": "test images",
}

Table = Sequence[Sequence[float]]
"""By bin of confidence: number of examples, sum of confidences, number of correct ones."""


class Calibration(NamedTuple):
    """A temperature, and the reliability on held-out images without it and with it."""

    part: str  # a key of HELD_OUT
    images: int
    temperature: float
    before: Table
    after: Table

    @classmethod
    def of(cls, evaluation: Mapping[str, Any], file: str) -> Calibration | None:
        """That of the model in a file, as recorded; None if there is none, or not a whole one."""
        try:
            found = cls(**evaluation["calibration"][file])
            tables = [math.fsum(map(math.fsum, t)) for t in (found.before, found.after)]
            sizes = {len(row) for t in (found.before, found.after) for row in t}
            sound = sizes == {BINS} and len(found.before) == len(found.after) == 3
            sound &= found.part in HELD_OUT and isinstance(found.images, int)
            sound &= found.temperature > 0 and min(sum(found.before[0]), sum(found.after[0])) > 0
            return found if sound and all(map(math.isfinite, tables)) else None
        except (LookupError, TypeError, ValueError, OverflowError):
            return None

    @property
    def errors(self) -> list[float]:
        """The expected calibration errors before and after, of the figure's bins."""
        return [
            sum(abs(sure - right) for _, sure, right in _bins(table)) / sum(table[0])
            for table in (self.before, self.after)
        ]

    def unsure(self, least: float) -> tuple[float, float]:
        """The share of images that get no answer of this probability, a number of hundredths, and
        the accuracy on the others, NaN if there are none."""
        count, _, right = (row[round(least * BINS) :] for row in self.after)
        share = 1 - sum(count) / sum(self.after[0])
        return share, sum(right) / sum(count) if sum(count) else math.nan


def curve(table: Table) -> tuple[list[float], list[float]]:
    """The mean confidence and the accuracy of each bin of a figure that has examples."""
    points = [(sure / count, right / count) for count, sure, right in _bins(table) if count]
    return [x for x, _ in points], [y for _, y in points]


def _bins(table: Table) -> list[tuple[float, float, float]]:
    width = BINS // DRAWN
    sums = ([sum(row[i : i + width]) for i in range(0, BINS, width)] for row in table)
    return list(zip(*sums, strict=True))
