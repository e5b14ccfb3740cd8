"""Keys of experiments, and what can be chosen by name, in words and as a JSON Schema.

Nothing is described twice: what a key means stands below its field, and what a name and its options
mean in the docstring of the function. Nothing of it needs PyTorch.
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from inspect import Parameter
from typing import Annotated, Any, Literal, NamedTuple, Union

from fedlens.config.experiment import Experiment, as_plain, chosen_by_name, fields_by_key
from fedlens.config.names import ENGINES, KINDS, SCHEDULES
from fedlens.config.options import (
    Bounds,
    ByName,
    Given,
    Named,
    did_you_mean,
    in_words,
    nearest,
    types_of,
    written,
)
from fedlens.config.signatures import words_of

MOST_NAMED = 3  # suggestions in an error message


class Key(NamedTuple):
    """A key of experiments: what it means, and its default, or None if it must be given."""

    words: str
    default: str | None


class Option(NamedTuple):
    """An option of something that is chosen by name."""

    words: str
    type: str
    default: str | None  # None: it must be given


class Choice(NamedTuple):
    """Something that can be chosen by name: a description of one line, and its options."""

    words: str
    options: dict[str, Option]


@cache
def keys() -> dict[str, Key]:
    """Every key of an experiment, those of sections with dots; sections with a meaning too."""
    return {
        key: Key(_without_marks(words), None if f.default is MISSING else _said(f.default))
        for key, (kind, f) in fields_by_key().items()
        if (words := words_of(kind).get(f.name)) is not None
    }


def _without_marks(text: str) -> str:
    """The words of a field without Markdown: links name a page of the docs."""

    def page(link: re.Match[str]) -> str:
        name, target = link[1], link[2].partition("#")[0]
        return f"docs/{name}" if name.endswith(".md") else f"{name} (docs/{target})"

    return re.sub(r"\[([^]]*)\]\(([^)]*)\)", page, text).replace("`", "")


def choices(table: ByName) -> dict[str, Choice]:
    return {name: choice(table, name) for name in table}


def choice(table: ByName, name: str) -> Choice:
    """The description of a function and its options; numbers of algorithms may be schedules."""
    doc, known = table.read(name)
    options: dict[str, Option] = {}
    for option, parameter in known.items():
        options[option] = Option(
            _about(doc, option),
            in_words(parameter.annotation) + ", or a schedule" * table.may_be_scheduled(parameter),
            None if parameter.default is parameter.empty else _said(parameter.default),
        )
    return Choice(doc.partition("\n")[0], options)


def _about(doc: str, option: str) -> str:
    """What a docstring says about an option: below Args, or in the sentences that name it."""
    listed = re.search(rf"^    {option}_?: (.*(?:\n {{8}}.*)*)", doc, re.MULTILINE)
    if listed is not None:
        return " ".join(listed[1].split())
    sentences = re.split(r"(?<=\.) (?=[A-Z`])", " ".join(doc.partition("\nArgs:")[0].split()))
    for form in (f"`{option}`", rf"\b{option}\b"):
        if found := [one for one in sentences if re.search(form, one)]:
            return " ".join(found)
    return ""


def _said(value: Any) -> str:
    return "none" if value is None else json.dumps(as_plain(value), default=str)


def in_a_line(name: str, choice: Choice) -> str:
    """A name with its options and their defaults, in a line."""
    options = [f"{option} = {one.default or '...'}" for option, one in choice.options.items()]
    return f"{name} ({', '.join(options)})" if options else name


def explain(key: str) -> list[str]:
    """Lines about a key (its meaning, its values, its default) or about a whole section.

    `key` may also be a name, as fedprox or algorithm.fedprox, or an option of it, as fedprox.mu.
    For an option without a name, as algorithm.mu, there are lines about all names that have it.
    """
    known = keys()
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        first = _line(key, known[key].words if key in known else "")
        return [first, *(f"  {_line(name, known[name].words)}" for name in inside)]
    if key not in known:
        return _by_name(key)
    lines = [_line(key, known[key].words)]
    if known[key].default is not None:
        lines.append(f"default: {known[key].default}")
    if (table := chosen_by_name().get(key)) is not None:
        lines.append("a number, or a schedule:" if table is SCHEDULES else "one of:")
        lines += [f"  {in_a_line(name, one)}" for name, one in choices(table).items()]
        lines.append("  or a function of your own, as module:function")
    return lines


def _by_name(key: str) -> list[str]:
    """Lines about a name or an option, below a key that takes names or without it."""
    chosen = chosen_by_name()
    below = next((place for place in chosen if key.startswith(f"{place}.")), None)
    first = {table: place for place, table in reversed(chosen.items())} | {ENGINES: "engine"}
    tables = (
        {first.get(t, ""): t for t in KINDS.values()} if below is None else {below: chosen[below]}
    )
    lines = []
    for place, table in tables.items():
        name, _, option = key.removeprefix(f"{place}.").partition(".")
        if name in table:
            lines += _of_name(place, table, name, option)
        elif below is not None and not option:
            having = [one for one in table if name in table.read(one).options]
            lines += [line for one in having for line in _of_name(place, table, one, name)]
    if not lines:
        raise ValueError(f"unknown key {key!r}: {_nearest_to(key, below)}")
    also = [name for name in keys() if name.rpartition(".")[2] == key]
    return [*lines, *(f"see also: {name}" for name in also)]


def _of_name(place: str, table: ByName, name: str, option: str) -> list[str]:
    """Lines about a name or, if it is not empty, about one of its options."""
    words, options = choice(table, name)
    whole = f"{place}.{name}".lstrip(".")
    if not option:
        each = (_line(f"{whole}.{one}", options[one].words) for one in options)
        return [_line(whole, words), *(f"  {line}" for line in each)]
    if option not in options:
        hint = did_you_mean(option, options) if options else "it takes none"
        raise ValueError(f"{place} {name!r} has no option {option!r}: {hint}".lstrip())
    said, kind, default = options[option]
    given = "it must be given" if default is None else f"default: {default}"
    return [_line(f"{whole}.{option}", said), kind, given]


def _line(key: str, text: str) -> str:
    return f"{key}: {text}" if text else key


def _nearest_to(key: str, below: str | None) -> str:
    """The end of a message: keys, names and options that are like an unknown key."""
    chosen = {below: chosen_by_name()[below]} if below else chosen_by_name()
    sections = sorted({name.partition(".")[0] for name in keys()})
    options = [
        f"{place}.{name}.{option}"
        for place, table in chosen.items()
        if below or table is not SCHEDULES  # which many keys take
        for name in table
        for option in table.read(name).options
    ]
    if below is not None:
        # What stands before is known to be right; compared too, it would make all keys look near.
        known = [*chosen[below], *(one.removeprefix(f"{below}.") for one in options)]
        known += [one.rpartition(".")[2] for one in known]
        near = nearest(key.removeprefix(f"{below}."), dict.fromkeys(known), MOST_NAMED, cutoff=0.7)
        same = [f"{below}.{one}" for one in near]
    else:
        known = [*keys(), *sections, *(name for table in KINDS.values() for name in table)]
        same = [name for name in keys() if name.rpartition(".")[2] == key]
        same = same or [one for one in options if one.endswith(f".{key}")] or nearest(key, known)
    others = sections if below is None else chosen[below]
    return f"did you mean {' or '.join(same)}?" if same else f"choose one of {', '.join(others)}"


Schema = dict[str, Any]
OF_YOUR_OWN = {"type": "string", "pattern": r"^[\w.]+:[\w.]+$"}  # module:function, or timm:name
LIMITS = {
    "least": "minimum",
    "above": "exclusiveMinimum",
    "most": "maximum",
    "below": "exclusiveMaximum",
}
PLAIN: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
}


def schema() -> Schema:
    """The JSON Schema of experiment files, by which editors check and complete them."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A Fedlens experiment",
        **_record(Experiment, ""),
    }


def _record(kind: Any, prefix: str) -> Schema:
    """The schema of a table whose keys are the fields of a dataclass."""
    properties, needed = {}, []
    for field in fields(kind):
        key = f"{prefix}{field.name}"
        one = _schema_of(types_of(kind)[field.name], key)
        if key in keys():
            one = {"description": keys()[key].words, **one}
        if field.default is MISSING:
            needed.append(field.name)
        elif (value := as_plain(field.default)) is not None and not isinstance(value, dict):
            one["default"] = value
        properties[field.name] = one
    made: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | ({"required": needed} if needed else {})


def _bounded(made: Schema, bounds: Bounds) -> Schema:
    """The schema with the bounds of its numbers."""
    given = bounds._asdict().items()
    limits = {LIMITS[name]: at for name, at in given if at not in (None, math.inf)}
    for one in made.get("anyOf", [made]):
        if one.get("type") in ("integer", "number"):
            one.update(limits)
    return made


def _schema_of(kind: Any, key: str, table: ByName | None = None) -> Schema:
    """The schema of what a file may contain for a value of this type, a name of a `table`."""
    if kind in PLAIN:
        return dict(PLAIN[kind])
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        found = next((rule for rule in inner[1:] if isinstance(rule, ByName)), None)
        bounds = next((rule for rule in inner[1:] if isinstance(rule, Bounds)), Bounds())
        return _bounded(_schema_of(inner[0], key, found), bounds)
    if origin is Given:  # the type it is read as is the more precise one
        return _schema_of(inner[-1], key, table)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return _any_of([_schema_of(one, key, table) for one in written(kind)])
    if origin in (tuple, list, Sequence):
        one = _schema_of(inner[0], key, table)
        listed: Schema = {"type": "array", "items": one}
        return _any_of([*one.get("anyOf", [one]), listed]) if inner[0] is Named else listed
    if kind is Named:  # an option may be a schedule whose options may be schedules, and so on
        return _choices_of(table) if key and table else {"type": "object", "required": ["name"]}
    if is_dataclass(kind):
        return _record(kind, f"{key}.")
    return {}  # anything


def _any_of(choices: list[Schema]) -> Schema:
    flat = [part for choice in choices for part in choice.get("anyOf", [choice])]
    return flat[0] if len(flat) == 1 else {"anyOf": flat}


def _choices_of(table: ByName) -> Schema:
    """A name, or a table of a name and its options."""
    own = {"type": "object", "properties": {"name": OF_YOUR_OWN}, "required": ["name"]}
    each = [_with_options(table, name) for name in table]
    return _any_of([{"enum": [*table]}, OF_YOUR_OWN, *each, own])


def _with_options(table: ByName, name: str) -> Schema:
    options = table.read(name).options
    needed = [option for option, one in options.items() if one.default is Parameter.empty]
    return {
        "type": "object",
        "properties": {
            "name": {"const": name},
            **{option: _option(one.annotation) for option, one in options.items()},
        },
        "required": ["name", *needed],
        "additionalProperties": False,
    }


def _option(kind: Any) -> Schema:
    """The schema of an option: a number may also be a table with a name, a schedule."""
    made = _schema_of(kind, "")
    numbers = made.get("type") in ("number", "integer")
    chosen = numbers or any(one.get("type") == "number" for one in made.get("anyOf", []))
    table: Schema = {"type": "object", "required": ["name"]}
    return _any_of([made, table]) if chosen else made
