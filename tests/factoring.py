"""Linear layers of the engine `stacked`, with factors in the place of their weights or without."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedlens.engines import Stacked, factored


@contextmanager
def factoring(allowed: bool) -> Iterator[None]:
    """Layers are factored where that pays, or nowhere."""
    with pytest.MonkeyPatch.context() as patched:
        if not allowed:
            patched.setattr(factored, "WORTH_IT", 0)  # no factors are smaller than nothing
        yield


def has_factored(engine: Stacked) -> bool:
    """Whether it did so in the program that it ran last."""
    return engine._prepared is not None and bool(engine._prepared.forms)
