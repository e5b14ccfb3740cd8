"""A store of finished runs of recipes: a packed file for each item, and an index of them all.

    index.json             which cells and seeds of an item there are, and of which revision
    PAPER/ITEM.json.xz     the runs themselves, without models

A packed file is JSON, compressed by xz. A run has its experiment.toml as text, its other files as
they are, and its rounds as columns: a list of values, or the one value that all rounds have.
Measures of evaluations stand together, with the rounds they are `at`. Numbers have six significant
digits, the loss of local training in long runs five. Left out are numbers of rounds, times (the
summary has their sums) and clients, except where `Recipe.keeps` names them.

Runs with other settings than the recipe's are an item of their own, which is called after the
settings: ghaemi/fedavg-lr-0.05. A run that items of a paper have in common is stored once.

Nothing in this module needs torch, and nothing that it reads is executed.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.runs.records import Run, is_number, spent
from fedlens.storage.files import write_atomically
from fedlens.storage.free_memory import in_words
from fedlens.storage.locks import one_writer
from fedlens.storage.reading import BadFile, Fields, demand_fields, reading
from fedlens.storage.run_files import (
    EVALUATION,
    EXPERIMENT,
    MANIFEST,
    PARTITION,
    ROUNDS,
    SUMMARY,
    parse_json,
    read_json,
    to_json,
)
from fedlens.storage.tables import parse_tables

if TYPE_CHECKING:
    from fedlens.recipes.recipe import Recipe

STORE = Path("results/papers")  # of a checkout, for commands in its folder
INDEX, PACKED = "index.json", ".json.xz"
ITEM = re.compile(r"[a-z0-9-]+/[a-z0-9.-]+")

LARGEST_FILE = 64 * 2**20  # bytes, packed
LARGEST_CONTENT = 256 * 2**20  # bytes, unpacked
LARGEST_DICTIONARY = 128 * 2**20  # bytes of memory that xz may ask for
MOST_ROUNDS = 4_000_000  # of all runs in a file

LEFT_OUT = frozenset({"round", "clients", "trust", "seconds", "evaluation_seconds"})
DIGITS, FEWER = 6, 5
FINDINGS = "findings"  # made of the runs of all papers
LONG = 1000  # rounds of a run above which the loss of local training has `FEWER` digits
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0}]

Place = tuple[str, int]
"""A cell and a seed."""


@dataclass(frozen=True)
class Kept:
    """A run in the index. If it is stored with another item: which, and its cell there."""

    cell: str
    seed: int
    rounds: int
    revision: str = ""
    item: str = ""
    as_cell: str = ""


@dataclass(frozen=True)
class Item:
    """What a store has of a recipe, or of a recipe with other settings."""

    recipe: str
    command: str  # runs it again
    experiments: int  # with runs
    of: int  # all experiments of the recipe
    seeds: int
    of_seeds: int
    shorter: int  # experiments with runs of fewer rounds than the recipe's
    seconds: int  # of training and evaluation, of the runs in its own file
    runs: Sequence[Kept] = field(default_factory=list)


def read_index(store: Path) -> dict[str, Item]:
    """The items of a store by name; empty if there is none."""
    file = store / INDEX
    with reading(file):
        return {name: _item(name, one, file) for name, one in (read_json(file) or {}).items()}


def _item(name: str, content: Any, file: Path) -> Item:
    one = demand_fields(content, {"recipe": str, "command": str, "runs": list}, file, "mend it")
    runs = [Kept(**kept) for kept in one["runs"]]
    for called in (name, *(kept.item for kept in runs if kept.item)):
        if not ITEM.fullmatch(called):
            raise ValueError(f"{called!r} is no name of an item")
    return Item(**{**one, "runs": runs})


def _write_index(store: Path, items: Mapping[str, Item]) -> None:
    """Write the index with a line for each run, so that a comparison shows what was added."""
    texts = []
    for name, item in sorted(items.items()):
        about = [f"{_json(k)}: {_json(v)}" for k, v in vars(item).items() if k != "runs"]
        runs = [_json({k: v for k, v in vars(kept).items() if v != ""}) for kept in item.runs]
        lines = ",\n".join([*about, '"runs": [\n' + ",\n".join(runs) + "\n]"])
        texts.append(f"{_json(name)}: {{\n{lines}\n}}")
    write_atomically(store / INDEX, ("{\n" + ",\n".join(texts) + "\n}\n").encode())


def item_of(recipe: str, overrides: Sequence[str]) -> str:
    """The item of a recipe with other settings, such as ghaemi/fedavg-lr-0.05."""
    words = [re.sub(r"^[^=]*[.](?=[^=]*=)", "", one.lower()) for one in overrides]
    return "-".join([recipe, *(re.sub(r"[^a-z0-9.]+", "-", word) for word in words)])


def file_of(store: Path, item: str) -> Path:
    return store / f"{item}{PACKED}"


def runs_of(store: Path, item: str) -> dict[str, list[Run]]:
    """The runs of an item by cell, including those that are stored with other items."""
    index = read_index(store)
    if item not in index:
        raise ValueError(f"{store} has no runs of {item}, only of {', '.join(index) or 'none'}")
    homes = {kept.item or item for kept in index[item].runs}
    stored = {home: read_packed(file_of(store, home))[1] for home in homes}
    cells: dict[str, list[Run]] = {}
    for kept in index[item].runs:
        home, cell = kept.item or item, kept.as_cell or kept.cell
        run = next((r for r in stored[home].get(cell, ()) if r.manifest["seed"] == kept.seed), None)
        if run is None:
            raise BadFile(file_of(store, home), f"it has no run of {cell} with seed {kept.seed}")
        cells.setdefault(kept.cell, []).append(run)
    return cells


def read_packed(file: Path) -> tuple[str, dict[str, list[Run]]]:
    """The recipe of a packed file, and its runs by cell."""
    content = _content(file)
    with reading(file):
        cells: dict[str, list[Run]] = {}
        if sum(packed["num_rounds"] for packed in content["runs"]) > MOST_ROUNDS:
            raise ValueError(f"it has more than {MOST_ROUNDS:,} rounds")
        for packed in content["runs"]:
            cells.setdefault(packed["cell"], []).append(_unpacked(packed, file))
        return content["recipe"], cells


def _content(file: Path) -> dict[str, Any]:
    with reading(file):
        if (size := file.stat().st_size) > LARGEST_FILE:
            raise ValueError(f"it has {in_words(size)}, more than {in_words(LARGEST_FILE)}")
        unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=LARGEST_DICTIONARY)
        text = unpacking.decompress(file.read_bytes(), max_length=LARGEST_CONTENT + 1)
        if len(text) > LARGEST_CONTENT:
            raise ValueError(f"it unpacks to more than {in_words(LARGEST_CONTENT)}")
        if not unpacking.eof or unpacking.unused_data:
            raise ValueError("it is cut off, or has something after its end")
        content = demand_fields(parse_json(text), {"recipe": str, "runs": list}, file, "mend it")
        for one in content["runs"]:
            demand_fields(one, _FIELDS, file, "mend it")
            demand_fields(one["manifest"], {"seed": int}, file, "mend it")
        return content


_FIELDS: Fields = {
    "partition": (dict, type(None)),
    **{"cell": str, "experiment": str, "num_rounds": int, "evaluations": list},
    **dict.fromkeys(("manifest", "summary", "evaluation", "columns"), dict),
}


def _unpacked(packed: Mapping[str, Any], file: Path) -> Run:
    count = packed["num_rounds"]
    rounds: list[dict[str, Any]] = [{"round": number} for number in range(1, count + 1)]
    every = {"at": range(1, count + 1), "columns": packed["columns"]}
    for one in (every, *packed["evaluations"]):
        for name, given in one["columns"].items():
            values = given if isinstance(given, list) else [given]
            if name != "clients" and not all(v is None or is_number(v) for v in values):
                raise ValueError(f"its {name} is not all numbers")
            many = given if isinstance(given, list) else repeat(given, len(one["at"]))
            for number, value in zip(one["at"], many, strict=True):
                rounds[number - 1][name] = value
    if "batches" in packed["columns"] and "batches_total" not in packed["columns"]:
        for record, total in zip(rounds, accumulate(r["batches"] for r in rounds), strict=True):
            record["batches_total"] = total
    manifest, toml = packed["manifest"], packed["experiment"]
    name = f"{packed['cell']}, seed {manifest['seed']}"
    return Run(
        name=name,
        folder=file / name,
        experiment=parse_tables(toml, file / EXPERIMENT),
        toml=toml,
        manifest=manifest,
        rounds=rounds,
        summary=packed["summary"],
        partition=packed["partition"],
        evaluation=packed["evaluation"],
    )


def pack(
    store: Path,
    item: str,
    name: str,
    recipe: Recipe,
    runs: Mapping[str, Sequence[Run]],
    *,
    command: str,
    revision: str | None = None,
) -> int:
    """Add runs, by cell, of the recipe `name` to an item of a store; return how many it then has.

    A run with the same cell and seed is replaced. `revision` is that of runs whose manifest has
    none, since they were made from a copy without git.
    """
    with one_writer(store):
        index, file = read_index(store), file_of(store, item)
        own = _by_place(file)
        kept = {(one.cell, one.seed): one for one in (index[item].runs if item in index else ())}
        paper = item.partition("/")[0]
        elsewhere = {
            _digest(packed): (other, packed["cell"])
            for other in reversed(index)  # of several items with a run, the first counts
            if other != item and paper in (FINDINGS, other.partition("/")[0])
            for packed in _by_place(file_of(store, other)).values()
        }
        for cell, of_cell in runs.items():
            for run in of_cell:
                packed = _packed(cell, run, recipe.keeps, revision)
                place = cell, packed["manifest"]["seed"]
                found = elsewhere.get(_digest(packed)) if place not in own else None
                if found is None:
                    own[place] = packed
                home, as_cell = found or ("", "")
                kept[place] = Kept(
                    *place,
                    rounds=run.experiment["rounds"],
                    revision=packed["manifest"]["revision"] or "",
                    item=home,
                    as_cell=as_cell if as_cell != cell else "",
                )
        order = {cell: number for number, cell in enumerate(recipe.cells)}
        places = sorted(kept, key=lambda place: (order.get(place[0], len(order)), place))
        stored = [own[place] for place in places if place in own]
        cut = {c for c, s in places if c in order and kept[c, s].rounds < recipe.cells[c].rounds}
        index[item] = Item(
            recipe=name,
            command=command,
            experiments=len({cell for cell, _ in places}),
            of=len(recipe.cells),
            seeds=len({seed for _, seed in places}),
            of_seeds=len(recipe.seeds),
            shorter=len(cut),
            seconds=round(sum(spent(one["summary"]) or 0.0 for one in stored)),
            runs=[kept[place] for place in places],
        )
        if stored:
            text = _json({"recipe": name, "runs": stored}).encode()
            write_atomically(file, lzma.compress(text, lzma.FORMAT_XZ, filters=FILTERS))
        _write_index(store, index)
    return len(places)


def _by_place(file: Path) -> dict[Place, dict[str, Any]]:
    """The packed runs of a file; none if there is no file."""
    runs = _content(file)["runs"] if file.exists() else []
    return {(one["cell"], one["manifest"]["seed"]): one for one in runs}


def _digest(packed: Mapping[str, Any]) -> bytes:
    """Of a packed run under any name."""
    text = json.dumps({**packed, "cell": ""}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).digest()


def _packed(cell: str, run: Run, keeps: Collection[str], revision: str | None) -> dict[str, Any]:
    """A run as plain values."""
    rounds = run.rounds
    numbers = [record["round"] for record in rounds]
    if numbers != [*range(1, len(rounds) + 1)]:
        raise ValueError(f"{run.folder} has not all of its rounds: run it again")
    totals = [*accumulate(record.get("batches", 0) for record in rounds)]
    by_rounds: dict[tuple[int, ...], dict[str, Any]] = {tuple(numbers): {}}
    for name in dict.fromkeys(name for record in rounds for name in record):
        at = tuple(record["round"] for record in rounds if name in record)
        values = [record[name] for record in rounds if name in record]
        if (name in LEFT_OUT and name not in keeps) or (name, values) == ("batches_total", totals):
            continue
        digits = FEWER if name == "train_loss" and len(rounds) > LONG else DIGITS
        values = [float(f"{v:.{digits}g}") if isinstance(v, float) else v for v in values]
        is_one = values.count(values[0]) == len(values) and not isinstance(values[0], list)
        by_rounds.setdefault(at, {})[name] = values[0] if is_one else values
    manifest = run.manifest | {"revision": run.manifest.get("revision") or revision}
    return {
        "cell": cell,
        "experiment": run.toml,
        "manifest": manifest,
        "summary": run.summary,
        "partition": run.partition,
        "evaluation": {k: v for k, v in run.evaluation.items() if k != "calibration"},
        "num_rounds": len(rounds),
        "columns": by_rounds.pop(tuple(numbers)),
        "evaluations": [{"at": [*at], "columns": one} for at, one in by_rounds.items()],
    }


def lay_out(run: Run, place: Path) -> None:
    """Write a stored run as a run folder, without a model, so that it need not be run again."""
    records = "".join(f"{to_json(record)}\n" for record in run.rounds)
    files = {EXPERIMENT: f"{run.toml}\n", ROUNDS: records, SUMMARY: to_json(run.summary, indent=2)}
    files |= {PARTITION: to_json(run.partition)} if run.partition else {}
    files |= {EVALUATION: to_json(run.evaluation)} if run.evaluation else {}
    for name, text in (*files.items(), (MANIFEST, to_json(run.manifest, indent=1))):
        write_atomically(place / name, text.encode())  # the manifest last: it makes this a run


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False)
