"""Sites that fail, refuse or send what cannot be taken: named in the record, never in the model."""

import json

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.algorithm.channel import OWN_MODEL
from fedlens.fleet import engine
from fedlens.fleet.payload import Reply
from fedlens.fleet.terms import for_fleet
from fedlens.report import read_all, report
from fedlens.report.blocks import Tiles
from fedlens.report.runs import run_blocks
from fedlens.runs.folder import RunFolder
from fedlens.storage.run_files import read_records, read_summary
from tests.fleet.sites import (
    NAMES,
    Nearby,
    make_sites,
    model_bytes,
    run_nearby,
    write_experiment,
)


def spoilt(arrived: Reply, fn) -> Reply:
    (name,) = (name for name in arrived.tensors if name.startswith("0/update/fc.weight/"))
    return arrived._replace(tensors=arrived.tensors | {name: fn(arrived.tensors[name])})


BAD = {
    "nan": lambda a: spoilt(a, lambda t: t * torch.nan),
    "infinite": lambda a: spoilt(a, lambda t: t / 0.0),
    "huge": lambda a: spoilt(a, lambda t: t + 1e6),
    "malformed": lambda a: spoilt(a, lambda t: t[..., :-1]),
    "another dtype": lambda a: spoilt(a, lambda t: t.long()),
    "more than asked": lambda a: a._replace(
        tensors=a.tensors | {"1/update/fc.bias": torch.ones(3)}
    ),
    "less than asked": lambda a: a._replace(tensors=dict(list(a.tensors.items())[1:])),
    "a loss that is none": lambda a: a._replace(
        tensors=a.tensors | {"0/scalars/loss": torch.tensor([torch.nan])}
    ),
    "stale": lambda a: a._replace(facts={**a.facts, "keys": [7]}),
    "foreign": lambda a: a._replace(facts={**a.facts, "experiment": "0" * 64}),
    "raised": lambda _: Reply({}, {}, "raised", "RuntimeError"),
    "dropped": lambda _: Reply({}, {}, "dropped"),
    "refused": lambda _: Reply({"refused": "it will not"}, {}),
}
NAMED = {
    "another dtype": "malformed",
    "more than asked": "malformed",
    "less than asked": "malformed",
    "a loss that is none": "nan",
}


CLAIMS = [{"size": 10**8}, {"size": 10**12}, {"size": 10**30}, {"held_out": 10**12}, {"size": 1e9}]


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_a_site_that_claims_absurdly_many_examples_is_left_out(claim, tmp_path):
    path = write_experiment(tmp_path)
    sites, told = make_sites(path, tmp_path / "sites"), list[str]()

    def change(name, what, arrived):
        lies = (name, what) == ("bob", "sizes")
        return arrived._replace(facts={**arrived.facts, **claim}) if lies else arrived

    run_nearby(path, tmp_path / "run", sites, change, told, wait=0.5, at_least=3)
    assert any(line.startswith("bob: refused: it gave no sizes") for line in told)
    assert "without bob" in told
    assert json.loads((tmp_path / "run" / "partition.json").read_text())["client_names"] == [
        name for name in NAMES if name != "bob"
    ]


@pytest.mark.parametrize("number", [1e5, 1e30])
def test_an_absurdly_long_update_is_refused_without_a_limit_in_the_experiment(number, tmp_path):
    path = write_experiment(tmp_path, '{ name = "scaffold" }', per_round=4)
    sites, told = make_sites(path, tmp_path / "sites"), list[str]()

    def change(name, what, arrived):
        long = (name, what) == ("bob", "train")
        return spoilt(arrived, lambda t: t + number) if long else arrived

    run_nearby(path, tmp_path / "run", sites, change, told)
    assert [record["failed"] for record in read_records(tmp_path / "run")] == [{"huge": [1]}] * 2
    assert any("bob: huge: its norm is " in line and "above" in line for line in told)


@pytest.mark.parametrize("what", ["sizes", "train"])
def test_what_a_site_says_reaches_the_operator_as_one_printable_line(what, tmp_path):
    path = write_experiment(tmp_path, rounds=4)
    sites, told = make_sites(path, tmp_path / "sites"), list[str]()
    text = "no\x1b[2J\ncat: 100 examples\r" + 10_000 * "x"

    def change(name, asked, arrived):
        refuses = (name, asked) == ("bob", what)
        return Reply({"refused": text}, {}) if refuses else arrived

    run_nearby(path, tmp_path / "run", sites, change, told, wait=0.5, at_least=3)
    assert any(line.startswith("bob: refused: no\\x1b[2J\\ncat") for line in told)
    assert all(line.isprintable() and len(line) < 400 for line in told)


@pytest.mark.parametrize("refusals", [1, 6])
def test_a_site_that_was_away_leaves_no_trace_in_the_bytes(refusals, tmp_path):
    """However often the others were asked in between, and in which order they were drawn."""
    path = write_experiment(
        tmp_path, '{ name = "scaffold" }', "reporting = { quorum = 1.0 }\n", per_round=4
    )
    sites, left = make_sites(path, tmp_path / "sites"), iter(range(refusals))

    def change(name, what, arrived):
        away = (name, what) == ("cat", "train") and next(left, None) is not None
        return Reply({"refused": "its data are away"}, {}) if away else arrived

    run_nearby(path, tmp_path / "run", sites, change)
    fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
    first, *_ = read_records(tmp_path / "run")
    assert first["attempts"] == refusals + 1
    assert (2 in first["clients"], first["failed"]) == (True, {})
    assert first["failed_before"] == {"refused": [2] * refusals}
    assert read_summary(tmp_path / "run")["outcomes"]["refused"] == refusals
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "here")


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_update_is_named_and_never_in_the_model(fault, tmp_path):
    path = write_experiment(
        tmp_path, '{ name = "scaffold" }', "reporting = { largest = 1000.0 }\n", per_round=4
    )
    sites, told = make_sites(path, tmp_path / "sites"), list[str]()

    def change(name, what, arrived):
        return BAD[fault](arrived) if (name, what) == ("bob", "train") else arrived

    run_nearby(path, tmp_path / "run", sites, change, told)
    outcome = NAMED.get(fault, fault)
    for record in read_records(tmp_path / "run"):
        assert record["failed"] == {outcome: [1]}
        assert record["clients"].count(1) == 0
    assert any(line.startswith(f"bob: {outcome}") for line in told)
    assert read_summary(tmp_path / "run")["outcomes"] == {"reported": 6, outcome: 2}


def test_shares_are_those_of_the_sites_that_answered(tmp_path):
    path = write_experiment(tmp_path, rounds=1, per_round=4)
    sites = make_sites(path, tmp_path / "sites")
    for count, site in enumerate(sites, 1):
        (approved,) = map(site.approvals.of, site.approvals.approved())
        with np.load(site.data) as held:
            fewer = {name: array[: 6 * count] for name, array in held.items()}
        np.savez(site.data, **fewer)
        site.approvals.approve(site.offer(approved.offer.terms, count - 1))
    sizes, models = {}, {}

    def change(name, what, arrived):
        if what == "sizes":
            sizes[name] = arrived.facts["size"]
        elif name == "bob":
            return Reply({}, {}, "dropped")
        elif what == "train":
            models[name] = arrived.tensors[f"0/update/fc.weight/{OWN_MODEL}"].double()
        return arrived

    run_nearby(path, tmp_path / "run", sites, change)
    assert sizes == {"ann": 6, "bob": 12, "cat": 18, "dan": 24}
    total = sum(sizes[name] for name in models)
    mean = sum(sizes[name] / total * model for name, model in models.items())
    found = RunFolder(tmp_path / "run").load_model()["fc.weight"]
    torch.testing.assert_close(found.flatten(), mean.float(), rtol=0, atol=1e-7)


def test_a_site_goes_on_from_its_last_update_that_counted(tmp_path):
    """Updates that are lost on the way leave no trace at the site, though it had trained."""
    lost = iter([True, False, True, False])
    path = write_experiment(
        tmp_path,
        '{ name = "scaffold" }',
        "reporting = { quorum = 1.0 }\n",
        rounds=3,
        per_round=4,
    )
    sites = make_sites(path, tmp_path / "sites")

    def change(name, what, arrived):
        if (name, what) == ("cat", "train") and next(lost, False):
            return Reply({}, {}, "dropped")
        return arrived

    run_nearby(path, tmp_path / "run", sites, change)
    fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "here")
    assert [r["attempts"] for r in read_records(tmp_path / "run")] == [2, 2, 1]
    kept = list((tmp_path / "sites" / "cat" / "memory").rglob("*.safetensors"))
    assert len(kept) == 2  # what counted, and what the last order left


def test_an_update_that_was_not_taken_is_not_gone_on_from(tmp_path):
    """One site's update of the first round comes too late; with the next ones it starts anew."""
    path = write_experiment(tmp_path, '{ name = "scaffold" }', rounds=2, per_round=4)
    sites, orders = make_sites(path, tmp_path / "sites"), list[str]()

    def change(name, what, arrived):
        if (name, what) == ("cat", "train") and not orders:
            orders.append(name)
            return Reply({}, {}, "late")
        return arrived

    made: list[Nearby] = []
    run_nearby(path, tmp_path / "run", sites, change, nearby=made)
    asked = [o for one in made for name, what, o in one.orders if (name, what) == ("cat", "train")]
    assert [order["counted"] for order in asked] == [None, None]
    others = [o for one in made for name, what, o in one.orders if (name, what) == ("ann", "train")]
    assert others[1]["counted"] == others[0]["keys"][0]


class Killed(BaseException):
    """The server's end."""


@pytest.mark.parametrize("at", range(1, 12, 2))
def test_a_server_that_was_killed_goes_on_to_the_same_bytes(at, tmp_path):
    """After any reply: between two of a round, or after the last and before its checkpoint."""
    path = write_experiment(tmp_path, '{ name = "scaffold" }', rounds=3, per_round=4)
    sites = make_sites(path, tmp_path / "sites")
    count = 0

    def change(name, what, arrived):
        nonlocal count
        count += what == "train"
        if count == at:
            count += 100
            raise Killed
        return arrived

    with pytest.raises(Killed):
        run_nearby(path, tmp_path / "run", sites, change)
    run_nearby(path, tmp_path / "run", sites, resume=True)
    fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "here")


def test_a_run_does_not_go_on_as_if_it_had_been_begun_otherwise(tmp_path):
    path = write_experiment(tmp_path)
    sites = make_sites(path, tmp_path / "sites")
    run_nearby(path, tmp_path / "run", sites)
    model = model_bytes(tmp_path / "run")
    write_experiment(tmp_path, rounds=3)
    with pytest.raises(ValueError, match="started with"):
        run_nearby(path, tmp_path / "run", sites, resume=True)
    assert model_bytes(tmp_path / "run") == model


def test_a_site_that_gives_no_answer_before_a_run_is_told_of(tmp_path):
    path, told, seen = write_experiment(tmp_path), list[str](), list[str]()

    def change(name, what, arrived):
        seen.append(name)
        gone = what == "sizes" and seen.count(name) == 1 and name == "bob"
        return Reply({}, {}, "dropped", "it is not there any more") if gone else arrived

    sites = make_sites(path, tmp_path / "sites")
    with pytest.raises(ValueError, match="bob"):
        run_nearby(path, tmp_path / "run", sites, change, told, wait=0.1)
    assert "bob: dropped: it is not there any more" in told


def test_a_site_that_is_away_is_waited_for_and_then_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "AWAY", 0.3)
    path = write_experiment(tmp_path, rounds=2, per_round=4)
    sites = make_sites(path, tmp_path / "sites")
    made: list[Nearby] = []

    def change(name, what, arrived):
        for one in made:
            one.away = {"dan"} if what == "train" or len(made) > 1 else set()
        return arrived

    run_nearby(path, tmp_path / "run", sites, change, nearby=made)
    failed = [record["failed"] for record in read_records(tmp_path / "run")]
    assert failed[1] == {"unavailable": [3]}


def test_the_first_sites_are_taken_where_more_are_asked(tmp_path):
    path = write_experiment(
        tmp_path, more="reporting = { over_select = 1.4 }\n", rounds=1, per_round=3
    )
    sites = make_sites(path, tmp_path / "sites")
    run_nearby(path, tmp_path / "run", sites)
    (record,) = read_records(tmp_path / "run")
    assert len(record["clients"]) == 3 or not record["failed"]


def test_a_run_stops_below_quorum_where_the_experiment_says_so(tmp_path):
    more = 'reporting = { quorum = 1.0, below_quorum = "stop" }\n'
    path = write_experiment(tmp_path, more=more, per_round=4)
    sites = make_sites(path, tmp_path / "sites")

    def change(name, what, arrived):
        return Reply({}, {}, "dropped") if (name, what) == ("bob", "train") else arrived

    result = run_nearby(path, tmp_path / "run", sites, change)
    assert result.status == "stopped"
    summary = read_summary(tmp_path / "run")
    failed = {"surplus": [0, 2, 3], "dropped": [1]}
    stopped = summary["stopped_round"]
    assert {name: sorted(clients) for name, clients in stopped.pop("failed").items()} == failed
    assert stopped == {"round": 1, "attempts": 1}
    assert summary["outcomes"] == {"reported": 0, "surplus": 3, "dropped": 1}
    (strip,) = (b for b in run_blocks(read_all([tmp_path / "run"])) if isinstance(b, Tiles))
    assert strip.row_names == [*NAMES]
    assert strip.values == [["surplus"], ["dropped"], ["surplus"], ["surplus"]]
    assert report([tmp_path / "run"]).exists()


@pytest.mark.parametrize("gone", [{"bob"}, {"cat"}])
def test_a_run_that_stops_again_says_who_failed_this_time(gone, tmp_path):
    more = 'reporting = { quorum = 1.0, below_quorum = "stop" }\n'
    path = write_experiment(tmp_path, more=more, per_round=4)
    sites, dropped = make_sites(path, tmp_path / "sites"), {"bob"}

    def change(name, what, arrived):
        return Reply({}, {}, "dropped") if what == "train" and name in dropped else arrived

    run_nearby(path, tmp_path / "run", sites, change)
    dropped = gone
    run_nearby(path, tmp_path / "run", sites, change, resume=True)
    found = read_summary(tmp_path / "run")["stopped_round"]["failed"]["dropped"]
    assert [NAMES[client] for client in found] == [*gone]


def test_the_page_shows_by_name_what_became_of_sites(tmp_path):
    path = write_experiment(tmp_path, rounds=1, per_round=4)
    sites = make_sites(path, tmp_path / "sites")

    def change(name, what, arrived):
        refused = Reply({"refused": "it will not"}, {})
        return refused if (name, what) == ("cat", "train") else arrived

    run_nearby(path, tmp_path / "run", sites, change)
    (strip,) = (b for b in run_blocks(read_all([tmp_path / "run"])) if isinstance(b, Tiles))
    assert (strip.row_names, strip.values[2]) == ([*NAMES], ["refused"])
    assert "refused: the site refused to train" in strip.caption


def test_other_versions_at_a_site_are_told_of_in_one_line(tmp_path):
    path = write_experiment(tmp_path)
    sites, told = make_sites(path, tmp_path / "sites"), list[str]()

    def change(name, what, arrived):
        if (name, what) != ("bob", "sizes"):
            return arrived
        other = arrived.facts["versions"] | {"torch": "1.0", "revision": "beef\n"}
        return arrived._replace(facts={**arrived.facts, "versions": other})

    run_nearby(path, tmp_path / "run", sites, change, told)
    (line,) = (line for line in told if line.startswith("bob: "))
    assert "; it has revision beef\\n, not " in line
    assert f"torch 1.0, not {torch.__version__}: its bytes may differ" in line
    assert all("it has" not in line for line in told if line.startswith("ann: "))


@pytest.mark.parametrize("who", ["server", "site"])
def test_a_model_that_is_too_large_is_refused_before_the_run(who, tmp_path, monkeypatch):
    path = write_experiment(tmp_path)
    sites, told = make_sites(path, tmp_path / "sites"), list[str]()
    place = {"server": "payload", "site": "site"}[who]
    monkeypatch.setattr(f"fedlens.fleet.{place}.num_bytes", lambda _: 10**15)
    if who == "server":
        with pytest.raises(ValueError, match=r"a round needs about .* memory .*clients.per_round"):
            run_nearby(path, tmp_path / "run", sites, None, told)
        assert not told
    else:
        with pytest.raises(ValueError, match="these sites are missing"):
            run_nearby(path, tmp_path / "run", sites, None, told, wait=0.3)
        assert any(line.startswith("ann: refused: the model needs about") for line in told)
    assert not (tmp_path / "run").exists()


def test_sites_test_the_model_on_what_they_hold_out(tmp_path):
    path = write_experiment(tmp_path, holdout=0.3)
    sites = make_sites(path, tmp_path / "sites")
    run_nearby(path, tmp_path / "run", sites)
    fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "here")
    fleet, here = (
        json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("run", "here")
    )
    assert fleet["client_accuracy"] == here["client_accuracy"]
    assert json.loads((tmp_path / "run" / "partition.json").read_text())["client_names"] == [*NAMES]
