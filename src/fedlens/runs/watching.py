"""Who is told how far a run is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from inspect import iscoroutinefunction, isgeneratorfunction, signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlens.runs.summary import Record

WITHIN = {  # of a round
    "trained": "clients trained",
    "stepped": "steps of a client",
    "tested": "images tested",
}
ASIDE = {  # of what is done besides rounds
    "decoded": "reading images",
    "planned": "counting what clients train on, client",
    "twin": "training its centralised twin, pass",
    "tuned": "fine-tuning each client's model, pass",
    "alone": "training clients by themselves, pass",
    "drawn": "resampling examples for intervals,",
}
SHORT = {  # what a bar, which has less room than a line, calls all of these
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
"""Is called with each record of a run, and with what is done besides (`ASIDE`)."""


@dataclass(frozen=True)
class Watching:
    """A watch that is also told how far a round is. Whoever only wants records need not be."""

    watch: Callable[..., None]
    within: Callable[[Record], None]  # called with a key of `WITHIN`, and `of` how many

    def __call__(self, *told: Any) -> None:
        self.watch(*told)


def expect_watch(given: Any, what: str) -> None:
    """Refuse what cannot be called with a record before anything is run."""
    if given is None:
        return
    if isinstance(given, ContextDecorator):  # it can be called, and would do nothing
        raise ValueError(f"{what} is given a watch that was not begun: use with ... as watch")
    if not callable(given) or not _takes_one(given):
        name = getattr(given, "__name__", f"of type {type(given).__name__}")
        raise ValueError(f"{what} is given a watch {name}: give a function of one record")


def _takes_one(given: Callable[..., Any]) -> bool:
    """Whether it does something when it is called with one record."""
    if isinstance(given, type) or iscoroutinefunction(given) or isgeneratorfunction(given):
        return False
    try:
        signature(given).bind({})
    except TypeError:
        return False
    except ValueError:  # of a function that is not written in Python nobody knows
        pass
    return True


def within_of(watch: Callable[..., None] | None) -> Callable[[Record], None]:
    """What tells a watch how far a round is, if it wants to know."""
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
