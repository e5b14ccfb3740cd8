"""Shell completion of names and of experiment keys, without importing PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

import click

from fedlens.config.names import DATASETS, KINDS, RECIPES, SCHEDULES

NOT_TO_GET = (
    "fashion-mnist-mini",
    "at-sites",
    "folder",
    "csv",
    "npz",
    "hugging-face",
)  # built in or user data


def known_keys() -> Iterable[str]:
    from fedlens.config.explained import keys

    return keys()


def overrides(ctx: click.Context, incomplete: str) -> list[str]:
    """Keys of an experiment and, after a key, the names that can be chosen for it.

    Bash splits words at "=" and replaces only the part after it; other shells pass the whole word.
    """
    cut = _cut_off(ctx.params.get("overrides") or [], ctx.params.get("axes") or [])
    return _values("", cut, incomplete) if cut else _keys(incomplete)


def items(ctx: click.Context, incomplete: str) -> list[str]:
    """Tables and figures that are not named yet; after the first, also keys as in `overrides`."""
    words: list[str] = ctx.params.get("words") or []
    cut = _cut_off(words, [])
    if cut:
        return _values("", cut, incomplete)
    others = _names([name for name in RECIPES if name not in words], incomplete)
    return [*others, *_keys(incomplete)] if words else others


def _keys(incomplete: str) -> list[str]:
    key, equals, value = incomplete.partition("=")
    if equals:
        return _values(f"{key}=", key, value)
    fitting = _names(known_keys(), key)
    found = [f"{name}=" for name in fitting]
    if len(found) == 1:  # with the values added, shells see that the word goes on: no space
        found += _values(found[0], fitting[0], "") or [f"{found[0]}..."]
    return found


def _cut_off(arguments: list[str], axes: list[str]) -> str:
    """The key before the "=" of the word being typed, if bash has split it off; else empty.

    For `--grid key=value`, the option's value is the key, and the rest is among the arguments.
    """
    known = known_keys()
    last = arguments[-1] if arguments else ""
    if last in known:
        return last
    behind = [place for place, word in enumerate(arguments) if word == "="]
    of_axes = [place for place in behind if place == 0 or arguments[place - 1] not in known]
    if last == "=" and len(arguments) - 1 not in of_axes:
        return arguments[-2]
    cut = [axis for axis in axes if axis in known]
    awaited = len(of_axes) < len(cut) or last == "="
    return cut[-1] if cut and awaited else ""


def keys(incomplete: str) -> list[str]:
    """Keys and sections of an experiment, and all names."""
    sections = [key.partition(".")[0] for key in known_keys()]
    named = [name for table in KINDS.values() for name in table]
    return _names(dict.fromkeys([*sections, *known_keys(), *named]), incomplete)


def data_sets(incomplete: str) -> list[str]:
    """The data sets that can be downloaded and checked."""
    return _names([name for name in DATASETS if name not in NOT_TO_GET], incomplete)


def large_data_sets(incomplete: str) -> list[str]:
    """The data sets that `fedlens data prepare` decodes once."""
    prepared = [name for name, module in DATASETS.modules.items() if module == "store"]
    return _names(prepared, incomplete)


def _values(prefix: str, key: str, incomplete: str) -> list[str]:
    from fedlens.config.experiment import chosen_by_name

    table = chosen_by_name().get(key, ())
    # A schedule is written as a table with options: its name alone is no valid value.
    return [] if table is SCHEDULES else [f"{prefix}{one}" for one in _names(table, incomplete)]


def _names(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
