"""The pages about personal models: both rules, gains over clients, and who is best where."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from fedlens.recipes.personal import boards, map
from fedlens.recipes.recipe import Results, Scale
from fedlens.report.blocks import Table, Tiles


def run_of(seed: int, last: list[float], *, before: float = 0.0, **evaluation: Any) -> Any:
    found = {"client_accuracy": last, "client_tested": [1, 3, 0], **evaluation}
    return SimpleNamespace(
        manifest={"seed": seed}, evaluation=found, status="finished", num_rounds=2,
        curve=lambda _: ([1, 2], [before, math.nan]),
    )  # fmt: skip


def test_the_last_round_counts_every_image_alike_and_the_best_is_never_below():
    run = run_of(0, [0.2, 0.6, math.nan], before=0.9)
    assert boards.by_images(run) == pytest.approx((0.2 + 3 * 0.6) / 4)
    assert boards.best_round(run) == 0.9
    assert boards.best_round(run_of(0, [0.2, 0.6, math.nan])) == pytest.approx(0.5)
    tuned = run_of(0, [0.2, 0.6, math.nan], federated=[1.0, 1.0, None])
    assert boards.by_images(tuned) == 1.0, "what the algorithm tunes at the end counts"


def test_gains_are_those_of_the_same_clients_in_runs_of_the_same_seed():
    runs = {
        "x, local-only": [run_of(s, [0.5, 0.5, math.nan]) for s in (0, 1)],
        "x, Ditto": [run_of(s, [0.6 + s / 10, 0.7, math.nan]) for s in (1, 0)],
    }
    results: Any = Results(Scale("smoke"), runs)
    (table,) = (
        block
        for block in boards.board(results, "x, ", ("local-only", "Ditto"), {"Ditto": 0.5})
        if isinstance(block, Table)
    )
    header, (alone, ditto) = table.header, table.rows
    assert alone[0] == "local-only" and ditto[header.index("published")] == "50.00"
    assert str(ditto[header.index("− local-only")]).startswith("17.50 (")


@pytest.mark.parametrize(
    ("best", "kind"),
    [("local-only", "local-only"), ("fine-tuned", "fine-tuned"), ("Ditto", "a method")],
)
def test_the_map_names_who_is_best_and_reads_fedavg_before_tuning(best, kind):
    at = (0.05, 50)
    runs = {
        map.cell(at, name): [
            run_of(s, [0.3, 0.3, 0.3], federated=[0.9 if name == best else 0.4] * 3) for s in (0, 1)
        ]
        for name in map.TRAINED
    }
    results: Any = Results(Scale("smoke"), runs)
    assert map.winner(results, at) == kind
    found = map.differences(results, at, "fine-tuned", "FedAvg")
    assert found == pytest.approx([0.6 if best == "fine-tuned" else 0.1] * 2)
    assert map.winner(results, (100.0, 50)) is None, "nothing was run there"
    (tiles,) = (block for block in map.blocks(results) if isinstance(block, Tiles))
    assert [*tiles.cells()] == [("50", "0.05", kind)]


def test_clients_of_the_map_differ_in_images_and_not_in_test_images_or_steps():
    recipe = map.map(Scale("smoke"))
    for name, cell in recipe.cells.items():
        size = int(name.split(", ")[1].split()[0])
        held = cell.clients.partition.options["size"]
        assert held - int(held * cell.clients.holdout) == size
        assert cell.local.steps == 2
