"""Blocks about clients that fail."""

import json

import pytest
import torch

import fedlens as fl
from fedlens.config.names import OUTCOMES
from fedlens.report import read_all, report
from fedlens.report.blocks import Curves, Tiles
from fedlens.report.draw import pictures
from fedlens.report.holdings import MEANINGS
from fedlens.report.runs import run_blocks
from tests.toys import toy


def ran(folder, **more):
    described = fl.Experiment(
        dataset=toy(),
        model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)),
        rounds=4,
        engine="sequential",
        clients=fl.Clients(count=8, per_round=4),
        **more,
    )
    fl.run(described, folder)
    return folder


def test_the_strip_shows_what_became_of_everyone_who_was_asked(tmp_path):
    folder = ran(tmp_path / "run", faults={"dropped": 0.3, "huge": 0.1}, reporting={"quorum": 0.5})
    blocks = run_blocks(read_all([folder]))
    (strip,) = (block for block in blocks if isinstance(block, Tiles))
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    cells = {(int(str(r)), int(str(c))): kind for r, c, kind in strip.sheet()[1]}
    for record in records:
        for client in record["clients"]:
            assert cells.pop((client, record["round"])) == "reported"
        for name, clients in record["failed"].items():
            for client in clients:
                assert cells.pop((client, record["round"]), name) == name
    assert not cells
    assert "reported" in strip.words() and "dropped: it stopped on its way" in strip.caption
    assert pictures(strip, ["png"])["png"][:4] == b"\x89PNG"
    (by_time,) = (
        b for b in blocks if isinstance(b, Curves) and b.slug == "accuracy_by_virtual_time"
    )
    assert list(by_time.lines[0].x) == [record["clock"] for record in records]


def test_every_outcome_is_explained():
    assert MEANINGS.keys() == set(OUTCOMES)


def test_a_run_without_a_clock_has_no_strip(tmp_path):
    folder = ran(tmp_path / "run")
    assert not any(isinstance(block, Tiles) for block in run_blocks(read_all([folder])))


def test_every_outcome_has_a_meaning():
    assert tuple(MEANINGS) == OUTCOMES


@pytest.mark.usefixtures("svg_alone")
def test_records_that_make_no_sense_are_passed_over(tmp_path):
    folder = ran(tmp_path / "run", faults={"dropped": 0.3})
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    lines[0]["failed"], lines[1]["clients"], lines[2]["failed"] = 3, None, {"odd": [1], "nan": 2}
    lines[3]["clock"] = None
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report([folder]).exists()
