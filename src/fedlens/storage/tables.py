"""Plain tables: read from TOML or JSON, overridden key by key, written as TOML."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedlens.storage.reading import argument, demand_text, never_ends, reason, shortened

ENDINGS = (".toml", ".json")
LONGEST = 1_000_000  # bytes of an experiment file
DEEPEST = 32  # tables within each other, and parts of a dotted key
BARE_WORD = re.compile(r"\s*([\w.-]+)\s*=\s*([A-Za-z][\w./:-]*)\s*(?:#.*)?")
DEEP_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEEPEST},}}"""
)


def read_text(path: Path) -> str:
    """The text of an experiment file."""
    if never_ends(path):
        raise ValueError(f"{path} is a device or a pipe: name a .toml or .json file")
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST + 1)
        text = content.decode("utf-8-sig")  # editors on Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ValueError(f"cannot read the experiment {path}: {why}: {_instead(path)}") from error
    if len(content) > LONGEST:
        raise ValueError(f"{path} is longer than {LONGEST:,} bytes: it is not an experiment file")
    return text


def _instead(path: Path) -> str:
    """A hint what to name instead of a file that cannot be read."""
    if (path / "manifest.json").is_file():
        return f"it is a run: `fedlens resume {argument(path)}` goes on with it"
    if path.is_dir():
        return "name a file; for a folder of images `fedlens import` writes one"
    with suppress(OSError):
        beside = [one.name for one in path.parent.iterdir() if one.suffix in ENDINGS]
        near = get_close_matches(path.name, beside, n=1)
        if near and near[0] != path.name:
            return f"did you mean {str(path.with_name(near[0]))!r}?"
    return "name a .toml or .json file"


def read_tables(path: Path) -> dict[str, Any]:
    text = read_text(path)
    return parse_tables(text, path)


def parse_tables(text: str, path: Path) -> dict[str, Any]:
    """The tables of a TOML or JSON file, from its text."""
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        tables = json.loads(text, object_pairs_hook=once) if kind == "JSON" else _parsed_toml(text)
        if not isinstance(tables, dict):
            raise ValueError("it holds no table: write keys and values")
        _demand_shallow(tables)
        demand_text(json.dumps(tables, ensure_ascii=False, default=str), "its text")
    except (ValueError, RecursionError) as error:
        line = f"{path} is not valid {kind}: {reason(error)}{_hint(text, error)}"
        if path.suffix not in ENDINGS:
            rest = f', with dataset = {{ name = "csv", path = "{path.name}" }}'
            listed = rest if path.suffix == ".csv" else ""
            line = f"{path} is not an experiment: name a .toml or .json file{listed}"
        raise ValueError(line) from error
    return tables


def _parsed_toml(text: str) -> dict[str, Any]:
    # The time of Python's parser grows with the square of the number of a key's parts.
    if DEEP_KEY.search(text):
        raise ValueError(f"a key has more than {DEEPEST} parts")
    return tomllib.loads(text)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON, whose parser would take the last of several values of one key."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for place, (key, _) in enumerate(pairs) if key in dict(pairs[:place]))
        raise ValueError(f"{shortened(twice)!r} is given twice")
    return table


def _hint(text: str, error: Exception) -> str:
    """What is wrong in a line: a text without its quotes, as YAML allows, or a key given twice."""
    found = re.search(r"\(at line (\d+),", str(error))
    line = text.splitlines()[int(found[1]) - 1 if found else -1] if text.strip() else ""
    if re.match("Cannot (overwrite|declare|mutate)", str(error)):
        return f": {shortened(line.partition('=')[0].strip(' []'))} is given twice"
    word = BARE_WORD.fullmatch(line)
    return f': write {word[1]} = "{word[2]}", text has quotes' if found and word else ""


def _demand_shallow(value: Any) -> None:
    """Refuse tables that are nested too deeply for recursive functions."""
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        inner = [one for one in level if isinstance(one, (dict, list))]
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
        depth += 1


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set one key of `content`, such as `clients.per_round=0.1` or `algorithm.fedprox.mu=0.01`."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{override!r} is not an override: write key=value")
    *tables, last = key.strip().split(".", DEEPEST)
    if "." in last:
        raise ValueError(f"{shortened(key, 80)} has more than {DEEPEST} parts: write key=value")
    table = content
    if tables[:1] == ["algorithm"] and tables[1:]:
        table, tables = _algorithm_called(tables[1:], content)
    for name in tables:
        inner = table.setdefault(name, {})
        if isinstance(inner, str):  # a name without options becomes a table
            inner = table[name] = {"name": inner}
        if not isinstance(inner, dict):
            raise ValueError(f"{key} cannot be set: {name} is {inner!r}, not a table")
        table = inner
    table[last] = _parsed(text)


def parse_axis(axis: str) -> tuple[str, list[Any]]:
    """A key and the values it takes, from `local.lr=0.01,0.1`."""
    key, equals, text = axis.partition("=")
    if not equals or not key.strip() or not text.strip():
        raise ValueError(f"{axis!r} is not an axis of a grid: write key=value,value")
    try:
        values: list[Any] = _value(f"[{text}]")
    except tomllib.TOMLDecodeError:
        values = [_parsed(part) for part in _between_commas(text)]
    return key.strip(), values


def _between_commas(text: str) -> list[str]:
    """The parts of a text between its commas, except commas within brackets and quotes."""
    parts, depth = [""], 0
    for piece in re.findall(r"\"[^\"]*\"|'[^']*'|.", text, re.DOTALL):
        depth += (piece in "[{") - (piece in "]}")
        if piece == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts]


def _parsed(text: str) -> Any:
    """The TOML value of a text; otherwise the text, which needs no quotes on a command line."""
    try:
        return _value(text)
    except tomllib.TOMLDecodeError:
        return text


def _value(text: str) -> Any:
    try:
        value = _parsed_toml(f"value = {text}")["value"]
        _demand_shallow(value)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shortened(text, 80)}: {reason(error)}") from error
    return value


def _algorithm_called(
    parts: list[str], content: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The table of one of the experiment's algorithms, and the rest of a dotted key.

    The algorithms of `content` become a list of tables. The name is the longest beginning of the
    key that is the name of one of them.
    """
    given = content.get("algorithm", [])
    listed = given if isinstance(given, list) else [given]
    tables = [{"name": one} if isinstance(one, str) else one for one in listed]
    content["algorithm"] = tables
    for count in range(len(parts), 0, -1):
        for table in tables:
            if isinstance(table, dict) and table.get("name") == ".".join(parts[:count]):
                return table, parts[count:]
    name = ".".join(parts)
    here = [str(table.get("name")) for table in tables if isinstance(table, dict)]
    own = [one for one in here if one.rpartition(":")[2] == parts[0]]
    if meant := own or get_close_matches(name, here, n=1):
        raise ValueError(f"the experiment has no algorithm {name!r}: did you mean {meant[0]!r}?")
    raise ValueError(f"the experiment has no algorithm {name!r}: put algorithm={name} before it")


def to_toml(tables: Mapping[str, Any], reasons: Mapping[str, str] | None = None) -> str:
    """Plain tables as TOML: first the values, then a section for each table.

    `reasons` has comments by key, with dots.
    """
    lines = [_pair(key, v, reasons) for key, v in tables.items() if not _is_section(v)]
    for key, section in tables.items():
        if not _is_section(section):
            continue
        listed = isinstance(section, list)
        for table in section if listed else [section]:
            lines += ["", f"[[{key}]]" if listed else f"[{key}]"]
            lines += [_pair(name, value, reasons, f"{key}.") for name, value in table.items()]
    return "\n".join(lines) + "\n"


def _is_section(value: Any) -> bool:
    nested = isinstance(value, dict) and "name" not in value
    return nested or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _pair(key: str, value: Any, reasons: Mapping[str, str] | None = None, section: str = "") -> str:
    is_bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    reason = (reasons or {}).get(section + key)
    why = f"  # {reason}" if reason else ""
    return f"{key if is_bare else to_value(key)} = {to_value(value)}{why}"


def to_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return f"{{ {', '.join(_pair(key, part) for key, part in value.items())} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
