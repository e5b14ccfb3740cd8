"""Explains a key of experiments, a section, a name or an option, without PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from fedlens.described import Choice, choices, descriptions, schema
from fedlens.names import CHOSEN_BY_NAME, KINDS, SCHEDULES
from fedlens.options import did_you_mean

MOST_NAMED = 3  # suggestions in an error message


def explain(key: str) -> list[str]:
    """Lines about a key (its meaning, its values, its default) or about a whole section.

    `key` may also be a name, as algorithm.fedprox, or an option of it, as algorithm.fedprox.mu. For
    an option without a name, as algorithm.mu, there are lines about all names that have it.
    """
    known = _keys(schema(), "")
    inside = [name for name in known if name.startswith(f"{key}.")]
    if key not in known and not inside:
        if (lines := _chosen(key)) is not None:
            return lines
        places = [name for name in known if name.rpartition(".")[2] == key] or _places_of(key)
        sections = {name.partition(".")[0] for name in known}
        near = get_close_matches(key, {*known, *sections}, n=1) or sections
        hint = f"did you mean {' or '.join(places)}?" if places else did_you_mean(key, near)
        raise ValueError(f"unknown key {key!r}: {hint}")
    lines = [_said_of(key, descriptions().get(key, ""))]
    if inside:
        return lines + [f"  {_said_of(name, descriptions().get(name, ''))}" for name in inside]
    if known[key] is not None:
        lines.append(f"default: {known[key]}")
    if key in CHOSEN_BY_NAME:
        numbers = CHOSEN_BY_NAME[key] is SCHEDULES
        lines.append("a number, or a schedule:" if numbers else "one of:")
        lines += [f"  {called(name, one)}" for name, one in _choices(key).items()]
        lines.append("  or a function of your own, as module:function")
    return lines


def called(name: str, choice: Choice) -> str:
    """A name with its options and their defaults, in a line."""
    options = [
        f"{option} = {'...' if one['default'] is None else one['default']}"
        for option, one in choice["options"].items()
    ]
    return f"{name} ({', '.join(options)})" if options else name


def _keys(section: dict[str, Any], prefix: str) -> dict[str, str | None]:
    """Every key, those of sections with dots, and its default, or None if it must be given."""
    found: dict[str, str | None] = {}
    for name, one in section["properties"].items():
        key = f"{prefix}{name}"
        if "properties" in one:
            found |= _keys(one, f"{key}.")
        elif name in section.get("required", ()):
            found[key] = None
        else:
            found[key] = json.dumps(one["default"]) if "default" in one else "none"
    return found


def _choices(place: str) -> dict[str, Choice]:
    """What can be chosen by name for a key."""
    kind = next(kind for kind, table in KINDS.items() if table is CHOSEN_BY_NAME[place])
    return choices()[kind]


def _chosen(key: str) -> list[str] | None:
    """Lines about a name or an option; None if `key` is not below a key that takes names."""
    place = next((place for place in CHOSEN_BY_NAME if key.startswith(f"{place}.")), None)
    if place is None:
        return None
    table = _choices(place)
    word, _, option = key[len(place) + 1 :].partition(".")
    choice = table.get(word) or _of_a_library(place, word)
    if choice is not None:
        options = choice["options"]
        if not option:
            lines = [_said_of(f"{place}.{word}", choice["about"])]
            return lines + [
                "  " + _said_of(f"{place}.{word}.{name}", one["about"])
                for name, one in options.items()
            ]
        if option in options:
            return _option(place, word, choice, option)
        hint = did_you_mean(option, options) if options else "it takes none"
        raise ValueError(f"{place} {word!r} has no option {option!r}: {hint}")
    named = [] if option else [name for name in table if word in table[name]["options"]]
    if not named:
        raise ValueError(f"unknown key {key!r}: {_near(key, place)}")
    return [line for name in named for line in _option(place, name, table[name], word)]


def _of_a_library(place: str, name: str) -> Choice | None:
    """The description of a name of another package, as timm:resnet18, which is imported for it."""
    if name not in CHOSEN_BY_NAME[place]:
        return None
    from fedlens.schema import choice

    return choice(CHOSEN_BY_NAME[place][name], scheduled=False)


def _option(place: str, name: str, choice: Choice, option: str) -> list[str]:
    one = choice["options"][option]
    default = "it must be given" if one["default"] is None else f"default: {one['default']}"
    return [_said_of(f"{place}.{name}.{option}", one["about"]), one["type"], default]


def _said_of(key: str, text: str) -> str:
    return f"{key}: {text}" if text else key


def _places_of(option: str) -> list[str]:
    """The full keys of this option, except options of schedules, which many keys take."""
    places = [place for place, table in CHOSEN_BY_NAME.items() if table is not SCHEDULES]
    keys = [f"{place}.{one}" for place in places for one in _options(place)]
    return [key for key in keys if key.endswith(f".{option}")]


def _options(place: str) -> Iterator[str]:
    """The options of all choices for a key, as `name.option`."""
    for name, choice in _choices(place).items():
        yield from (f"{name}.{option}" for option in choice["options"])


def _near(key: str, place: str) -> str:
    """A hint for an unknown key below `place`: the nearest known keys, or else all names."""
    begin = f"{place}."  # known to be right; compared too, it would make all keys look near
    names, options = _choices(place), list(_options(place))
    known = dict.fromkeys([*names, *options, *(one.rpartition(".")[2] for one in options)])
    near = get_close_matches(key.removeprefix(begin), known, n=MOST_NAMED, cutoff=0.7)
    if near:
        return f"did you mean {' or '.join(begin + one for one in near)}?"
    return f"choose one of {', '.join(names)}"
