"""From the photos of three hospitals to a model that others can use, by the command line alone."""

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from fedlens.data.survey import survey

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hospitals(here, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    path = ROOT / "examples" / "three_hospitals.py"
    spec = importlib.util.spec_from_file_location("three_hospitals", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "three_hospitals", made)
    spec.loader.exec_module(made)
    return made.draw_hospitals(here / "hospitals", count=40)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_few_photos_and_six_commands_make_a_model(hospitals, here, fedlens):
    told = {}
    for words in (
        "import hospitals",
        "partition hospitals.toml",
        "run hospitals.toml",
        "predict runs/hospitals hospitals/west/malignant",
        "evaluate runs/hospitals --data hospitals.csv",
        "export runs/hospitals --out skin.pt",
    ):
        ended = fedlens(*words.split())
        assert ended.status == 0, ended.err
        told[words.split()[0]] = ended.out
    assert "missing: west has no inflamed" in told["import"]
    assert "left out: hospitals/south/benign/south-000.jpg" in told["import"]
    assert "north-001.png" not in told["import"]  # 16 bits are read
    tables = tomllib.loads((here / "hospitals.toml").read_text())
    assert (tables["model"], tables["train"]) == ("efficientnet-lite0", "head")
    found = json.loads((here / "runs/hospitals/evaluation.json").read_text())["confusion"]
    classes = json.loads((here / "runs/hospitals/manifest.json").read_text())["classes"]
    malignant = classes.index("malignant")
    assert sum(found[malignant]) == 4 and found[malignant][malignant] >= 3
    card = (here / "skin.pt.md").read_text()
    assert "Apache-2.0" in card and "579344248a93" in card
    manifest = json.loads((here / "runs/hospitals/manifest.json").read_text())
    assert manifest["weights"]["licence"] == "Apache-2.0"
    assert re.fullmatch("[0-9a-f]{64}", manifest["weights"]["sha256"])


def test_a_photo_on_its_side_and_one_of_16_bits_are_as_the_others(hospitals):
    found = survey(hospitals)
    assert {one.size for one in found.seen} == {(300, 400)}
    assert [one.path.name for one in found.seen if one.gray] == ["north-001.png"]
    assert len(found.broken) == 1
