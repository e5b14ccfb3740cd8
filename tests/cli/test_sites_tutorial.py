"""docs/sites.md as it stands: every command of it is run, on images as it describes them."""

import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image

from fedlens.data.survey import survey
from tests.children import in_a_child
from tests.command_line import only_line
from tests.sites import write_sites

PAGE = Path(__file__).parents[2] / "docs" / "sites.md"


def commands():
    found = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in found for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.fixture
def hospitals(here):
    place = write_sites(here / "hospitals")
    broken = place / "south" / "bag" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    return place


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_every_command_of_the_page_runs(hospitals, here, fedlens):
    has_onnx = all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime")))
    told = {}
    assert len(commands()) < 10
    for words in commands():
        if words[0] == "run":
            words = [*words, "rounds=2", "engine=sequential"]
        if words[0] == "export" and not has_onnx:
            words = [word.replace(".onnx", ".safetensors") for word in words]
        ended = fedlens(*words)
        assert ended.status == 0, ended.err
        told[words[0]] = ended.out
    assert "left out: hospitals/south/bag/3.jpg cannot be decoded" in told["import"]
    assert "missing: west has no trouser" in told["import"]
    assert "assumed: folders are site/class" in told["import"]
    assert "resized to 32×32" in told["import"]
    assert any(line.startswith("west") for line in told["run"].splitlines())
    assert len(told["predict"].splitlines()) == 13
    assert (here / "clothes.onnx.md").is_file()


def test_a_project_is_whole(here, fedlens):
    assert fedlens("new", "mine").status == 0
    names = {file.name for file in (here / "mine").iterdir()}
    assert names == {"README.md", "experiment.toml", "model.py", "algorithm.py", "test_project.py"}
    assert (here / "mine" / "README.md").read_text().startswith("# mine\n")

    def tests_of_the_project() -> None:
        os.chdir(here / "mine")
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_project.py"]))

    done = in_a_child(tests_of_the_project)
    assert "3 passed" in done.out, done.out
    again = fedlens("new", "mine")
    assert again.status == 2 and only_line(again.err, "mine")


def test_import_says_what_else_it_finds(hospitals, here, fedlens):
    found = survey(hospitals, "class/site")
    assert set(found.sites) == {"bag", "boot", "trouser"}
    (hospitals / "north" / "bag" / "copy.jpg").write_bytes(
        (hospitals / "north" / "bag" / "0.jpg").read_bytes()
    )
    ended = fedlens("import", "hospitals/north", "--out", "n.toml")
    assert "twice: bag/0.jpg and bag/copy.jpg are the same image" in ended.out
    assert "two classes" not in ended.out
    assert "assumed: no sites, so 10 clients get equal random parts" in ended.out
    assert "size" not in (here / "n.toml").read_text().replace("batch_size", "")
    assert fedlens("run", "n.toml", "rounds=1", "engine=sequential").status == 0
    assert "n.toml exists" in fedlens("import", "hospitals/north", "--out", "n.toml").err
    (here / "bare").mkdir()
    assert "has no images" in fedlens("import", "bare").err
    (here / "bare" / "a.jpg").write_bytes(b"")
    assert "is in no folder of a class" in fedlens("import", "bare").err
    assert fedlens("import", "nowhere").status == 2


def test_import_tells_of_copies_in_other_classes_apart_and_of_many_in_a_few_lines(here, fedlens):
    write_sites(here / "h", count=4)
    north = here / "h" / "north"
    content = (north / "bag" / "0.jpg").read_bytes()
    (north / "boot" / "copy.jpg").write_bytes(content)
    for number in range(23):
        (north / "bag" / f"copy{number}.jpg").write_bytes(content)
    lines = fedlens("import", "h/north", "--out", "n.toml").out.splitlines()
    assert [line for line in lines if line.startswith("two classes")] == [
        "two classes: bag/0.jpg and boot/copy.jpg are the same image: keep the one that is right"
    ]
    twice = [line for line in lines if line.startswith("twice")]
    assert len(twice) == 21 and twice[-1] == "twice: and 3 more"


def test_import_keeps_what_folders_say_of_tests(here, fedlens):
    for part in ("train", "test"):
        write_sites(here / "h" / part, count=4)
    assert fedlens("import", "h").status == 0
    assert (here / "h.csv").read_text().splitlines()[0] == "path,label,client,split"
    assert "32 training" not in fedlens("run", "h.toml", "rounds=1", "engine=sequential").out


def test_import_tells_the_first_of_many_and_refuses_names_that_no_file_can_hold(here, fedlens):
    for site in range(10):
        for label in range(10):
            if site in (label, 0) or label == 0:
                place = Path("many") / f"site{site}" / f"class{label}"
                place.mkdir(parents=True)
                Image.new("L", (4, 4), 20 * label + site).save(place / "1.png")
    told = fedlens("import", "many").out.splitlines()
    assert sum(line.startswith("missing: ") for line in told) == 21
    assert "missing: and 52 more" in told
    Path("many/site0/class0/1.png").rename(os.fsdecode(b"many/site0/class0/\xff.png"))
    ended = fedlens("import", "many", "--out", "other.toml")
    assert ended.status == 2 and "is not UTF-8: write it with other letters" in ended.err
    assert not Path("other.toml").exists()
