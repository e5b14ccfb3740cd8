"""Descriptions of experiments, and the numbers in them."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fedlens.algorithms import ALGORITHMS
from fedlens.config.experiment import Experiment
from fedlens.config.options import options_of
from fedlens.data.partitions import PARTITIONS
from fedlens.models import MODELS
from fedlens.setup import build
from fedlens.storage.tables import apply_override, parse_axis
from tests.fuzzing.cases import (
    TOML,
    TOML_WORDS,
    TOY,
    Data,
    Read,
    Reader,
    other_json,
    other_text,
)

DEEP = [
    "a." * 100_000 + "b = 1",
    "x = " + "[" * 100_000,
    "x = {" + "a={" * 2000,
    "[" + "a." * 5000 + "b]",
]


def read_experiment(place: Path, data: Data) -> tuple[Path, Read]:
    as_json = data.draw(st.booleans())
    file = place / ("a.json" if as_json else "a.toml")
    if as_json:
        file.write_bytes(other_json(data, tomllib.loads(TOML)))
    elif data.draw(st.integers(0, 5)) == 0:
        file.write_text(data.draw(st.sampled_from(DEEP)) + TOML, encoding="utf-8")
    else:
        file.write_bytes(other_text(data, TOML, TOML_WORDS))

    def read() -> None:
        try:
            Experiment.read(file)
        except ValueError as error:
            ours = type(error) is ValueError or type(error).__module__.startswith("fedlens.")
            if not ours:  # of Python's own, which would name no file
                raise TypeError(str(error)) from error
            raise ValueError(f"{file}: {error}") from error  # what is wrong may be a value in it

    return file, read


def read_override(place: Path, data: Data) -> tuple[Path, Read]:
    key = data.draw(
        st.sampled_from(["a", "a.b", "algorithm.x.mu", "", "." * 10, "a." * 50_000 + "b"])
    )
    value = data.draw(
        st.sampled_from(
            ["1", "x", "[1,", "[" * 50_000, "9" * 5000, "1e999", "{a=1}", "\ud800", "'"]
        )
        | st.text(max_size=20)
    )
    content: dict[str, Any] = {"a": 3, "b": {"c": 1}, "algorithm": ["x"]}

    def read() -> None:
        for function in (lambda text: apply_override(content, text), parse_axis):
            try:
                function(f"{key}={value}")
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error

    return place, read


KEYS = {
    **dict.fromkeys(("rounds", "seed", "outputs", "train")),
    "augment": ("crop", "resized", "aspect"),
    "clients": ("count", "per_round", "seed", "holdout"),
    "local": ("epochs", "batch_size", "lr", "momentum", "weight_decay"),
    "server": ("lr",),
    "evaluate": ("every", "at", "validation"),
}
LARGE: tuple[Any, ...] = (
    *(0, 1, 2, -1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, -(2**63), 10**400),
    *(
        0.5,
        1e-320,
        1e30,
        3e38,
        1e39,
        1e308,
        -1e308,
        math.inf,
        -math.inf,
        math.nan,
        [1],
        [2**62],
        "x",
    ),
)


def read_numbers(place: Path, data: Data) -> tuple[Path, Read]:
    """Numbers beyond all measure in every key, and in every option of whatever has a name."""
    large = st.sampled_from(LARGE)
    tables: dict[str, Any] = {
        "dataset": TOY,
        "model": "linear",
        "rounds": 1,
        "engine": "sequential",
    }
    tables["clients"] = {"count": 4}
    kind = data.draw(st.sampled_from(["key", "algorithm", "partition", "model"]))
    if kind == "key":
        key = data.draw(st.sampled_from(sorted(KEYS)))
        inner = KEYS[key]
        if inner is None:
            tables[key] = data.draw(large)
        else:
            given = {name: data.draw(large) for name in inner if data.draw(st.booleans())}
            tables[key] = tables.get(key, {}) | given
    else:
        table: Any = {"algorithm": ALGORITHMS, "partition": PARTITIONS, "model": MODELS}[kind]
        name = data.draw(st.sampled_from(sorted(table)))
        chosen = {o: data.draw(large) for o in options_of(table[name]) if data.draw(st.booleans())}
        chosen |= {"column": "user"} if name == "natural" else {}
        if kind == "partition":
            tables["clients"]["partition"] = {"name": name, **chosen}
        else:
            tables[kind] = {"name": name, **chosen}

    def read() -> None:
        try:
            build(Experiment.of(tables)).engine.close()
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    return place, read


READERS: dict[str, Reader] = {
    "experiment": read_experiment,
    "override": read_override,
    "numbers": read_numbers,
}
