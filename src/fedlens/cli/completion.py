"""What a shell completes: names, and keys of experiments. It imports no PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

import click

from fedlens.described import descriptions
from fedlens.names import CHOSEN_BY_NAME, DATASETS, RECIPES, SCHEDULES

NOT_TO_GET = ("fashion-mnist-mini", "folder", "csv", "npz", "hugging-face")  # here, or one's own


def overrides(ctx: click.Context, incomplete: str) -> list[str]:
    """Keys of an experiment and, behind a key, what can be chosen for it by name.

    Bash cuts words at "=" and replaces what is behind it alone; other shells hand over the whole.
    """
    cut = _cut_off(ctx.params.get("overrides") or [], ctx.params.get("axes") or [])
    return _values("", cut, incomplete) if cut else _keys(incomplete)


def items(ctx: click.Context, incomplete: str) -> list[str]:
    """Tables and figures that are not named yet and, behind the first, keys as `overrides` has."""
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
    fitting = _names(descriptions(), key)
    found = [f"{name}=" for name in fitting]
    if len(found) == 1:  # with its values shells see that the word goes on, and add no space
        found += _values(found[0], fitting[0], "") or [f"{found[0]}..."]
    return found


def _cut_off(arguments: list[str], axes: list[str]) -> str:
    """The key that bash has cut off what is typed now, if it has.

    Of `--grid key=value` the option has the key, and the rest has come among the arguments.
    """
    known = descriptions()
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
    """Keys of an experiment, and its sections."""
    sections = [key.partition(".")[0] for key in descriptions()]
    return _names(dict.fromkeys([*sections, *descriptions()]), incomplete)


def data_sets(incomplete: str) -> list[str]:
    """Those that can be got and checked."""
    return _names([name for name in DATASETS if name not in NOT_TO_GET], incomplete)


def large_data_sets(incomplete: str) -> list[str]:
    """Those that are prepared once."""
    prepared = [name for name, module in DATASETS.modules.items() if module == "prepared"]
    return _names(prepared, incomplete)


def _values(prefix: str, key: str, incomplete: str) -> list[str]:
    table = CHOSEN_BY_NAME.get(key, ())
    # A schedule stands in a table, with its options: its name alone is nothing for a number.
    return [] if table is SCHEDULES else [f"{prefix}{one}" for one in _names(table, incomplete)]


def _names(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
