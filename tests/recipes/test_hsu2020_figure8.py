"""Figure 8 of paper 2: its grid, its panel over α, and what the tables have of both."""

import pytest

from fedlens.recipes import RECIPES
from fedlens.recipes.hsu2020.cifar import momenta, panels, rates
from fedlens.recipes.page import opening
from fedlens.recipes.recipe import Results, Scale
from fedlens.recipes.reproduce import reproduce
from fedlens.report.blocks import Contours, Table
from tests.recipes.diverging import diverged


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    monkeypatch.delenv("FEDLENS_DATA", raising=False)


@pytest.mark.parametrize("scale", ["smoke", "small", "paper"])
def test_a_point_of_the_grid_has_the_learning_rate_it_says(scale, monkeypatch):
    monkeypatch.setattr(Scale, "has", lambda *_: True)
    at = Scale(scale)
    cells = RECIPES["hsu2020/figure8"](at).cells
    for rate in rates(at):
        for left in momenta(at):
            words = f"η_eff {rate:.2g}, 1-β {left:.2g}"
            found = [cell for name, cell in cells.items() if name.endswith(words)]
            assert found
            for cell in found:
                momentum = cell.algorithm[0].options["momentum"]
                assert cell.local.lr / (1 - momentum) == pytest.approx(rate)


def test_the_last_two_rows_of_figure_8_compare_local_epochs():
    *_, one, five = panels(Scale("paper"))
    assert (one.goal, one.epochs, five.epochs) == (five.goal, 1, 5)


def test_what_diverges_has_no_point_in_figure_8_either(tmp_path):
    """However good it was before: the figure is of settings that last."""
    done = reproduce("hsu2020/figure8", "smoke", tmp_path / "out")
    cell = "cifar10, K 2, E 1, α 100, η_eff 0.1, 1-β 1"
    results = diverged(done.results, cell)
    recipe = RECIPES["hsu2020/figure8"](results.scale)

    def grid_of(results: Results) -> Contours:
        blocks = [block for block in recipe.blocks(results) if isinstance(block, Contours)]
        return next(block for block in blocks if block.title.endswith("α = 100"))

    whole, broken = grid_of(done.results), grid_of(results)
    assert whole.z[1][1] is not None and broken.z[1][1] is None
    assert broken.z[0] == whole.z[0]
    words = "Runs that diverged have no point: η_eff 0.1 with 1 − β 1."
    assert broken.caption.endswith(words) and words not in whole.caption
    assert "The star is the best single last evaluation" in whole.caption
    (said,) = (one for one in opening(recipe, results).paragraphs if "diverged" in one)
    assert said.endswith("diverged: " + cell + ". Such a run has no point in the figure.")


def test_figure_8_has_a_table_with_the_best_over_momenta(tmp_path):
    done = reproduce("hsu2020/figure8", "smoke", tmp_path / "out")
    results = diverged(done.results, "cifar10, K 2, E 1, α 100, η_eff 0.1, 1-β 1")
    blocks = RECIPES["hsu2020/figure8"](results.scale).blocks(results)
    title = "cifar10, K = 2, E = 1, α = 100: accuracy, %"
    (table,) = (b for b in blocks if isinstance(b, Table) and b.title == title)
    (grid,) = (b for b in blocks if isinstance(b, Contours) and b.title.endswith("α = 100"))

    def end(left):
        return results.final(f"cifar10, K 2, E 1, α 100, η_eff 0.01, 1-β {left}")

    best = max(end("0.1"), end("1"), key=lambda found: found.mean)
    two = [f"{100 * end(left).mean:.2f}" for left in ("0.1", "1")]
    relative = max(z for z in grid.z[0] if z is not None)
    assert list(table.rows[0]) == ["0.01", *two, f"{100 * best.mean:.2f}", f"{relative:.1%}"]
    rate, lasts, ended, over_momenta, _ = table.rows[1]
    assert (rate, ended) == ("0.1", "diverged in round 2")
    assert over_momenta == lasts


def test_an_alpha_of_one_momentum_is_a_column_of_figure_8_and_no_grid(tmp_path):
    wanted = ["cifar10, centralised", "*, α 100, *", "*, α 0, *, 1-β 0.1"]
    done = reproduce("hsu2020/figure8", "smoke", tmp_path / "out", only=wanted)
    where = "cifar10, K = 2, E = 1"
    panel, grid = (block for block in done.blocks if isinstance(block, Contours))
    assert (panel.title, grid.title) == (f"{where}: best over momenta", f"{where}, α = 100")
    assert panel.caption.endswith("Not run with all 2 momenta: α 0 with 1.")
    (table,) = (
        b for b in done.blocks if isinstance(b, Table) and b.title.startswith(f"{where}: best")
    )
    assert list(table.header) == ["η_eff", "α = 100", "α = 0"]
    for row, rate in zip(table.rows, ("0.01", "0.1"), strict=True):
        found = done.results.final(f"cifar10, K 2, E 1, α 0, η_eff {rate}, 1-β 0.1")
        assert found is not None
        assert (row[0], row[2]) == (rate, f"{100 * found.mean:.2f} at 0.1")
    results = diverged(done.results, "cifar10, K 2, E 1, α 0, η_eff 0.1, 1-β 0.1")
    blocks = RECIPES["hsu2020/figure8"](results.scale).blocks(results)
    (again,) = (b for b in blocks if isinstance(b, Table) and b.title == table.title)
    assert again.rows[1][2] == "diverged in round 2 at 0.1"


def test_settings_of_figure_8_that_were_run_at_several_alpha_have_a_table(tmp_path):
    """An α with a second momentum at one rate alone has no grid: the table has its runs."""
    at_0 = ["*, α 0, *, 1-β 0.1", "*, α 0, η_eff 0.1, 1-β 1"]
    wanted = ["cifar10, centralised", "*, α 100, *", *at_0]
    done = reproduce("hsu2020/figure8", "smoke", tmp_path / "out", only=wanted)
    grids = [block.title for block in done.blocks if isinstance(block, Contours)]
    where = "cifar10, K = 2, E = 1"
    assert grids == [f"{where}: best over momenta", f"{where}, α = 100"]
    title = f"{where}: accuracy of each setting, %"
    (table,) = (b for b in done.blocks if isinstance(b, Table) and b.title == title)
    assert list(table.header) == ["η_eff", "1 − β", "α = 100", "α = 0"]
    settings = [("0.01", "0.1"), ("0.1", "0.1"), ("0.1", "1")]
    for row, (rate, left) in zip(table.rows, settings, strict=True):
        cells = [f"cifar10, K 2, E 1, α {alpha}, η_eff {rate}, 1-β {left}" for alpha in (100, 0)]
        ends = [done.results.final(cell) for cell in cells]
        assert list(row) == [rate, left, *(f"{100 * end.mean:.2f}" for end in ends if end)]


def test_a_whole_panel_of_figure_8_needs_no_table_of_settings(tmp_path):
    done = reproduce("hsu2020/figure8", "smoke", tmp_path / "out")
    assert not any(block.title.endswith("of each setting, %") for block in done.blocks)


def test_a_single_alpha_of_figure_8_is_drawn_with_one_momentum_too(tmp_path):
    wanted = ["cifar10, centralised", "*, α 0, *, 1-β 0.1"]
    done = reproduce("hsu2020/figure8", "smoke", tmp_path / "out", only=wanted)
    (grid,) = (block for block in done.blocks if isinstance(block, Contours))
    assert grid.title == "cifar10, K = 2, E = 1, α = 0"
    assert any(
        isinstance(b, Table) and b.title == f"{grid.title}: accuracy, %" for b in done.blocks
    )
