"""How long something takes, in words."""

import time


def span(seconds: float) -> str:
    """A duration in s, min or h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def until(over: float | None) -> str:
    """How long it is until then, in words."""
    now = time.monotonic()
    return f"about {span(over - now)} left" if over is not None and over > now else ""
