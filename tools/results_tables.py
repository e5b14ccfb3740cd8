"""Write the tables of results/README.md: published numbers beside ours, and what is stored.

    python tools/results_tables.py

Numbers are written in results/published.csv and results/unanswered.csv, and what is stored is in
the index of results/papers. With `--check` nothing is written, and it fails if a table is old.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fedlens.recipes.store import Item, read_index

RESULTS = Path(__file__).parents[1] / "results"
PUBLISHED = ("paper, item", "row", "published", "ours", "n", "runs", "where they differ")
UNANSWERED = ("paper, item", "published", "why not")
STORED = ("item", "settings", "experiments", "runs", "seeds", "seconds", "revisions")

Rows = Iterable[Sequence[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    page = RESULTS / "README.md"
    before = page.read_text(encoding="utf-8")
    text = before
    for heading, header, rows in (
        ("Published numbers and ours", PUBLISHED, published()),
        ("Published numbers that are not answered yet", UNANSWERED, rows_of("unanswered")),
        ("papers", STORED, stored()),
    ):
        text = with_table(text, heading, header, rows)
    if check and text != before:
        sys.exit(f"{page} is old: run python tools/results_tables.py")
    page.write_text(text, encoding="utf-8")


def rows_of(name: str) -> Rows:
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [*csv.reader(file)][1:]


def published() -> Iterator[Sequence[str]]:
    """The rows, with a paper and an item only where they change."""
    before = ("", "")
    for paper, row, theirs, ours, count, item, difference in rows_of("published"):
        place = f"`{item}`" if item != before[1] else ""
        yield paper if paper != before[0] else "", row, theirs, ours, count, place, difference
        before = paper, item


def stored() -> Iterator[Sequence[str]]:
    for name, item in read_index(RESULTS / "papers").items():
        others = Counter(kept.item for kept in item.runs if kept.item)
        shared = ", ".join(f"{count} of `{other}`" for other, count in others.items())
        yield (
            f"`{name}`",
            " ".join(f"`{word}`" for word in item.command.split() if "=" in word),
            _of(item.experiments, item.of)
            + (f", {item.shorter} with fewer rounds" if item.shorter else ""),
            f"{len(item.runs)}" + (f": {shared}" if shared else ""),
            f"{item.seeds}" if item.seeds >= item.of_seeds else _of(item.seeds, item.of_seeds),
            f"{item.seconds:,}" if item.seconds else "",
            _revisions(item),
        )


def _of(count: int, every: int) -> str:
    return f"all {every}" if count >= every else f"{count} of {every}"


def _revisions(item: Item) -> str:
    return ", ".join(dict.fromkeys(kept.revision[:7] for kept in item.runs if not kept.item))


def with_table(text: str, heading: str, header: Sequence[str], rows: Rows) -> str:
    """The text with the first table below a heading replaced."""
    lines = text.splitlines(keepends=True)
    first = lines.index(f"## {heading}\n")
    first += next(i for i, line in enumerate(lines[first:]) if line.startswith("|"))
    last = first + next(i for i, line in enumerate(lines[first:]) if not line.startswith("|"))
    table = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for row in rows:
        table.append("|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|")
    return "".join([*lines[:first], *(f"{line}\n" for line in table), *lines[last:]])


if __name__ == "__main__":
    main()
