import gzip
import hashlib
import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedlens import __version__
from fedlens.algorithms import ALGORITHMS
from fedlens.cli import machine, run
from fedlens.config.names import DEVICES
from fedlens.core.federation import Dataset, Examples
from fedlens.data import DATASETS, published
from fedlens.data.partitions import PARTITIONS
from fedlens.data.published import PUBLISHED, Download
from fedlens.models import MODELS
from tests.command_line import everything
from tests.data.published_files import write_idx_set

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.usefixtures("here"),
    # typer 0.20 asks click for names that click is about to drop.
    pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning"),
]


def test_a_run_shows_progress_and_where_the_result_is(fedlens):
    status, out, err = fedlens("run", "a.toml", "local.lr=0.05")
    assert status == 0
    assert "run:    runs/a\n" in out
    assert "report: runs/a/report.html\n" in out
    assert "finished" in out
    assert "a: round 1/2  train loss " in err
    assert "a: round 2/2  train loss " in err
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


def test_the_number_of_rounds_is_an_option_of_a_run(fedlens):
    assert fedlens("run", "a.toml", "--rounds", 1, "--out", "run", "-q").status == 0
    assert len(Path("run/rounds.jsonl").read_text().splitlines()) == 1
    assert "rounds = 1\n" in Path("run/experiment.toml").read_text()


def test_a_run_ends_with_what_its_accuracy_hides(fedlens):
    fedlens("run", "a.toml", "--out", "run", "-q")
    about = json.loads(Path("run/evaluation.json").read_text())
    about["confusion"] = [[100 * (i == k) for k in range(11)] for i in range(10)]
    about["confusion"][3] = [100, *[0] * 10]
    Path("run/evaluation.json").write_text(json.dumps(about))
    weak = "It is weak at Dress (recall 0.0%"
    ended = fedlens("resume", "run", "-q")  # nothing is run again
    assert weak in " ".join(ended.out.split())
    ended = fedlens("resume", "run", "--json", "-q")
    assert weak in " ".join(ended.err.split())


def test_json_is_all_there_is_on_standard_output(fedlens):
    status, out, err = fedlens("run", "a.toml", "--json", "--out", "run")
    assert status == 0
    assert "round 2/2" in err
    assert json.loads(out) == json.loads(Path("run/summary.json").read_text())
    assert json.loads(fedlens("resume", "run", "--json", "-q").out)["status"] == "finished"
    assert json.loads(fedlens("doctor", "--json").out)["package"]["torch"]
    own = {
        "folder",
        "csv",
        "npz",
        "hugging-face",
        "at-sites",
    }  # these are the user's files: there is no place to look for them
    listed = {row["name"] for row in json.loads(fedlens("data", "list", "--json").out)}
    assert listed == set(DATASETS) - own


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


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["gamma=1e30"], "algorithm.liadmm.gamma"),
        (["gamma=1e-3", 'local="training"'], "local.lr"),
        ([], "local.lr"),
    ],
)
def test_the_advice_names_the_number_that_steps_are_long_by(fedlens, options, key):
    chosen = ["algorithm=liadmm", *(f"algorithm.liadmm.{one}" for one in options)]
    lr = "local.lr=1e30" if key == "local.lr" else "local.lr=0.1"
    err = fedlens("run", "a.toml", "model=lenet5", lr, *chosen, "--out", "run").err
    assert "fedlens: the run diverged in round " in err
    assert err.endswith(f": try a smaller {key}\n")


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
        ("devices", DEVICES),
        ("datasets", DATASETS),
    ],
)
def test_a_list_is_one_name_a_line_with_what_it_is(fedlens, kind, table):
    status, out, err = fedlens("list", kind)
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == list(table)
    assert all(line.endswith(".") for line in out.splitlines())


def test_without_a_kind_the_kinds_are_listed_and_what_they_are(fedlens):
    status, out, err = fedlens("list")
    assert (status, err) == (0, "")
    assert all(line.endswith(".") for line in out.splitlines())
    assert [line.split()[0] for line in out.splitlines()] == [
        *("algorithms", "models", "partitions", "devices", "attacks", "engines", "losses"),
        *("metrics", "optimizers", "schedules", "mechanisms", "clips", "anneals", "datasets"),
        "recipes",
    ]


def test_names_are_listed_with_options_and_what_they_are(fedlens):
    status, out, _ = fedlens("list", "optimizers", "--long")
    assert status == 0
    first, about, *_ = out.splitlines()
    assert first == "sgd (nesterov = false)"
    assert about.startswith("    ")


def test_the_version_is_told_by_the_command_and_by_the_module(fedlens):
    assert fedlens("--version") == (0, f"fedlens {__version__}\n", "")
    command = [sys.executable, "-m", "fedlens", "--version"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout, told.stderr) == (0, f"fedlens {__version__}\n", "")


def test_the_doctor_names_what_is_here_and_what_is_missing(fedlens):
    status, out, err = fedlens("doctor")
    assert (status, err) == (0, "")
    found = {line[:28].strip(): line[28:].strip() for line in out.splitlines()}
    assert {"fedlens", "python", "cores", "memory", "gpu", "engine", "package torch"} <= set(found)
    assert found["data mnist"] == "missing"
    assert found["data fashion-mnist-mini"] == "inside the package"


def test_the_doctor_names_every_package_with_what_installs_it(fedlens, monkeypatch):
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(wanted: list[str]) -> tuple[str, ...]:
        return tuple(re.split("[<>=;]", one)[0] for one in wanted)

    extras = {name: names(wanted) for name, wanted in found["optional-dependencies"].items()}
    brought = {name: wanted for name, wanted in extras.items() if name not in ("dev", "docs")}
    assert (names(found["dependencies"]), brought) == (machine.NEEDED, machine.OPTIONAL)
    here = {"datasets": "5.0.1", "triton": None}
    monkeypatch.setattr(machine, "_version", here.get)
    lines = fedlens("doctor").out.splitlines()
    assert f"{'optional datasets':<28} 5.0.1" in lines
    assert f"{'optional ray':<28} missing: pip install 'fedlens[ray]'" in lines
    assert f"{'optional mlflow':<28} missing: pip install 'fedlens[track]'" in lines
    assert f"{'optional triton':<28} missing: pip install triton" in lines
    assert json.loads(fedlens("doctor", "--json").out)["optional"]["ray"] is None


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
    entry = PUBLISHED["fashion-mnist"]
    forms = published.idx_forms(entry.forms[0].folders, files)
    small = replace(entry, downloads=files, forms=forms)
    monkeypatch.setitem(PUBLISHED, "fashion-mnist", small)
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
    monkeypatch.setattr("fedlens.runs.progress.PLAIN_SECONDS", 0.0)  # it is over sooner
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


def test_help_is_no_mistake(fedlens):
    for words in (["--help"], ["run", "--help"], ["data", "--help"]):
        status, out, err = fedlens(*words)
        assert (status, err) == (0, "")
        assert "Usage: fedlens" in out
    for words in ([], ["data"]):
        status, out, err = fedlens(*words)
        assert (status, err) == (2, "")
        assert "Usage: fedlens" in out


def test_images_that_are_set_apart_are_not_counted_as_training_images() -> None:
    images = torch.zeros(10, 1, 2, 2, dtype=torch.uint8)
    train, test = (
        Examples(images, torch.arange(10) % 2),
        Examples(images[:3], torch.zeros(3).long()),
    )
    whole = Dataset("toy", train, test, ("a", "b"))

    def told(
        dataset: Dataset,
        clients: int,
        names: list[str] | None = None,
        validation: int = 0,
        held_out: int = 0,
    ) -> str:
        setup: Any = SimpleNamespace(
            dataset=dataset,
            parts={"validation": range(validation)} if validation else {},
            client_tests=SimpleNamespace(
                part="train", holdings=SimpleNamespace(index=range(held_out))
            ),
            federation=SimpleNamespace(
                num_clients=clients, described=lambda: SimpleNamespace(names=names)
            ),
        )
        return run._found(setup)

    start, end = "toy: 2 classes (a, b), ", "3 test images of 1×2×2, "
    assert told(whole, 2) == f"{start}10 training and {end}2 clients"
    assert told(whole, 1, None, 4) == f"{start}6 training, 4 validation and {end}1 client"
    held_out = told(whole, 2, ["x", "y"], held_out=5)
    assert (
        held_out == f"{start}10 training (5 of them held out by clients) and {end}2 clients (x, y)"
    )
    own = replace(whole, validation=test)
    assert told(own, 2, None, 3) == f"{start}10 training, 3 validation and {end}2 clients"
