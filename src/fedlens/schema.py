"""Experiment files described for programs and for people: a JSON Schema, and a key in words.

Nothing is described twice: types and defaults are those of `Experiment`, options are those of the
functions that are named, and what a key means is what docs/experiments.md says of it.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, Union

from torch import Tensor, nn

from fedlens.described import descriptions
from fedlens.experiment import Experiment, as_plain
from fedlens.explained import explained, places_of
from fedlens.federation import Dataset
from fedlens.names import CHOSEN_BY_NAME, SCHEDULES
from fedlens.options import Given, Named, did_you_mean, options_of, types_of

Schema = dict[str, Any]
Table = Mapping[str, Callable[..., Any]]

OF_YOUR_OWN = {"type": "string", "pattern": r"^[\w.]+:[\w.]+$"}  # module:function, or timm:name
LEAST = {"dataset": "fashion-mnist-mini", "model": "linear", "rounds": 1}
STEPS: dict[Any, float] = {"integer": 1, "number": 1e-9}  # to the next number that is tried
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


def explain(key: str) -> list[str]:
    """Lines about a key: what it means, what it may be, its default; or about a whole section.

    Also about a name, as algorithm.fedprox, and about an option of it, as algorithm.fedprox.mu.
    """
    known = _keys(Experiment, "")
    inside = {name: one for name, one in known.items() if name.startswith(f"{key}.")}
    if key not in known and not inside:
        if (lines := explained(key, _said)) is not None:
            return lines
        places = [name for name in known if name.rpartition(".")[2] == key] or places_of(key)
        sections = {name.partition(".")[0] for name in known}
        near = get_close_matches(key, {*known, *sections}, n=1) or sections
        hint = f"did you mean {' or '.join(places)}?" if places else did_you_mean(key, near)
        raise ValueError(f"unknown key {key!r}: {hint}")
    lines = [f"{key}: {described(key)}" if is_described(key) else key]
    if inside:
        return lines + [f"  {name}: {described(name)}".rstrip(": ") for name in inside]
    field = known[key]
    if field.default is not MISSING:
        lines.append(f"default: {_said(field.default)}")
    if key in CHOSEN_BY_NAME:
        numbers = CHOSEN_BY_NAME[key] is SCHEDULES
        lines.append("a number, or a schedule:" if numbers else "one of:")
        lines += [f"  {called(name, one)}" for name, one in CHOSEN_BY_NAME[key].items()]
        lines.append("  or a function of your own, as module:function")
    return lines


def is_described(key: str) -> bool:
    return key in descriptions()


def described(key: str) -> str:
    """What a key means, in the words of docs/experiments.md."""
    return descriptions().get(key, "")


def _keys(kind: Any, prefix: str) -> dict[str, Field[Any]]:
    """Every key with its field; those of a section in place of the section."""
    found: dict[str, Field[Any]] = {}
    for field in fields(kind):
        section = _section(types_of(kind)[field.name])
        key = f"{prefix}{field.name}"
        found |= {key: field} if section is None else _keys(section, f"{key}.")
    return found


def _section(kind: Any) -> Any:
    """The dataclass that a field holds, if it holds nothing else."""
    given = typing.get_args(kind)[-1] if typing.get_origin(kind) is Given else kind
    choices = [one for one in typing.get_args(given) or [given] if one is not type(None)]
    is_one = len(choices) == 1 and is_dataclass(choices[0]) and choices[0] is not Named
    return choices[0] if is_one else None


def called(name: str, function: Callable[..., Any]) -> str:
    """A name with its options and their defaults, in a line."""
    options = []
    for option, parameter in options_of(function).items():
        needed = parameter.default is inspect.Parameter.empty
        options.append(f"{option} = {'...' if needed else _said(parameter.default)}")
    return f"{name} ({', '.join(options)})" if options else name


def _said(value: Any) -> str:
    return "none" if value is None else json.dumps(as_plain(value), default=str)


def _record(kind: Any, prefix: str) -> Schema:
    """The schema of a table whose keys are the fields of a dataclass."""
    properties, needed = {}, []
    for field in fields(kind):
        key = f"{prefix}{field.name}"
        one = _bounded(_of(types_of(kind)[field.name], key), partial(_takes, kind, field.name))
        if is_described(key):
            one = {"description": described(key), **one}
        if field.default is MISSING:
            needed.append(field.name)
        elif (value := as_plain(field.default)) is not None and not isinstance(value, dict):
            one["default"] = value
        properties[field.name] = one
    made: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | ({"required": needed} if needed else {})


def _bounded(made: Schema, takes: Callable[[float], bool]) -> Schema:
    """With the bounds of its numbers, where these are 0 or 1: whoever checks them is asked."""
    for one in made.get("anyOf", [made]):
        step = STEPS.get(one.get("type"))
        if step is None:
            continue
        zero, end = type(step)(0), 1.0
        if not takes(-step) and takes(zero):
            one["minimum"] = 0
        elif not takes(-step) and takes(step):
            one["exclusiveMinimum"] = 0
        if isinstance(step, float) and not takes(end + step):
            if takes(end):
                one["maximum"] = 1
            elif takes(end - step):
                one["exclusiveMaximum"] = 1
    return made


def _takes(kind: Any, name: str, value: float) -> bool:
    """Whether a section, or the experiment, takes a number for one of its keys."""
    try:
        kind(**(LEAST if kind is Experiment else {}) | {name: value})
    except (TypeError, ValueError):  # other keys may be needed as well
        return False
    return True


def _of(kind: Any, key: str) -> Schema:
    """What may stand in a file where a value of this type is wanted."""
    if kind in PLAIN:
        return dict(PLAIN[kind])
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Given:  # how it is read says more than how it may be given
        return _of(inner[-1], key)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        # Nobody writes tensors, modules or nothing into a file.
        written = [one for one in inner if one not in (type(None), Tensor, nn.Module, Dataset)]
        return _any_of([_of(one, key) for one in written])
    if origin in (tuple, list, Sequence):
        one = _of(inner[0], key)
        listed: Schema = {"type": "array", "items": one}
        return _any_of([*one.get("anyOf", [one]), listed]) if inner[0] is Named else listed
    if kind is Named:
        return _by_name(CHOSEN_BY_NAME.get(key, {}))
    if is_dataclass(kind):
        return _record(kind, f"{key}.")
    return {}  # anything


def _any_of(choices: list[Schema]) -> Schema:
    flat = [part for choice in choices for part in choice.get("anyOf", [choice])]
    return flat[0] if len(flat) == 1 else {"anyOf": flat}


def _by_name(table: Table) -> Schema:
    """A name, or a table of a name and its options."""
    own = {"type": "object", "properties": {"name": OF_YOUR_OWN}, "required": ["name"]}
    return _any_of(
        [
            {"enum": [*table]},
            OF_YOUR_OWN,
            *(_with_options(name, function) for name, function in table.items()),
            own,
        ]
    )


def _with_options(name: str, function: Callable[..., Any]) -> Schema:
    options = {
        option: _option(parameter.annotation) for option, parameter in options_of(function).items()
    }
    needed = [
        option
        for option, parameter in options_of(function).items()
        if parameter.default is inspect.Parameter.empty
    ]
    return {
        "type": "object",
        "properties": {"name": {"const": name}, **options},
        "required": ["name", *needed],
        "additionalProperties": False,
    }


def _option(kind: Any) -> Schema:
    """A number of an algorithm may also be a schedule, and a partition may be of another."""
    made = _of(kind, "")
    numbers = made.get("type") in ("number", "integer")
    chosen = numbers or any(one.get("type") == "number" for one in made.get("anyOf", []))
    table: Schema = {"type": "object", "required": ["name"]}
    return _any_of([made, table]) if chosen else made
