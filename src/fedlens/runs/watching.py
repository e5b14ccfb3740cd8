"""Callbacks that receive the progress of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from inspect import iscoroutinefunction, isgeneratorfunction, signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlens.runs.summary import Record

ASIDE = {  # progress outside of rounds, in words for a line and for a bar
    "decoded": ("reading images", "reading images"),
    "planned": ("counting what clients train on, client", "twin: client"),
    "twin": ("training its centralised twin, pass", "twin: pass"),
    "tuned": ("fine-tuning each client's model, pass", "fine-tuning: pass"),
    "baseline": ("training FedAvg to compare, round", "FedAvg: round"),
    "alone": ("training clients by themselves, pass", "alone: pass"),
    "drawn": ("resampling examples for intervals,", "intervals:"),
}
WITHIN = {  # progress within a round
    "trained": ("clients trained", "trained"),
    "stepped": ("steps of a client", "steps"),
    "tested": ("images tested", "tested"),
}
OFTEN = ("planned", *WITHIN)  # told only to a `Watching`

Watch = Callable[["Record"], None]
"""A callback for each record of a run, and for progress outside of rounds (`ASIDE`)."""


@dataclass(frozen=True)
class Watching:
    """A watch that also receives progress within a round: a key of `WITHIN`, and the total `of`."""

    watch: Watch

    def __call__(self, record: Record) -> None:
        self.watch(record)


def tell(watch: Watch | None, record: Record) -> None:
    """Call a watch, if there is one, with a record or with progress that is for it."""
    is_for_all = not any(key in record for key in OFTEN)
    if watch is not None and (is_for_all or isinstance(watch, Watching)):
        watch(record)


def all_of(*watches: Watch | None) -> Watching:
    """One watch that tells several."""

    def tell_all(record: Record) -> None:
        for watch in watches:
            tell(watch, record)

    return Watching(tell_all)


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
