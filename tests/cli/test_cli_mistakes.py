import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.children import command, in_a_child
from tests.command_line import EXPERIMENT, everything, only_line
from tests.data.published_files import write_idx_set

pytestmark = [
    pytest.mark.usefixtures("here"),
    # typer 0.20 asks click for names that click is about to drop.
    pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning"),
]


def truncated() -> str:
    """A data set of which one file was cut short, in `data`."""
    write_idx_set(Path("data/fashion-mnist"), zipped=False)
    path = Path("data/fashion-mnist/train-images-idx3-ubyte")
    path.write_bytes(path.read_bytes()[:-100])
    return path.name


def spoilt_npz() -> str:
    labels = np.zeros(4, np.int64)
    images = np.zeros((4, 5, 5), np.uint8)
    np.savez("spoilt.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    path = Path("spoilt.npz")
    path.write_bytes(path.read_bytes()[:300])
    return path.name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.toml", "local.lrr=1"], "unknown key 'local.lrr': did you mean 'lr'?"),
        (["a.toml", "local.lr=fast"], "local.lr is 'fast': expected a number"),
        (
            ["a.toml", "local.lr=0.1,0.2"],
            "(to go through several values: fedlens sweep a.toml --grid local.lr=0.1,0.2)",
        ),
        (["a.toml", "rounds=0"], "rounds is 0: choose 1 or more"),
        (["a.toml", "nonsense"], "'nonsense' is not an override: write key=value"),
        (["missing.toml"], "missing.toml: No such file or directory: name a .toml or .json file"),
        (["."], "Is a directory: name a file; for a folder of images `fedlens import` writes one"),
        (["b.toml"], "b.toml: No such file or directory: did you mean 'a.toml'?"),
        (["broken.toml"], "broken.toml is not valid TOML: "),
        (["a.toml", "dataset=fashion-mnist"], "fashion-mnist is not in "),
        (["a.toml", "dataset={name='npz', path='no.npz'}"], "no.npz cannot be read (No such"),
        (["a.toml", "dataset=fashion-mnist", "--data", "data"], "is damaged (15,596 bytes at"),
        (["a.toml", "dataset={name='npz', path='spoilt.npz'}"], "spoilt.npz cannot be read (File"),
        (["a.toml", "clients.count=6001"], "6,001 clients but 6,000 examples: choose no more"),
        (["a.toml", "clients.per_round=31"], "per_round is 31: there are 30 clients that train"),
        (["a.toml", "--seed", "x"], "Invalid value for '--seed': 'x' is not a valid integer"),
        (["a.toml", "--seed", "-1"], "seed is -1: choose 0 or more"),
        (["a.toml", "--device", "tpu"], "device is 'tpu': choose auto, cpu or cuda"),
        (["a.toml", "--sed", "3"], "No such option: --sed"),
        (["a.toml", "--engine", "ray"], "not an option: write engine=VALUE"),
        (["a.toml", "dataset=CIFAR10"], "did you mean 'cifar10'?"),
        (["a.toml", "model=resnet50"], "'timm:resnet50'"),
        (["a.toml", "--lr", "3"], "write local.lr=VALUE or server.lr=VALUE"),
        (["a.toml", "model=nowhere:net"], "model 'nowhere:net' cannot be imported (No module"),
        (["a.toml", "algorithm=['fedavgm', 'lambda-sum', {name='fedavg', over='population'}]"],
         "lambda-sum and fedavg both refill `weigh`: leave one out"),
        (["a.toml", "--out", "a.toml"], "a.toml exists and is no run: choose another"),
        (["a.toml", "--out", "a.toml", "--overwrite"], "a.toml is not a run, so it is not over"),
        (["a.toml", "--out", "a.toml/run"], "cannot be written (Not a directory): choose another"),
        (["a.toml", "--ray-address", "a:1"], "--ray-address a:1 is for engine ray: add engine=ray"),
        ([], "Missing argument 'EXPERIMENT'"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_line_and_status_2_and_nothing_is_written(fedlens, words, message):
    truncated()
    spoilt_npz()
    Path("broken.toml").write_text("rounds = = 3")
    before = everything()
    status, out, err = fedlens("run", *words)
    assert (status, out) == (2, "")
    assert err.startswith("fedlens: ")
    assert err.count("\n") == 1
    assert message in err
    assert everything() == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("list algoritms", "KIND is 'algoritms': did you mean 'algorithms'?"),
        ("import a --layout class/sites", "--layout is 'class/sites': did you mean 'class/site'?"),
        ("export a --out b --format zip",
         "--format is 'zip': choose one of onnx, safetensors, torchscript"),
        ("bench --rounds 3", "No such option: --rounds: see fedlens bench --help"),
        ("report --ot a", "No such option: --ot: did you mean --out?"),
        ("run a.toml --seeds 3",
         "--seeds is an option of fedlens sweep: run the experiment by that command"),
        ("lst", "No such command 'lst'. Did you mean 'list'?"),
        ("data zzz", "No such command 'zzz': see fedlens data --help"),
        ("schema a", "Got unexpected extra argument (a): see fedlens schema --help"),
        ("run a.toml --seed x",
         "Invalid value for '--seed': 'x' is not a valid integer: see fedlens run --help"),
    ],
)  # fmt: skip
def test_a_word_that_a_command_does_not_take_gets_the_nearest_or_where_to_read(
    fedlens, words, line
):
    assert fedlens(*words.split()) == (2, "", f"fedlens: {line}\n")


@pytest.mark.parametrize(
    "words",
    [
        ("sweep", "a.toml", "--grid", "local.lr=0.1,0.2"),
        ("compare", "a.toml", "b.toml"),
        ("reproduce", "fedavg-cifar10/headline", "--scale", "smoke", "engine=processes"),
    ],
)
def test_a_cluster_that_no_run_would_use_is_a_mistake(fedlens, words):
    Path("b.toml").write_text(Path("a.toml").read_text())
    before = everything()
    status, out, err = fedlens(*words, "--ray-address", "a:1")
    assert (status, out) == (2, "")
    assert "--ray-address a:1 is for engine ray" in err
    assert everything() == before


def test_a_mistake_costs_no_earlier_run(fedlens):
    assert fedlens("run", "a.toml", "--out", "run").status == 0
    before = everything()
    for wrong in ("clients.count=6001", "norm=local", "dataset=mnist", "local.lrr=3"):
        assert fedlens("run", "a.toml", wrong, "--out", "run", "--overwrite").status == 2
    assert everything() == before
    status, _, err = fedlens("run", "a.toml", "--out", "run")
    assert status == 2
    assert only_line(err, "--overwrite")
    assert everything() == before

    Path("run/clients.json").write_text("an old one's")
    assert fedlens("run", "a.toml", "--out", "run", "--overwrite", "--seed", "5").status == 0
    assert not Path("run/clients.json").exists()
    assert json.loads(Path("run/manifest.json").read_text())["seed"] == 5


def test_the_run_that_is_there_is_replaced_where_no_folder_is_named(fedlens):
    for words in ([], ["--seed", "5", "--overwrite"]):
        assert fedlens("run", "a.toml", "-q", *words).status == 0
    assert [path.name for path in Path("runs").iterdir()] == ["a"]
    assert json.loads(Path("runs/a/manifest.json").read_text())["seed"] == 5


def test_a_folder_that_is_no_run_is_never_overwritten(fedlens):
    Path("project").mkdir()
    Path("project/experiment.toml").write_text(EXPERIMENT)
    Path("project/notes.txt").write_text("dear diary")
    before = everything()
    for folder in (".", "project"):
        status, _, err = fedlens("run", "a.toml", "--out", folder, "--overwrite")
        assert (status, err.count("\n")) == (2, 1)
        assert "is not a run, so it is not overwritten: choose another" in err
        _, _, err = fedlens("run", "a.toml", "--out", folder)
        assert only_line(err, folder) and "--overwrite" not in err, "that helps"
    assert everything() == before


def test_the_folder_one_is_in_is_overwritten_by_its_name_alone(fedlens, monkeypatch):
    assert fedlens("run", "a.toml", "--out", "run", "-q").status == 0
    monkeypatch.chdir("run")
    before = everything()
    status, _, err = fedlens("run", "../a.toml", "--out", ".", "--overwrite")
    assert (status, err.count("\n")) == (2, 1) and "write its name instead" in err
    assert everything() == before


MINE = """
import torch
from torch import nn
import fedlens as fl

def no_net(shape, outputs):
    raise RuntimeError("no net today\\nor tomorrow")

class Pair(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.layer = nn.Linear(784, outputs)

    def forward(self, x):
        return self.layer(x.flatten(1)), x

class Misspelt(Pair):
    def forward(self, x):
        return self.lair(x)

@fl.paper
def forgetful(base):
    base.solve

@fl.paper
def misspelt(base):
    return base.solv

def arrays(source):
    images, labels = torch.zeros(4, 1, 28, 28), torch.tensor([0, 1, 0, 1])
    train = fl.Examples(images.numpy(), labels)
    return fl.Dataset("mine", train, train, ("a", "b"))

def one_hot(source):
    images, labels = torch.zeros(4, 1, 28, 28), torch.eye(2, dtype=torch.int64).repeat(2, 1)
    train = fl.Examples(images, labels)
    return fl.Dataset("mine", train, train, ("a", "b"))
"""


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            "model=mine:no_net",
            "failed (mine.py, line 7, in no_net: RuntimeError: no net today): fix it",
        ),
        ("model=mine:Pair", "the model gives a tuple: let it return its outputs alone, a tensor"),
        (
            "model=mine:Misspelt",
            "in forward: AttributeError: 'Misspelt' object has no attribute 'lair': fix it",
        ),
        ("algorithm=mine:forgetful", "forgetful gave NoneType: let it return an Algorithm, as"),
        (
            "algorithm=['median', 'mine:misspelt']",
            "mine.py, line 27, in misspelt: AttributeError: 'Algorithm' object has no attribute "
            "'solv': fix it there (after median)",
        ),
        ("dataset=mine:arrays", "images are a ndarray: give a tensor, as torch.as_tensor(images)"),
        ("dataset=mine:one_hot", "as one-hot rows do, give labels.argmax(1)"),
    ],
)
def test_a_mistake_in_ones_own_code_gets_one_line_and_status_2(fedlens, own, message, engine):
    Path("mine.py").write_text(MINE)
    status, out, err = fedlens("run", "a.toml", own, f"engine={engine}", "--out", "run")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not Path("run").exists()


def test_what_does_not_exist_is_refused_in_one_line(fedlens):
    mistakes = {
        (
            "run",
            "a.toml",
            "--data",
            "nowhere",
        ): "nowhere is not a folder of data sets: name",
        ("data", "list", "--data", "nowhere"): "nowhere is not a folder of data sets: name",
        ("partition", "a.toml", "--out", "p.xyz"): "--out p.xyz: the picture is a PNG file, let",
        ("report", "nowhere"): "nowhere is not a run folder: there is no such folder",
        (
            "report",
            "a.toml",
        ): "a.toml is not a run folder: it is a file; name one that `fedlens run`",
        ("report", "nowhere", "--out", "p.html"): "--out p.html: name a folder for report.html",
        ("import", "runs"): "runs has runs in it, as runs/a: name a folder of images",
        ("import", "photos.csv"): 'name one with images, or set dataset = { name = "csv", path = "',
        ("run", "photos.csv"): '.toml or .json file, with dataset = { name = "csv", path = "photos',
        ("partition", "nowhere.toml"): "cannot read the experiment nowhere.toml",
        ("data", "get", "mnst"): "'mnst' is not a published set: did you mean 'mnist'?",
        ("data", "get", "fashion-mnist-mini"): "is inside the package: there is nothing to fetch",
        ("data", "check", "mnist"): "mnist is not in ",
    }
    Path("photos.csv").write_text("path,label\n0.png,cat\n")
    Path("runs/a/figures").mkdir(parents=True)
    Path("runs/a/manifest.json").write_text("{}")
    Path("runs/a/experiment.toml").write_text("")
    before = everything()
    for words, message in mistakes.items():
        status, out, err = fedlens(*words)
        assert (status, out, err.count("\n")) == (2, "", 1), words
        assert err.startswith("fedlens: ")
        assert message in err
    assert everything() == before


def test_the_command_itself_runs_and_shows_a_traceback_only_when_asked():
    asked = in_a_child(partial(command, "run", "a.toml", "local.lr=-1", "--debug"))
    assert (asked.status, asked.out) == (2, "")
    assert "Traceback (most recent call last)" in asked.err
    assert asked.err.splitlines()[-1] == "fedlens: local.lr is -1.0: choose 0 or more"
    assert set(everything()) == {"a.toml"}


@pytest.mark.parametrize("words", ["compare c.toml b.toml --seeds 5", "compare nowhere a.toml"])
def test_files_to_compare_that_are_not_there_are_named(fedlens, words):
    remedy = "name experiment files, or folders that fedlens run wrote"
    missing = words.split()[1]
    assert fedlens(*words.split()) == (2, "", f"fedlens: there is no {missing}: {remedy}\n")


def test_a_schema_replaces_no_file_unless_it_is_told_to(fedlens):
    Path("mine.json").write_text("mine")
    line = "fedlens: mine.json exists: choose another --out, or add --overwrite\n"
    assert fedlens("schema", "--out", "mine.json") == (2, "", line)
    assert Path("mine.json").read_text() == "mine"
    assert fedlens("schema", "--out", "mine.json", "--overwrite").status == 0
    assert "$schema" in Path("mine.json").read_text()
