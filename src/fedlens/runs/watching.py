"""Callbacks that receive the progress of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from inspect import iscoroutinefunction, isgeneratorfunction, signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlens.runs.summary import Record

WITHIN = {  # progress within a round
    "trained": "clients trained",
    "stepped": "steps of a client",
    "tested": "images tested",
}
ASIDE = {  # progress outside of rounds
    "decoded": "reading images",
    "planned": "counting what clients train on, client",
    "twin": "training its centralised twin, pass",
    "tuned": "fine-tuning each client's model, pass",
    "alone": "training clients by themselves, pass",
    "drawn": "resampling examples for intervals,",
}
SHORT = {  # shorter texts for all of these, for bars
    "trained": "trained",
    "stepped": "steps",
    "tested": "tested",
    "decoded": "reading images",
    "planned": "twin: client",
    "twin": "twin: pass",
    "tuned": "fine-tuning: pass",
    "alone": "alone: pass",
    "drawn": "intervals:",
}

Watch = Callable[["Record"], None]
"""A callback for each record of a run, and for progress outside of rounds (`ASIDE`)."""


@dataclass(frozen=True)
class Watching:
    """A watch that also receives progress within a round. A plain watch receives records only."""

    watch: Callable[..., None]
    within: Callable[[Record], None]  # called with a key of `WITHIN`, and the total `of`

    def __call__(self, *told: Any) -> None:
        self.watch(*told)


def expect_watch(given: Any, what: str) -> None:
    """Raise before anything runs if `given` cannot be called with a record."""
    if given is None:
        return
    if isinstance(given, ContextDecorator):  # callable, but a call would do nothing
        raise ValueError(f"{what} is given a watch that was not begun: use with ... as watch")
    if not callable(given) or not _takes_one(given):
        name = getattr(given, "__name__", f"of type {type(given).__name__}")
        raise ValueError(f"{what} is given a watch {name}: give a function of one record")


def _takes_one(given: Callable[..., Any]) -> bool:
    """Whether a call with one record works, and runs the function."""
    if isinstance(given, type) or iscoroutinefunction(given) or isgeneratorfunction(given):
        return False
    try:
        signature(given).bind({})
    except TypeError:
        return False
    except ValueError:  # unknown for a function that is not written in Python
        pass
    return True


def within_of(watch: Callable[..., None] | None) -> Callable[[Record], None]:
    """The callback of a watch for progress within a round; one that does nothing if it has none."""
    return watch.within if isinstance(watch, Watching) else lambda _: None


def all_of(*watches: Callable[..., None] | None) -> Watching:
    """One watch that calls several."""

    def watch_all(*told: Any) -> None:
        for watch in watches:
            if watch is not None:
                watch(*told)

    def tell_all(record: Record) -> None:
        for watch in watches:
            within_of(watch)(record)

    return Watching(watch_all, tell_all)
