"""The confidence interval of a share that was counted on a few examples."""

from __future__ import annotations

import math

Z95 = 1.959963984540054  # the normal quantile of a two-sided interval of 95%


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share among `count` examples; valid for few examples, too."""
    if count < 1:
        return 0.0, 1.0
    z2 = Z95 * Z95
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    within = share * (1 - share) / count + z2 / (4 * count * count)
    half = Z95 * math.sqrt(within) / (1 + z2 / count)
    return max(middle - half, 0.0), min(middle + half, 1.0)
