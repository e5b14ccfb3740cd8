"""What a server says to whoever started it: what it needs, how far it is, how to go on."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens.cli.main import app_of
from fedlens.config.experiment import Experiment
from fedlens.fleet import flower, keys, serve
from fedlens.fleet.flower import SuperLink, Tail
from fedlens.fleet.keys import make_server_keys, make_site_key
from fedlens.fleet.serve import follow, run_on
from fedlens.fleet.server import Job
from fedlens.fleet.terms import for_fleet
from fedlens.storage.files import write_atomically
from fedlens.storage.locks import one_writer
from fedlens.storage.run_files import CHECKPOINT
from tests.fleet.sites import write_experiment
from tests.sites import write_sites


def interrupted(*_):
    raise KeyboardInterrupt


def made_keys(folder, *sites):
    """A folder with the keys of a server, and of sites that it knows."""
    make_server_keys(folder, ["127.0.0.1"])
    for site in sites or ("ann",):
        make_site_key(folder / site, site)
        (folder / site / f"{site}.pub").rename(folder / f"{site}.pub")
    return folder


def test_a_server_whose_certificate_has_expired_does_not_start(tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    make_site_key(tmp_path / "ann", "ann")
    monkeypatch.setattr(keys, "YEARS", -4 / (365 * 24 * 60))
    make_server_keys(tmp_path, ["127.0.0.1"])
    words = ["fleet", "serve", str(write_experiment(tmp_path)), "--keys", str(tmp_path)]
    error = CliRunner().invoke(app_of(), words).exception
    assert isinstance(error, ValueError)
    assert "ca.pem has expired" in str(error)
    assert "--renew`" in str(error)


def test_two_servers_do_not_share_a_place(tmp_path):
    pytest.importorskip("flwr")
    path, folder = write_experiment(tmp_path, per_round=1), made_keys(tmp_path)
    words = ["fleet", "serve", str(path), "--keys", str(folder)]
    with one_writer(tmp_path / "server"):
        error = CliRunner().invoke(app_of(), words).exception
    assert isinstance(error, ValueError)
    assert "is being written by" in str(error)
    assert not [*(tmp_path / "server").glob("*.toml")], "the experiment of the other would be there"


def test_a_folder_that_is_there_is_refused_with_what_would_help(tmp_path, fedlens):
    pytest.importorskip("flwr")
    path, folder_of_keys = write_experiment(tmp_path), made_keys(tmp_path / "keys")
    for name in ("experiment.toml", "manifest.json"):
        write_atomically(tmp_path / "run" / name, b"")
    for folder, words, remedy in (
        ("run", ["try"], "exists: choose another --out"),
        ("run", ["serve"], "exists: choose another --out, or add --resume or --overwrite"),
        ("", ["serve"], "exists and is no run: choose another"),
    ):
        place = tmp_path / folder
        keys = ["--keys", folder_of_keys] if words == ["serve"] else []
        told = fedlens("fleet", *words, path, *keys, "--out", place)
        assert told == (2, "", f"fedlens: {place} {remedy}\n")


def test_a_trial_with_more_sites_than_the_data_have_says_how_many_there_are(tmp_path, fedlens):
    pytest.importorskip("flwr")
    images = write_sites(tmp_path / "hospitals")
    dataset = f"{{ name = 'folder', path = '{images}', layout = 'site/class', size = 8 }}"
    path = tmp_path / "three.toml"
    path.write_text(f"dataset = {dataset}\nmodel = 'linear'\nrounds = 1\n")
    told = fedlens("fleet", "try", path, "--sites", "4", "--quiet")
    assert (told.status, told.out, told.err.count("\n")) == (2, "", 1)
    assert "made 3 clients: choose --sites 3, or choose a clients.partition" in told.err
    told = fedlens("fleet", "try", path, "clients.count=3", "--sites", "4")
    assert told.err.startswith("4 sites in the place of the experiment's 3 clients\n")
    assert told.status == 2


def test_a_server_without_keys_leaves_nothing(tmp_path):
    pytest.importorskip("flwr")
    words = ["fleet", "serve", str(write_experiment(tmp_path)), "--keys", str(tmp_path / "keys")]
    error = CliRunner().invoke(app_of(), words).exception
    assert isinstance(error, ValueError)
    assert "make keys with `fedlens fleet keys`" in str(error)
    assert not (tmp_path / "keys").exists()


def test_nobody_else_can_read_what_sites_send_to_a_server(tmp_path, monkeypatch):
    """Its place may be an older folder, which others can read."""
    pytest.importorskip("flwr")
    monkeypatch.setattr(flower, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SuperLink(tmp_path, tmp_path).__enter__()
    assert (tmp_path / "superlink.db").stat().st_mode & 0o077 == 0


def test_what_the_process_of_a_run_reports_is_passed_on_to_its_outcome(tmp_path):
    reports, lines, records = tmp_path / "job.reports", list[str](), list[Any]()
    told: list[tuple[str, Any]] = [("process", os.getpid()), ("line", "ann: 3 examples")]
    told += [("record", {"round": 1}), ("outcome", {"status": "finished"})]
    tail = Tail(reports)
    reports.write_text("".join(f"{json.dumps(one)}\n" for one in told))
    link: Any = SimpleNamespace(process=SimpleNamespace(poll=lambda: None))
    assert follow(link, tail, lines.append, records.append) == {"status": "finished"}
    assert (lines, records) == (["ann: 3 examples"], [{"round": 1}])


@pytest.mark.parametrize("begun", [True, False])
def test_a_server_that_was_interrupted_says_how_to_go_on(begun, fedlens, tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.setattr(serve, "serve", interrupted)
    if begun:
        (tmp_path / "run" / CHECKPOINT).mkdir(parents=True)
    words = ["--resume", "--out", tmp_path / "run", "--keys", made_keys(tmp_path)]
    done = fedlens("fleet", "serve", write_experiment(tmp_path), *words)
    assert done.status == 130
    assert ("go on with the same command and --resume" in done.err) is begun


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_was_not_replaced_yet_is_not_gone_on_with(begun, fedlens, tmp_path, monkeypatch):
    pytest.importorskip("flwr")

    def replaced(*_):
        if begun:
            (tmp_path / "new" / CHECKPOINT).mkdir(parents=True)
            (tmp_path / "run").rename(tmp_path / "old")
            (tmp_path / "new").rename(tmp_path / "run")
        interrupted()

    monkeypatch.setattr(serve, "serve", replaced)
    (tmp_path / "run" / CHECKPOINT).mkdir(parents=True)
    words = ["--overwrite", "--out", tmp_path / "run", "--keys", made_keys(tmp_path)]
    done = fedlens("fleet", "serve", write_experiment(tmp_path), *words)
    assert done.status == 130
    assert ("go on with the same command and --resume" in done.err) is begun


@pytest.mark.parametrize(("resumes", "remedy"), [(False, "start it again"), (True, "--resume")])
def test_a_server_whose_flower_ended_says_how_to_go_on(resumes, remedy, tmp_path):
    (tmp_path / "run" / CHECKPOINT).mkdir(parents=True)
    job = Job("one.toml", str(tmp_path / "run"), {}, resume=resumes)
    with pytest.raises(OSError, match=f"SuperLink has ended: see flower.log; .*{remedy}$"):
        run_on(ended_link(), job, tmp_path, print)


def ended_link() -> Any:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    return SimpleNamespace(process=ended, log="flower.log", run=lambda *_: 1)


def served(fedlens, folder, *words):
    """What is said of an experiment that two sites are to take part in."""
    folder = made_keys(folder, "ann", "bob")
    (folder / "one.toml").write_text(TWO_SITES)
    return fedlens("fleet", "serve", folder / "one.toml", *words, "--keys", folder, "-q").err


TWO_SITES = """
dataset = "fashion-mnist-mini"
model = "linear"
rounds = 1
"""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine=ray", "engine is ray, which has no effect: each site trains by itself"),
        (
            "device=cuda",
            "device is cuda, which has no effect: the server computes on the CPU, and a site "
            "where its own --device says",
        ),
        (
            "clients.count=3",
            "clients.count is 3, which has no effect: 2 sites have their keys here",
        ),
        (
            "clients.partition=dirichlet clients.partition.alpha=0.1",
            "clients.partition is dirichlet, which has no effect: sites hold the images that "
            "they have",
        ),
        (
            "algorithm=fedvc local.epochs=2 clients.per_round=2",
            "local.epochs is 2, which has no effect: fedvc has its own local work",
        ),
        ("clients.seed=3", "clients.seed is 3, which has no effect: nothing is dealt or held out"),
    ],
)
def test_keys_that_have_no_effect_in_a_fleet_are_told_of(
    override, said, fedlens, tmp_path, monkeypatch
):
    pytest.importorskip("flwr")
    monkeypatch.setattr(serve, "serve", interrupted)
    assert served(fedlens, tmp_path, *override.split(" ")) == f"fedlens: {said}\nfedlens: stopped\n"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["clients.count=2", "device=cpu", "engine=sequential", "clients.partition=iid"],
        ["clients.seed=3", "clients.holdout=0.2"],
        ["--resume", "clients.seed=3"],
    ],
    ids=str,
)
def test_nothing_is_said_of_keys_that_have_an_effect(words, fedlens, tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.setattr(serve, "serve", interrupted)
    assert served(fedlens, tmp_path, *words) == "fedlens: stopped\n"


def test_a_fleet_of_an_experiment_for_ray_comes_to_the_bytes_of_its_simulation():
    plain = Experiment(dataset="mnist", model="linear", rounds=1)
    assert for_fleet(replace(plain, engine="ray")) == for_fleet(replace(plain, engine="processes"))


def test_a_process_of_another_user_that_has_the_number_of_the_app_is_left_alone(
    tmp_path, monkeypatch
):
    def refuse(pid: int, sign: int) -> None:
        raise PermissionError

    tail = Tail(tmp_path / "job.reports")
    tail.path.write_text(f'["process", {os.getpid()}]\n')
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", refuse)
        with pytest.raises(OSError, match="SuperLink has ended"):
            follow(ended_link(), tail, print)
