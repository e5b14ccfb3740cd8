"""Who is told how far a run is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlens.runs.summary import Record

Watch = Callable[["Record"], None]
"""Is called with each record of a run, and with what is done besides (`progress.ASIDE`)."""


@dataclass(frozen=True)
class Watching:
    """A watch that is also told how far a round is. Whoever only wants records need not be."""

    watch: Callable[..., None]
    within: Callable[[Record], None]  # called with a key of `progress.WITHIN`, and `of` how many

    def __call__(self, *told: Any) -> None:
        self.watch(*told)


def expect_watch(given: Any, what: str) -> None:
    """Refuse what cannot be called before anything is run."""
    if given is not None and not callable(given):
        raise ValueError(
            f"{what} is given a watch of type {type(given).__name__}: give a function of one record"
        )


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
