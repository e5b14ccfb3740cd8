"""The JSON Schema of experiment files, by which editors check and complete them.

It follows from the fields of `Experiment`, their types, bounds and words, and from the options of
the functions that are named. Nothing of it needs PyTorch.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter
from typing import Annotated, Any, Literal, Union

from fedlens.config.experiment import Experiment, as_plain
from fedlens.config.explained import keys
from fedlens.config.names import CHOSEN_BY_NAME
from fedlens.config.options import Bounds, ByName, Given, Named, types_of, written

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
        one = _of(types_of(kind)[field.name], key)
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
    limits = {LIMITS[name]: at for name, at in bounds._asdict().items() if at is not None}
    for one in made.get("anyOf", [made]):
        if one.get("type") in ("integer", "number"):
            one.update(limits)
    return made


def _of(kind: Any, key: str) -> Schema:
    """The schema of what a file may contain for a value of this type."""
    if kind in PLAIN:
        return dict(PLAIN[kind])
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _bounded(_of(inner[0], key), inner[1])
    if origin is Given:  # the type it is read as is the more precise one
        return _of(inner[-1], key)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return _any_of([_of(one, key) for one in written(kind)])
    if origin in (tuple, list, Sequence):
        one = _of(inner[0], key)
        listed: Schema = {"type": "array", "items": one}
        return _any_of([*one.get("anyOf", [one]), listed]) if inner[0] is Named else listed
    if kind is Named:
        return _by_name(CHOSEN_BY_NAME[key])
    if is_dataclass(kind):
        return _record(kind, f"{key}.")
    return {}  # anything


def _any_of(choices: list[Schema]) -> Schema:
    flat = [part for choice in choices for part in choice.get("anyOf", [choice])]
    return flat[0] if len(flat) == 1 else {"anyOf": flat}


def _by_name(table: ByName) -> Schema:
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
    made = _of(kind, "")
    numbers = made.get("type") in ("number", "integer")
    chosen = numbers or any(one.get("type") == "number" for one in made.get("anyOf", []))
    table: Schema = {"type": "object", "required": ["name"]}
    return _any_of([made, table]) if chosen else made
