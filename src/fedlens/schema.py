"""Experiment files described for programs and for people: a JSON Schema, and options in words.

Nothing is described twice: types and defaults come from `Experiment`, options from the functions
that are named, and the meaning of a key from docs/experiments.md. Commands read the results from
files (`described.py`).
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from typing import Any, Literal, Union

from torch import Tensor, nn

from fedlens.core import Number
from fedlens.described import Choice, Option, descriptions
from fedlens.experiment import Experiment, as_plain
from fedlens.federation import Dataset
from fedlens.names import CHOSEN_BY_NAME, KINDS
from fedlens.options import Given, Named, in_words, options_of, types_of

Schema = dict[str, Any]
Table = Mapping[str, Callable[..., Any]]

OF_YOUR_OWN = {"type": "string", "pattern": r"^[\w.]+:[\w.]+$"}  # module:function, or timm:name
LEAST = {"dataset": "fashion-mnist-mini", "model": "linear", "rounds": 1}
STEPS: dict[Any, float] = {"integer": 1, "number": 1e-9}  # from a bound to the number that is tried
PLAIN: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
}
SCHEDULED = (Number, Number | None, float, float | None)  # types of numbers that may be schedules


def schema() -> Schema:
    """The JSON Schema of experiment files, by which editors check and complete them."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A Fedlens experiment",
        **_record(Experiment, ""),
    }


def named() -> dict[str, dict[str, Choice]]:
    """What can be chosen by name, by kind and name."""
    return {
        kind: {
            name: choice(function, scheduled=kind == "algorithms")
            for name, function in table.items()
        }
        for kind, table in KINDS.items()
    }


def choice(function: Callable[..., Any], scheduled: bool) -> Choice:
    """The description of a function and its options; if `scheduled`, numbers may be schedules."""
    # A recipe is described by the docstring of its module.
    text = inspect.getdoc(function) or inspect.getdoc(sys.modules[function.__module__]) or ""
    options: dict[str, Option] = {}
    for name, parameter in options_of(function).items():
        may_change = scheduled and parameter.annotation in SCHEDULED
        needed = parameter.default is parameter.empty
        options[name] = {
            "about": about(function, name),
            "type": in_words(parameter.annotation) + ", or a schedule" * may_change,
            "default": None if needed else _said(parameter.default),
        }
    return {"about": text.partition("\n")[0], "options": options}


def about(function: Callable[..., Any], option: str) -> str:
    """What a docstring says about an option: below Args, or in the sentences that name it."""
    text = inspect.getdoc(function) or ""
    listed = re.search(rf"^    {option}_?: (.*(?:\n {{8}}.*)*)", text, re.MULTILINE)
    if listed is not None:
        return " ".join(listed[1].split())
    sentences = re.split(r"(?<=\.) (?=[A-Z`])", " ".join(text.partition("\nArgs:")[0].split()))
    for form in (f"`{option}`", rf"\b{option}\b"):
        found = [one for one in sentences if re.search(form, one)]
        if found:
            return " ".join(found)
    return ""


def _said(value: Any) -> str:
    return "none" if value is None else json.dumps(as_plain(value), default=str)


def _record(kind: Any, prefix: str) -> Schema:
    """The schema of a table whose keys are the fields of a dataclass."""
    properties, needed = {}, []
    for field in fields(kind):
        key = f"{prefix}{field.name}"
        one = _bounded(_of(types_of(kind)[field.name], key), partial(_takes, kind, field.name))
        if key in descriptions():
            one = {"description": descriptions()[key], **one}
        if field.default is MISSING:
            needed.append(field.name)
        elif (value := as_plain(field.default)) is not None and not isinstance(value, dict):
            one["default"] = value
        properties[field.name] = one
    made: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | ({"required": needed} if needed else {})


def _bounded(made: Schema, takes: Callable[[float], bool]) -> Schema:
    """The schema with those bounds of its numbers that are 0 or 1, found by trying `takes`."""
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
    """The schema of what a file may contain for a value of this type."""
    if kind in PLAIN:
        return dict(PLAIN[kind])
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Given:  # the type it is read as is the more precise one
        return _of(inner[-1], key)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        # A file cannot contain tensors, modules, data sets or None.
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
    """The schema of an option: a number may also be a table with a name, a schedule."""
    made = _of(kind, "")
    numbers = made.get("type") in ("number", "integer")
    chosen = numbers or any(one.get("type") == "number" for one in made.get("anyOf", []))
    table: Schema = {"type": "object", "required": ["name"]}
    return _any_of([made, table]) if chosen else made
