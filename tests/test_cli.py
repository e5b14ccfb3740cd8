import gzip
import hashlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from data.published_files import write_idx_set
from fedlens.algorithms import ALGORITHMS
from fedlens.data import DATASETS, catalogue
from fedlens.data.catalogue import FASHION_MNIST, PUBLISHED, Download, Published
from fedlens.data.partitions import PARTITIONS
from fedlens.models import MODELS

# typer 0.20 asks click for names that click is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning")

EXPERIMENT = """
dataset = "fashion-mnist-mini"
model = "linear"
rounds = 2
engine = "sequential"

[clients]
count = 30
per_round = 3
partition = { name = "dirichlet", alpha = 0.5 }
"""


class Ended(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty place with one experiment, and nothing of whoever runs the tests."""
    handler = signal.getsignal(signal.SIGTERM)
    for name in ("FEDLENS_DATA", "FEDLENS_MIRROR", "http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(EXPERIMENT)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def fedlens(monkeypatch, capsys) -> Callable[..., Ended]:
    """The command, in this process."""
    from fedlens import cli

    def command(*words: object) -> Ended:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["fedlens", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return Ended(ended.value.code, out, err)

    return command


def everything() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


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
        (["a.toml", "rounds=0"], "rounds is 0: choose 1 or more"),
        (["a.toml", "nonsense"], "'nonsense' is not an override: write key=value"),
        (["missing.toml"], "cannot read the experiment missing.toml: No such file or directory"),
        (["."], "cannot read the experiment .: Is a directory"),
        (["broken.toml"], "broken.toml is not valid TOML: "),
        (["a.toml", "dataset=fashion-mnist"], "fashion-mnist is not in "),
        (["a.toml", "dataset={name='npz', path='no.npz'}"], "no.npz cannot be read (No such"),
        (["a.toml", "dataset=fashion-mnist", "--data", "data"], "is damaged (15580 bytes, shorter"),
        (["a.toml", "dataset={name='npz', path='spoilt.npz'}"], "spoilt.npz cannot be read as"),
        (["a.toml", "clients.count=6001"], "6001 clients but 6000 examples: choose no more"),
        (["a.toml", "clients.per_round=31"], "per_round is 31: there are 30 clients: choose 1"),
        (["a.toml", "--seed", "x"], "Invalid value for '--seed': 'x' is not a valid integer"),
        (["a.toml", "--seed", "-1"], "seed is -1: choose 0 or more"),
        (["a.toml", "--device", "tpu"], "device is 'tpu': choose auto, cpu or cuda"),
        (["a.toml", "--sed", "3"], "No such option: --sed"),
        (["a.toml", "model=mine:net"], "model 'mine:net' cannot be imported (No module named"),
        (["a.toml", "algorithm=['fedavgm', 'lambda-sum', {name='fedavg', over='population'}]"],
         "lambda-sum and fedavg both refill `weigh`: leave one out"),
        (["a.toml", "--out", "a.toml"], "a.toml exists: choose another --out, or add --overwrite"),
        (["a.toml", "--out", "a.toml", "--overwrite"], "a.toml is not a run, so it is not over"),
        (["a.toml", "--out", "a.toml/run"], "cannot be written (File exists): choose another"),
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


def test_a_mistake_costs_no_earlier_run(fedlens):
    assert fedlens("run", "a.toml", "--out", "run").status == 0
    before = everything()
    for wrong in ("clients.count=6001", "norm=local", "dataset=mnist", "local.lrr=3"):
        assert fedlens("run", "a.toml", wrong, "--out", "run", "--overwrite").status == 2
    assert everything() == before
    status, _, err = fedlens("run", "a.toml", "--out", "run")
    assert status == 2
    assert err == "fedlens: run exists: choose another --out, or add --overwrite\n"
    assert everything() == before

    Path("run/stale.txt").write_text("an old one's")
    assert fedlens("run", "a.toml", "--out", "run", "--overwrite", "--seed", "5").status == 0
    assert not Path("run/stale.txt").exists()
    assert json.loads(Path("run/manifest.json").read_text())["seed"] == 5


def test_a_folder_that_is_no_run_is_never_overwritten(fedlens):
    Path("project").mkdir()
    Path("project/experiment.toml").write_text(EXPERIMENT)
    Path("project/notes.txt").write_text("dear diary")
    before = everything()
    for folder in (".", "project"):
        status, _, err = fedlens("run", "a.toml", "--out", folder, "--overwrite")
        assert (status, err.count("\n")) == (2, 1)
        assert "is not a run, so it is not overwritten: choose another --out" in err
    assert everything() == before


def test_a_run_shows_progress_and_where_the_result_is(fedlens):
    status, out, err = fedlens("run", "a.toml", "local.lr=0.05")
    assert status == 0
    assert "run:    runs/a\n" in out
    assert "report: runs/a/report.html\n" in out
    assert "finished" in out
    assert "a: round 1/2  train loss " in err
    assert "a: round 2/2  train loss " in err
    assert "about 0 s left" in err
    assert Path("runs/a/report.html").exists()
    assert "lr = 0.05" in Path("runs/a/experiment.toml").read_text()

    status, out, err = fedlens("run", "a.toml", "--quiet")
    assert (status, err) == (0, "")
    assert "run:    runs/a-2\n" in out

    assert fedlens("run", "runs/a/experiment.toml", "--out", "again", "-q").status == 0
    model, again = (Path(p, "model.safetensors").read_bytes() for p in ("runs/a", "again"))
    assert model == again

    status, out, err = fedlens("report", "runs/a", "runs/a-2", "again", "--out", "page")
    assert (status, err) == (0, "")
    assert out.endswith("report: page/report.html\n")
    assert len([line for line in out.splitlines() if "finished" in line]) == 3
    assert Path("page/report.html").exists()
    assert list(Path("page/figures").glob("*.png"))


def test_json_is_all_there_is_on_standard_output(fedlens):
    status, out, err = fedlens("run", "a.toml", "--json", "--out", "run")
    assert status == 0
    assert "round 2/2" in err
    assert json.loads(out) == json.loads(Path("run/summary.json").read_text())
    assert json.loads(fedlens("resume", "run", "--json", "-q").out)["status"] == "finished"
    assert json.loads(fedlens("doctor", "--json").out)["package"]["torch"]
    own = {"folder", "csv", "npz"}  # these are the user's files: there is no place to look for them
    listed = {row["name"] for row in json.loads(fedlens("data", "list", "--json").out)}
    assert listed == set(fedlens("list", "datasets").out.split()) - own


def test_a_run_that_diverges_ends_with_3_and_advice(fedlens):
    status, out, err = fedlens("run", "a.toml", "model=lenet5", "local.lr=1e30", "--out", "run")
    assert status == 3
    assert "diverged" in out
    assert "fedlens: the run diverged in round " in err
    assert err.endswith(": try a smaller local.lr\n")
    assert json.loads(Path("run/summary.json").read_text())["status"] == "diverged"
    status, out, err = fedlens("resume", "run", "--json")
    assert status == 3
    assert json.loads(out)["status"] == "diverged"


def test_a_run_that_fails_ends_with_1(fedlens):
    Path("bad_model.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, shape, outputs):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(784, outputs))\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        Net.calls += self.training\n"
        "        if Net.calls > 3: raise RuntimeError('it broke')\n"
        "        return super().forward(x)\n"
    )
    status, out, err = fedlens("run", "a.toml", "model=bad_model:Net", "--out", "run")
    assert (status, out) == (1, "")
    assert err == "fedlens: failed: RuntimeError: it broke\n"
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"
    _, _, err = fedlens("run", "a.toml", "model=bad_model:Net", "--out", "b", "--debug")
    assert "Traceback (most recent call last)" in err


def test_a_partition_is_told_before_any_training(fedlens):
    status, out, err = fedlens("partition", "a.toml", "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told.keys() == {"num_clients", "sizes", "label_counts", "emd"}
    assert told["num_clients"] == len(told["sizes"]) == len(told["label_counts"]) == 30
    assert [sum(counts) for counts in told["label_counts"]] == told["sizes"]
    assert sum(told["sizes"]) == 6000
    assert 0 < told["emd"] < 2
    assert set(everything()) == {"a.toml"}

    assert fedlens("partition", "a.toml", "--json").out == out
    assert fedlens("partition", "a.toml", "--json", "--seed", "0").out == out
    other = json.loads(fedlens("partition", "a.toml", "--json", "--seed", "1").out)
    assert other["label_counts"] != told["label_counts"]
    alike = fedlens("partition", "a.toml", "clients.partition=iid", "--json").out
    assert json.loads(alike)["emd"] < told["emd"]

    fedlens("run", "a.toml", "rounds=1", "--out", "run", "-q")
    assert json.loads(Path("run/partition.json").read_text()) == told

    status, out, err = fedlens("partition", "a.toml")
    assert (status, err) == (0, "")
    assert "30 clients hold 6,000 of 6,000 examples" in out
    assert "EMD: " in out
    assert out.endswith("picture: a-split.png\n")
    assert Path("a-split.png").read_bytes().startswith(b"\x89PNG")
    picture = fedlens("partition", "a.toml", "--json", "--out", "p.png")
    assert json.loads(picture.out) == told
    assert Path("p.png").exists()


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("algorithms", ALGORITHMS),
        ("models", MODELS),
        ("partitions", PARTITIONS),
        ("datasets", DATASETS),
    ],
)
def test_a_list_is_one_name_a_line(fedlens, kind, table):
    status, out, err = fedlens("list", kind)
    assert (status, err) == (0, "")
    assert out.splitlines() == list(table)


def test_what_does_not_exist_is_refused_in_one_line(fedlens):
    mistakes = {
        ("list", "algoritms"): "'algoritms' is not one of",
        ("lst",): "No such command 'lst'",
        ("report", "nowhere"): "nowhere is not a run folder: there is no such folder",
        ("partition", "nowhere.toml"): "cannot read the experiment nowhere.toml",
        ("data", "get", "mnst"): "'mnst' is not a published set: did you mean 'mnist'?",
        ("data", "get", "fashion-mnist-mini"): "is inside the package: there is nothing to fetch",
        ("data", "check", "mnist"): "mnist is not in ",
    }
    before = everything()
    for words, message in mistakes.items():
        status, out, err = fedlens(*words)
        assert (status, out, err.count("\n")) == (2, "", 1), words
        assert err.startswith("fedlens: ")
        assert message in err
    assert everything() == before


def test_the_doctor_names_what_is_here_and_what_is_missing(fedlens):
    status, out, err = fedlens("doctor")
    assert (status, err) == (0, "")
    found = {line[:28].strip(): line[28:].strip() for line in out.splitlines()}
    assert {"fedlens", "python", "cores", "memory", "gpu", "engine", "package torch"} <= set(found)
    assert found["data mnist"] == "missing"
    assert found["data fashion-mnist-mini"] == "inside the package"


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror(here, monkeypatch) -> Iterator[Path]:
    """A small Fashion-MNIST in the catalogue, and in a folder that a loopback server shows."""
    served = here / "served"
    write_idx_set(served / "fashion-mnist", zipped=True)
    contents = {p.name: p.read_bytes() for p in sorted((served / "fashion-mnist").iterdir())}
    files = tuple(
        Download(name, len(content), hashlib.md5(content).hexdigest())
        for name, content in contents.items()
    )
    forms = catalogue._idx_forms(FASHION_MNIST.forms[0].folders, files)
    small = {name: getattr(FASHION_MNIST, name) for name in FASHION_MNIST.__dataclass_fields__}
    small |= {"downloads": files, "forms": forms}
    monkeypatch.setitem(PUBLISHED, "fashion-mnist", Published(**small))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=served)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("FEDLENS_MIRROR", f"http://127.0.0.1:{server.server_address[1]}")
        yield served / "fashion-mnist"
        server.shutdown()
        thread.join()


def test_data_is_listed_fetched_checked_and_run_on(fedlens, mirror, monkeypatch):
    assert "fashion-mnist       " in fedlens("data", "list").out
    assert "not here" in fedlens("data", "list").out
    status, out, err = fedlens("data", "get", "fashion-mnist", "--data", "d")
    assert (status, out) == (0, "fashion-mnist: d/fashion-mnist\n")
    assert "MB" in err
    status, out, err = fedlens("data", "check", "--data", "d")
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["ok"] * 5

    monkeypatch.setenv("FEDLENS_DATA", "d")
    assert "d/fashion-mnist" in fedlens("data", "list").out
    few = ["dataset=fashion-mnist", "clients={count=2}", "rounds=1"]
    assert fedlens("run", "a.toml", *few, "--out", "run", "-q").status == 0

    file = Path("d/fashion-mnist/t10k-labels-idx1-ubyte.gz")
    file.write_bytes(gzip.compress(b"other"))
    status, out, err = fedlens("data", "check", "fashion-mnist")
    assert status == 2
    assert f"damaged   {file}" in out
    assert err.count("\n") == 1
    assert "fetch it again with `fedlens data get fashion-mnist`" in err
    assert fedlens("data", "get", "fashion-mnist", "--from", mirror, "--data", "e").status == 0
    assert fedlens("data", "get", "fashion-mnist", "-q") == (
        0,
        "fashion-mnist: d/fashion-mnist\n",
        "",
    )
    assert fedlens("data", "check", "fashion-mnist").status == 0


def test_a_download_with_a_wrong_checksum_is_refused_and_removed(fedlens, mirror):
    file = mirror / "t10k-labels-idx1-ubyte.gz"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    status, out, err = fedlens("data", "get", "fashion-mnist", "--data", "d", "-q")
    assert (status, out, err.count("\n")) == (1, "", 1)  # which is not the user's mistake
    assert file.name in err
    assert not Path("d/fashion-mnist", file.name).exists()


def test_the_command_itself_runs_and_shows_a_traceback_only_when_asked():
    command = [sys.executable, "-c", "from fedlens.cli import main; main()"]
    words = ["run", "a.toml", "local.lr=-1"]
    asked = subprocess.run(
        [*command, *words, "--debug"], capture_output=True, text=True, check=False
    )
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "Traceback (most recent call last)" in asked.stderr
    assert asked.stderr.splitlines()[-1] == "fedlens: local.lr is -1.0: choose 0 or more"
    assert set(everything()) == {"a.toml"}


def test_help_is_no_mistake(fedlens):
    for words in (["--help"], ["run", "--help"], ["data", "--help"]):
        status, out, err = fedlens(*words)
        assert (status, err) == (0, "")
        assert "Usage: fedlens" in out
    for words in ([], ["data"]):
        status, out, err = fedlens(*words)
        assert (status, err) == (2, "")
        assert "Usage: fedlens" in out
