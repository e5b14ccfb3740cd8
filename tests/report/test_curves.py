"""What pages draw round by round."""

from collections.abc import Callable
from pathlib import Path

from fedlens.report import read_all
from fedlens.report.blocks import Curves
from fedlens.report.runs import run_blocks

Make = Callable[..., Path]


def test_metrics_of_ones_own_and_of_algorithms_have_curves(recorded: Make) -> None:
    spent = {"seconds": 1.0, "bytes_up": 5, "server.lr": 0.1, "clients": [0, 1]}
    lines = [{"round": n, "test_accuracy": 0.5, "h_norm": 2.0 * n, **spent} for n in (1, 2, 3)]
    lines[1]["test_margin"] = 0.25
    drawn = {b.slug: b for b in run_blocks(read_all([recorded("a", lines)]))}
    assert drawn.keys() >= {"h_norm", "test_margin"}
    assert drawn.keys().isdisjoint({"seconds", "bytes_up", "server_lr", "clients", "round"})
    for name, points in (("h_norm", [(1, 2.0), (2, 4.0), (3, 6.0)]), ("test_margin", [(2, 0.25)])):
        block = drawn[name]
        assert isinstance(block, Curves)
        assert list(zip(block.lines[0].x, block.lines[0].y, strict=True)) == points
