"""Plain tables: read from TOML or JSON, overridden key by key, written as TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_tables(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ValueError(f"cannot read the experiment {path}: {reason}") from error
    try:
        tables: dict[str, Any]
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ValueError(f"{path} is not valid {kind}: {error}") from error
    if not isinstance(tables, dict):
        raise ValueError(f"{path} holds no table: write keys and values")
    return tables


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set one key of `content`, as `clients.per_round=0.1` or `algorithm.fedprox.mu=0.01` say."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{override!r} is not an override: write key=value")
    *tables, last = key.strip().split(".")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    place: Any = content
    for depth, name in enumerate(tables):
        if name == "algorithm" and depth == 0 and len(tables) > 1:
            place = _as_list(content)
            continue
        if isinstance(place, list):
            place = _algorithm_called(name, place)
            continue
        inner = place.setdefault(name, {})
        if isinstance(inner, str):  # a name by itself; an option makes it a table
            inner = place[name] = {"name": inner}
        if not isinstance(inner, dict):
            raise ValueError(f"{key} cannot be set: {name} is {inner!r}, not a table")
        place = inner
    place[last] = value


def _as_list(content: dict[str, Any]) -> list[Any]:
    """The algorithms of an experiment as a list of tables."""
    given = content.get("algorithm", [])
    listed = given if isinstance(given, list) else [given]
    content["algorithm"] = [{"name": one} if isinstance(one, str) else one for one in listed]
    found: list[Any] = content["algorithm"]
    return found


def _algorithm_called(name: str, algorithms: list[Any]) -> dict[str, Any]:
    found: dict[str, Any]
    for found in algorithms:
        if found.get("name") == name:
            return found
    raise ValueError(f"the experiment has no algorithm {name!r}: put algorithm={name} before it")


def to_toml(tables: Mapping[str, Any]) -> str:
    """Plain tables as TOML: first the values, then a section for each table."""
    lines = [f"{key} = {_value(v)}" for key, v in tables.items() if not _is_section(key, v)]
    for key, section in tables.items():
        if not _is_section(key, section):
            continue
        listed = isinstance(section, list)
        for table in section if listed else [section]:
            lines += ["", f"[[{key}]]" if listed else f"[{key}]"]
            lines += [f"{name} = {_value(value)}" for name, value in table.items()]
    return "\n".join(lines) + "\n"


def _is_section(key: str, value: Any) -> bool:
    nested = isinstance(value, dict) and "name" not in value and key != "augment"
    return nested or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _value(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(
            f"{json.dumps(k) if not _is_bare(k) else k} = {_value(v)}" for k, v in value.items()
        )
        return f"{{ {inner} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def _is_bare(key: str) -> bool:
    return key.replace("-", "").replace("_", "").isalnum() and key.isascii()
