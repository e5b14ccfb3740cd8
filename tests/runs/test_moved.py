"""Runs whose files were moved go on with them, wherever they are now, and with no others."""

import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

import fedlens as fl
from tests.runs.resumable import Stop, assert_same_run, contents
from tests.sites import write_sites

pytestmark = pytest.mark.usefixtures("one_thread", "quick_pages")

EXPERIMENT = """
model = "linear"
rounds = 4
engine = "sequential"
local = { batch_size = 8, momentum = 0.9, reset = false }
algorithm = "fedavgm"
"""
KINDS = {
    "csv": 'dataset = { name = "csv", path = "photos.csv", size = 8 }',
    "folder": 'dataset = { name = "folder", path = "photos", layout = "site/class", size = 8 }',
}


def write_project(folder: Path, kind: str) -> Path:
    """A folder with photos of three sites, and an experiment on them."""
    photos = write_sites(folder / "photos", count=6)
    rows = [
        f"photos/{site}/{name}/{file.name},{name},{site}"
        for site, name, file in sorted((p.parts[-3], p.parts[-2], p) for p in photos.rglob("*.jpg"))
    ]
    (folder / "photos.csv").write_text("\n".join(["path,label,client", *rows]))
    (folder / "a.toml").write_text(f"{KINDS[kind]}\n{EXPERIMENT}")
    return folder


def stopped(project: Path) -> Path:
    """A run of the project's experiment that was stopped after two of its rounds."""
    run = project / "runs" / "a"
    with pytest.raises(KeyboardInterrupt):
        fl.run(fl.Experiment.read(project / "a.toml"), run, watch=Stop(2))
    return run


def set_path(run: Path, path: Path) -> None:
    """As a person does, in an editor."""
    file = run / "experiment.toml"
    text, count = re.subn(r'path = ".*?"', f'path = "{path}"', file.read_text())
    assert count == 1
    file.write_text(text)


@pytest.mark.parametrize(("kind", "data"), [("csv", "photos.csv"), ("folder", "photos")])
def test_a_run_of_a_project_that_was_moved_goes_on_to_the_same_bytes(
    tmp_path: Path, kind: str, data: str
) -> None:
    first = write_project(tmp_path / "first", kind)
    fl.run(fl.Experiment.read(first / "a.toml"), first / "runs" / "whole")
    stopped(first)
    moved = first.rename(tmp_path / "second")
    run = moved / "runs" / "a"
    before = contents(run)
    with pytest.raises(ValueError, match=r"dataset\.path") as told:
        fl.resume(run)
    assert str(first / data) in str(told.value)
    assert str(run / "experiment.toml") in str(told.value)
    assert contents(run) == before
    set_path(run, moved / data)
    with pytest.raises(KeyboardInterrupt):
        fl.resume(run, watch=Stop(3))
    fl.resume(run)
    assert_same_run(run, moved / "runs" / "whole")


def test_other_data_in_another_place_are_refused_by_name(tmp_path: Path) -> None:
    run = stopped(write_project(tmp_path / "first", "folder"))
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "first" / "photos", other)
    Image.new("L", (28, 28)).save(other / "north" / "bag" / "0.jpg")
    set_path(run, other)
    before = contents(run)
    with pytest.raises(ValueError, match="the data are not those it started with") as told:
        fl.resume(run)
    assert f"images or labels of {other} differ" in str(told.value)
    assert contents(run) == before


def test_a_file_of_weights_may_move_but_not_change(tmp_path: Path) -> None:
    project = write_project(tmp_path / "first", "folder")
    fl.run(fl.Experiment.read(project / "a.toml", ["rounds=1"]), project / "runs" / "before")
    start = (project / "runs" / "before" / "model.safetensors").rename(
        project / "start.safetensors"
    )
    experiment = fl.Experiment.read(project / "a.toml", [f"weights={start}"])
    fl.run(experiment, project / "runs" / "whole")
    run = project / "runs" / "a"
    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, run, watch=Stop(2))
    file = run / "experiment.toml"
    text = file.read_text()
    moved = start.rename(tmp_path / "moved.safetensors")
    with pytest.raises(ValueError, match="gone"):
        fl.resume(run)
    other = project / "runs" / "whole" / "model.safetensors"
    file.write_text(text.replace(str(start), str(other)))
    with pytest.raises(ValueError, match="changed"):
        fl.resume(run)
    file.write_text(text.replace(str(start), str(moved)))
    fl.resume(run)
    assert_same_run(run, project / "runs" / "whole")
    rest = [line for line in text.splitlines() if not line.startswith("weights")]
    file.write_text("\n".join(rest))
    with pytest.raises(ValueError, match="weights"):
        fl.resume(run)


def test_a_trace_of_devices_may_move_but_not_change(tmp_path: Path) -> None:
    project = write_project(tmp_path / "first", "folder")
    trace = project / "devices.csv"
    trace.write_text("device,examples_per_second,up_mbit,down_mbit\na,10,1,1\nb,20,1,1\n")
    named = f'clients.devices={{ name = "trace", path = "{trace}" }}'
    experiment = fl.Experiment.read(project / "a.toml", [named])
    fl.run(experiment, project / "runs" / "whole")
    run = project / "runs" / "a"
    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, run, watch=Stop(2))
    file = run / "experiment.toml"
    text = file.read_text()
    moved = trace.rename(tmp_path / "moved.csv")
    with pytest.raises(ValueError, match="gone"):
        fl.resume(run)
    trace.write_text(moved.read_text().replace("20", "30"))
    with pytest.raises(ValueError, match="changed"):
        fl.resume(run)
    file.write_text(text.replace(str(trace), str(moved)))
    fl.resume(run)
    assert_same_run(run, project / "runs" / "whole")


def test_the_folder_of_named_data_sets_does_not_stand_in_for_a_path(tmp_path: Path) -> None:
    """`--data` is where data sets are looked for by name: what has a path has it in one place."""
    run = stopped(write_project(tmp_path / "first", "csv"))
    moved = (tmp_path / "first" / "photos.csv").rename(tmp_path / "photos.csv")
    with pytest.raises(ValueError, match="gone"):
        fl.resume(run, data=moved.parent)
