"""The order of the modules: each may import from those below it, and none in a circle or too long.

Imports are read from the source, also those within functions and for types alone.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import fedlens

HOME = Path(fedlens.__file__).parent
ROOT = Path(__file__).parents[1]

LONGEST, LONGEST_ALGORITHM = 700, 150  # lines of a file

# The half of `report` that draws values, whatever they are: notebooks show a run by it.
DRAWING = [f"report.{one}" for one in ("blocks", "draw", "numbers", "palette", "tables", "texts")]

ORDER = [
    ["version", "storage", "core", "privacy"],
    ["config"],
    ["data"],
    ["network", "models"],
    ["algorithm", "algorithms", "attacks"],
    ["rounds"],
    ["engines"],
    ["config.experiment", "config.explained", "config.protection"],  # they read what is above
    ["setup"],
    ["evaluation"],
    ["runs", *DRAWING],
    ["report", "recipes", "audit"],
    ["deploy"],
    ["fleet"],
    ["__init__"],  # what `import fedlens` offers
    ["cli"],
    ["__main__"],
]
"""The lowest first. Those of one row may import from each other, but not in a circle."""

RANK = {name: rank for rank, row in enumerate(ORDER) for name in row}


def modules(home: Path) -> dict[str, Path]:
    """By dotted name below the package; a package's `__init__` has the package's name."""
    found = {}
    for path in sorted(home.rglob("*.py")):
        parts = path.relative_to(home).with_suffix("").parts
        found[".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])] = path
    return found


def imported(path: Path, known: set[str]) -> Iterator[str]:
    """The modules of the package that a file imports from, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, inner = name.partition(".")
            if package == "fedlens":
                yield next((m for m in (inner, inner.rpartition(".")[0]) if m in known), "__init__")


def imports(home: Path = HOME) -> dict[str, set[str]]:
    found = modules(home)
    return {name: set(imported(path, set(found))) - {name} for name, path in found.items()}


def wrong_way(graph: dict[str, set[str]]) -> list[str]:
    rank = {name: RANK.get(name, RANK.get(name.partition(".")[0], -1)) for name in graph}
    pairs = [(a, b) for a, seen in graph.items() for b in seen]
    return [f"{a} imports {b}, which is above it" for a, b in pairs if rank[a] < rank[b]]


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that are left when all that import nothing (that is left) are taken away."""
    left = {name: set(seen) for name, seen in graph.items()}
    while True:
        free = {name for name, seen in left.items() if not seen & left.keys()}
        if not free:
            return sorted(left)
        left = {name: seen for name, seen in left.items() if name not in free}


def test_every_module_has_its_place_in_the_order():
    assert {name.partition(".")[0] for name in modules(HOME)} == {
        name.partition(".")[0] for name in RANK
    }


def test_modules_import_from_those_below_them():
    assert wrong_way(imports()) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circles(imports()) == []


def test_an_import_the_wrong_way_is_seen(tmp_path):
    (tmp_path / "core.py").write_text("def f():\n    from fedlens.runs import run\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "__init__.py").write_text("")
    (tmp_path / "runs" / "run.py").write_text("from fedlens.core import f\n")
    graph = imports(tmp_path)
    assert wrong_way(graph) == ["core imports runs.run, which is above it"]
    assert circles(graph) == ["core", "runs.run"]


def test_no_file_is_longer_than_can_be_read_at_once():
    places = [HOME, *(ROOT / name for name in ("tests", "benchmarks", "tools", "examples"))]
    lengths = {p: len(p.read_text().splitlines()) for one in places for p in one.rglob("*.py")}
    algorithms = {p: count for p, count in lengths.items() if p.parent == HOME / "algorithms"}
    assert [p for p, count in lengths.items() if count > LONGEST] == []
    assert [p for p, count in algorithms.items() if count > LONGEST_ALGORITHM] == []
