"""Options of what is chosen by name, in words: what the docstring of its function says of each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

from fedlens.core import Number
from fedlens.names import CHOSEN_BY_NAME, SCHEDULES
from fedlens.options import ByName, did_you_mean, in_words, options_of

SCHEDULED = (Number, Number | None, float, float | None)  # types of numbers that may be schedules
MOST_NAMED = 3  # in a line that asks what was meant


def explained(key: str, said: Callable[[Any], str]) -> list[str] | None:
    """Lines about a name, as algorithm.fedprox, or about an option; None: it is neither.

    `said` writes a default. An option may be asked for without a name: all that have it are told.
    """
    place = next((place for place in CHOSEN_BY_NAME if key.startswith(f"{place}.")), None)
    if place is None:
        return None
    table = CHOSEN_BY_NAME[place]
    word, _, option = key[len(place) + 1 :].partition(".")
    if word in table:
        options = options_of(table[word])
        if not option:
            lines = [_said_of(f"{place}.{word}", _sentences(table[word])[0])]
            return lines + [
                "  " + _said_of(f"{place}.{word}.{one}", about(table[word], one)) for one in options
            ]
        if option in options:
            return _option(place, word, option, said)
        hint = did_you_mean(option, options) if options else "it takes none"
        raise ValueError(f"{place} {word!r} has no option {option!r}: {hint}")
    named = [] if option else [name for name in table if word in options_of(table[name])]
    if not named:
        raise ValueError(f"unknown key {key!r}: {_near(key, place, table)}")
    return [line for name in named for line in _option(place, name, word, said)]


def places_of(option: str) -> list[str]:
    """The keys by which this option is known, but those of schedules, which are of many numbers."""
    keys = [
        key
        for place, table in CHOSEN_BY_NAME.items()
        if table is not SCHEDULES
        for key in _option_keys(place, table)
    ]
    return [key for key in keys if key.endswith(f".{option}")]


def about(function: Callable[..., Any], option: str) -> str:
    """What a docstring says of an option: below Args, or in the sentences that name it."""
    text = inspect.getdoc(function) or ""
    listed = re.search(rf"^    {option}_?: (.*(?:\n {{8}}.*)*)", text, re.MULTILINE)
    if listed is not None:
        return " ".join(listed[1].split())
    sentences = _sentences(function)
    for form in (f"`{option}`", rf"\b{option}\b"):
        found = [one for one in sentences if re.search(form, one)]
        if found:
            return " ".join(found)
    return ""


def _option(place: str, name: str, option: str, said: Callable[[Any], str]) -> list[str]:
    function = CHOSEN_BY_NAME[place][name]
    parameter = options_of(function)[option]
    lines = [_said_of(f"{place}.{name}.{option}", about(function, option))]
    may_change = place == "algorithm" and parameter.annotation in SCHEDULED
    lines.append(in_words(parameter.annotation) + ", or a schedule" * may_change)
    needed = parameter.default is parameter.empty
    return [*lines, "it must be given" if needed else f"default: {said(parameter.default)}"]


def _said_of(key: str, text: str) -> str:
    return f"{key}: {text}" if text else key


def _sentences(function: Callable[..., Any]) -> list[str]:
    """Those of a docstring, without what it lists below Args."""
    text = " ".join((inspect.getdoc(function) or "").partition("\nArgs:")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", text)


def _option_keys(place: str, table: ByName) -> Iterator[str]:
    for name, function in table.items():
        yield from (f"{place}.{name}.{option}" for option in options_of(function))


def _near(key: str, place: str, table: ByName) -> str:
    """What may have been meant by a key below `place`: the nearest, or all names there are."""
    begin = f"{place}."  # is right, and would make all keys look near
    options = [one.removeprefix(begin) for one in _option_keys(place, table)]
    known = dict.fromkeys([*table, *options, *(one.rpartition(".")[2] for one in options)])
    near = get_close_matches(key.removeprefix(begin), known, n=MOST_NAMED, cutoff=0.7)
    if near:
        return f"did you mean {' or '.join(begin + one for one in near)}?"
    return f"choose one of {', '.join(table)}"
