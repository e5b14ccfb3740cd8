"""Secure sums of a fleet: the bytes of the simulation, whatever is lost on the way."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

import fedlens as fl
from fedlens.fleet.account import LEDGER
from fedlens.fleet.log import LOG, Log, verify
from fedlens.fleet.payload import Reply
from fedlens.fleet.policy import FILE
from fedlens.fleet.terms import for_fleet
from fedlens.privacy.accountant import epsilon
from fedlens.privacy.ledger import Ledger
from fedlens.report import read_all
from fedlens.report.runs import headline
from fedlens.runs.folder import RunFolder
from fedlens.storage.run_files import read_records, read_summary
from tests.fleet.sites import (
    Nearby,
    make_sites,
    model_bytes,
    run_nearby,
    terms_of,
    write_experiment,
)
from tests.fleet.test_account import PRIVATE

SUMS = "aggregation = {{ secure = true, bits = {bits} }}\n"


def simulated(path, out):
    experiment = for_fleet(fl.Experiment.read(path))
    assert experiment.aggregation is not None
    sums = replace(experiment.aggregation, secure="simulated")
    return fl.run(replace(experiment, aggregation=sums), out)


@pytest.mark.parametrize(
    ("paper", "bits"),
    [("fedavg", 32), ("fedavg", 16), ("fedavg", 27), ("scaffold", 40), ("fedprox", 52)],
)
def test_a_fleet_ends_with_the_bytes_of_the_simulation(paper, bits, tmp_path):
    path = write_experiment(
        tmp_path, f'{{ name = "{paper}" }}', SUMS.format(bits=bits), per_round=4
    )
    sites = make_sites(path, tmp_path / "sites")
    nearby: list[Nearby] = []
    told: list[str] = []
    run_nearby(path, tmp_path / "fleet", sites, nearby=nearby, told=told)
    simulated(path, tmp_path / "here")
    assert model_bytes(tmp_path / "fleet") == model_bytes(tmp_path / "here")
    fleet, here = (read_records(tmp_path / name) for name in ("fleet", "here"))
    for one, other in zip(fleet, here, strict=True):
        for name in ("train_loss", "clients", "test_accuracy", "examples", "batches", "bytes_up"):
            assert one[name] == other[name], name


STAGES = ("keys", "shares", "train", "agree", "open")


def run_with(tmp_path, fails, out="fleet", told=None, count=6, more="", secure=True, rounds=1):
    """Run with sites that are lost where `fails(name, what, round)` says so."""
    (tmp_path / out).mkdir()
    sums = SUMS.format(bits=48) if secure else ""
    path = write_experiment(
        tmp_path / out,
        '{ name = "scaffold" }',
        more + sums,
        rounds=rounds,
        per_round=count,
        count=count,
    )
    sites, asked = make_sites(path, tmp_path / out / "sites"), Counter[tuple[str, str]]()

    def change(name, what, arrived):
        asked[name, what] += 1
        gone = fails(name, what, asked[name, what])
        return Reply({}, {}, "dropped") if gone else arrived

    nearby: list[Nearby] = []
    result = run_nearby(path, tmp_path / out / "run", sites, change, told, nearby)
    return path, result, nearby[-1]


def model_of(tmp_path, out):
    return RunFolder(tmp_path / out / "run").load_model()


@pytest.mark.parametrize("stage", ["keys", "shares", "train"])
def test_the_sum_is_that_of_those_who_stay(stage, tmp_path):
    """With the weights that are right without the others, as without secure sums."""
    gone = {"bob", "eve"}
    run_with(tmp_path, lambda name, what, _: name in gone and what == stage)
    run_with(
        tmp_path, lambda name, what, _: name in gone and what == "train", "plain", secure=False
    )
    fleet, plain = (model_of(tmp_path, out) for out in ("fleet", "plain"))
    for name, tensor in plain.items():
        torch.testing.assert_close(fleet[name], tensor, rtol=1e-6, atol=1e-7)
    one, other = (read_records(tmp_path / out / "run")[0] for out in ("fleet", "plain"))
    assert sorted(one["clients"]) == sorted(other["clients"]) == [0, 2, 3, 5]
    assert {*one["failed"]["dropped"]} == {*other["failed"]["dropped"]} == {1, 4}
    assert one["train_loss"] == pytest.approx(other["train_loss"])


@pytest.mark.parametrize("stage", ["agree", "open"])
def test_who_is_lost_after_its_numbers_came_is_in_the_sum(stage, tmp_path):
    path, *_ = run_with(tmp_path, lambda name, what, _: name in ("bob", "eve") and what == stage)
    simulated(path, tmp_path / "here")
    assert model_bytes(tmp_path / "fleet" / "run") == model_bytes(tmp_path / "here")


def test_sites_may_be_lost_at_every_stage_of_one_round(tmp_path):
    """One before it shared its key and one after, and later two others, whose numbers count."""
    for out, where in (
        ("fleet", {"bob": "keys", "eve": "train"}),
        ("more", {"bob": "shares", "eve": "train"}),
        ("late", {"bob": "agree", "eve": "open"}),
    ):
        _, result, _ = run_with(
            tmp_path, lambda name, what, _, where=where: where.get(name) == what, out
        )
        (record,) = read_records(tmp_path / out / "run")
        assert result.status == "finished"
        assert record["attempts"] == 1
    first, second = (model_bytes(tmp_path / out / "run") for out in ("fleet", "more"))
    assert first == second


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_the_round_is_repeated_with_the_same_bytes(stage, tmp_path):
    gone = ("ann", "bob", "eve")
    path, _, nearby = run_with(
        tmp_path, lambda name, what, time: name in gone and what == stage and time == 1, rounds=2
    )
    simulated(path, tmp_path / "here")
    assert model_bytes(tmp_path / "fleet" / "run") == model_bytes(tmp_path / "here")
    before = [what for _, what, _ in nearby.orders[: nearby.orders.index(again(nearby))]]
    assert ("open" in before) == (stage == "open")


def again(nearby):
    """The first order of the second attempt."""
    begun = [order for order in nearby.orders if order[1] == "keys"]
    return begun[6]


def test_what_some_have_opened_is_the_only_sum_of_its_round(tmp_path):
    """Three of six are lost while they open it, and one of these for good: the run ends."""
    told: list[str] = []

    def fails(name, what, time):
        return (name in ("ann", "bob", "eve") and what == "open" and time == 1) or (
            name == "ann" and what == "keys" and time > 1
        )

    _, result, nearby = run_with(
        tmp_path, fails, told=told, more='reporting = { below_quorum = "repeat" }\n'
    )
    assert result.status != "finished"
    attempts = [order["survivors"] for _, what, order in nearby.orders if what == "agree"]
    assert all(survivors == attempts[0] for survivors in attempts)


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_below_the_threshold_for_good_nothing_is_opened(stage, tmp_path):
    gone = ("ann", "bob", "eve")
    _, result, nearby = run_with(tmp_path, lambda name, what, _: name in gone and what == stage)
    assert result.status != "finished"
    assert not any(what == "open" for _, what, _ in nearby.orders)


def lying(reply, name, value):
    return reply._replace(facts={**reply.facts, name: value})


ZEROS = "00" * 32
LIES = {
    "no keys": ("keys", lambda r: lying(r, "keys", None)),
    "keys that are none": ("keys", lambda r: lying(r, "keys", [ZEROS, ZEROS, r.facts["keys"][2]])),
    "keys it has not signed": ("keys", lambda r: lying(r, "keys", [*r.facts["keys"][:2], "00"])),
    "shares for some": ("shares", lambda r: lying(r, "sealed", {"0": "00"})),
    "no numbers": ("train", lambda r: r._replace(tensors={})),
    "few numbers": ("train", lambda r: r._replace(tensors={"masked": r.tensors["masked"][:-1]})),
    "floats": ("train", lambda r: r._replace(tensors={"masked": r.tensors["masked"].float()})),
    "another's signature": ("agree", lambda r: lying(r, "signature", "00")),
    "no shares": ("open", lambda r: lying(r, "seeds", {})),
    "shares that are none": ("open", lambda r: lying(r, "seeds", "x")),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_site_that_sends_what_it_must_not_is_left_out_and_named(lie, tmp_path):
    stage, change = LIES[lie]
    path = write_experiment(tmp_path, more=SUMS.format(bits=32), per_round=4, rounds=1)
    sites, told = make_sites(path, tmp_path / "sites"), list[str]()

    def changed(name, what, arrived):
        return change(arrived) if (name, what) == ("bob", stage) else arrived

    result = run_nearby(path, tmp_path / "run", sites, changed, told)
    (record,) = read_records(tmp_path / "run")
    assert result.status == "finished"
    assert any(line.startswith("bob: malformed") for line in told), told
    late = stage in ("agree", "open")
    assert record["failed"] == ({} if late else {"malformed": [1]})
    assert (1 in record["clients"]) == late


def test_a_share_that_is_a_lie_is_found_and_spoils_no_model(tmp_path):
    path = write_experiment(tmp_path, more=SUMS.format(bits=32), per_round=4, rounds=1)
    sites, told = make_sites(path, tmp_path / "sites"), list[str]()
    times = Counter[str]()

    def change(name, what, arrived):
        times[name] += what == "open"
        if (name, what, times[name]) != ("bob", "open", 1):
            return arrived
        seeds = arrived.facts["seeds"]
        return lying(arrived, "seeds", seeds | {0: seeds[1]})

    assert run_nearby(path, tmp_path / "run", sites, change, told).status == "finished"
    assert any("do not belong together" in line for line in told)
    simulated(path, tmp_path / "here")
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "here")


def test_a_number_that_is_too_large_stays_at_its_site(tmp_path):
    more = "aggregation = { secure = true, clip = 1e-4 }\n"
    path = write_experiment(tmp_path, more=more, per_round=4, rounds=1)
    sites, told = make_sites(path, tmp_path / "sites"), list[str]()
    assert run_nearby(path, tmp_path / "run", sites, told=told).status != "finished"
    assert any("aggregation.clip is 0.0001" in line for line in told)


def test_the_longest_update_is_what_was_approved(tmp_path):
    more = SUMS.format(bits=32) + "reporting = { largest = 1e-3 }\n"
    path = write_experiment(tmp_path, more=more, per_round=4, rounds=1)
    sites, told = make_sites(path, tmp_path / "sites"), list[str]()
    assert run_nearby(path, tmp_path / "run", sites, told=told).status != "finished"
    assert any("huge" in line for line in told)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"more": 'aggregation = { secure = "simulated" }\n'}, "hides nothing"),
        ({"algorithm": '{ name = "fedvc", size = 16 }'}, "several times"),
        ({"algorithm": '{ name = "median" }'}, "one by one"),
        ({"algorithm": '{ name = "top-k" }'}, "masks"),
        ({"per_round": 2}, "3"),
    ],
)
def test_what_sums_cannot_have_is_refused_with_the_reason(change, why, tmp_path):
    given = {"more": SUMS.format(bits=32), "per_round": 4, **change}
    path = write_experiment(tmp_path, **given)
    with pytest.raises(ValueError, match=why):
        make_sites(path, tmp_path / "sites")


def test_a_server_that_was_killed_while_a_sum_was_opened_ends_with_the_same_bytes(tmp_path):
    path = write_experiment(tmp_path, '{ name = "scaffold" }', SUMS.format(bits=32), per_round=4)
    sites, times = make_sites(path, tmp_path / "sites"), Counter[str]()

    def change(name, what, arrived):
        times[what] += 1
        if (what, times[what]) == ("open", 6):  # in the second round
            raise KeyboardInterrupt
        return arrived

    with pytest.raises(KeyboardInterrupt):
        run_nearby(path, tmp_path / "run", sites, change)
    assert run_nearby(path, tmp_path / "run", sites, resume=True).status == "finished"
    simulated(path, tmp_path / "here")
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "here")


def test_page_and_logs_say_what_the_server_can_see(tmp_path):
    path = write_experiment(tmp_path, more=SUMS.format(bits=32), per_round=4, rounds=1)
    sites = make_sites(path, tmp_path / "sites")
    run_nearby(path, tmp_path / "run", sites, home=str(tmp_path / "server"))
    assert "saw the sum of each round's updates" in headline(read_all([tmp_path / "run"]))
    for home in (sites[0].home, tmp_path / "server"):
        assert verify(home).wrong == []
    lines = [one for one in Log(sites[0].home).events() if one["event"] == "answered"]
    asked = [one["asked"] for one in lines]
    assert asked == ["sizes", "keys", "shares", "train", "agree", "open", "keep"]
    assert all("secure sums" in one["sent"]["guarantee"] for one in lines)
    text = "".join(
        path.read_text() for path in (*sites[0].home.glob("log*"), tmp_path / "server" / LOG)
    )
    assert "PRIVATE" not in text
    assert not re.search("[0-9a-f]{65}", text), "no keys, shares or signatures"


def test_private_examples_are_added_up_too(tmp_path):
    more = SUMS.format(bits=32) + PRIVATE
    path = write_experiment(tmp_path, more=more, per_round=4)
    sites, nearby = make_sites(path, tmp_path / "sites"), list[Nearby]()
    gone = iter(range(2))

    def change(name, what, arrived):
        away = name in ("ann", "bob") and what == "train" and next(gone, None) is not None
        return Reply({}, {}, "dropped") if away else arrived

    assert run_nearby(path, tmp_path / "run", sites, change, nearby=nearby).status == "finished"
    assert [len(Ledger(site.home / LEDGER).entries) for site in sites] == [2] * 4
    assert all("train_loss" not in record for record in read_records(tmp_path / "run"))


def test_too_few_sites_for_the_sums_that_were_approved_are_said(tmp_path):
    path = write_experiment(tmp_path, more=SUMS.format(bits=32), per_round=1.0)
    sites = make_sites(path, tmp_path / "sites")
    (sites[0].home / FILE).write_text("most_rounds = 1\n")
    with pytest.raises(ValueError, match="per_round"):
        run_nearby(path, tmp_path / "run", sites, wait=0.5, at_least=3)


OF_SITES = "privacy = { noise = 2.0, clip = 1.0, delta = 1e-3 }\n"


def test_sites_add_the_noise_themselves_and_keep_account(tmp_path):
    more = SUMS.format(bits=32) + OF_SITES
    path = write_experiment(tmp_path, more=more, per_round=4)
    sites, nearby = make_sites(path, tmp_path / "sites"), list[Nearby]()
    described = for_fleet(fl.Experiment.read(path))
    lines = "\n".join(
        sites[0]
        .approvals.of(terms_of(described, [one.home for one in sites]).hash)
        .offer.terms.effects()
    )
    assert "3 sites" in lines
    gone = iter(range(2))

    def change(name, what, arrived):
        away = name in ("ann", "bob") and what == "train" and next(gone, None) is not None
        return Reply({}, {}, "dropped") if away else arrived

    assert run_nearby(path, tmp_path / "run", sites, change, nearby=nearby).status == "finished"
    told = read_summary(tmp_path / "run")["privacy"]
    assert told["unit"] == "client"
    assert not any("seed" in line for line in told["not_covered"])
    for site in sites:
        entries = Ledger(site.home / LEDGER).entries
        assert [one.unit for one in entries] == ["client"] * 2, "repeated, and still the same noise"
        spent = epsilon([one.release for one in entries], 1e-3)
        assert spent == pytest.approx(told["epsilon"], rel=1e-6)
    records = read_records(tmp_path / "run")
    assert all("train_loss" not in record for record in records)


def test_a_sites_budget_counts_sums_with_noise(tmp_path):
    path = write_experiment(tmp_path, more=SUMS.format(bits=32) + OF_SITES, per_round=4)
    sites, told = make_sites(path, tmp_path / "sites"), list[str]()
    (sites[0].home / FILE).write_text('[privacy]\nunit = "client"\nepsilon = 0.1\ndelta = 1e-3\n')
    run_nearby(path, tmp_path / "run", sites, told=told)
    assert any("ann: refused: its policy gives epsilon 0.1" in line for line in told)
    assert not Ledger(sites[0].home / LEDGER).entries


def test_noise_of_sites_is_of_no_key_and_is_in_what_leaves(tmp_path):
    """The same run twice: the same clients, other models; the simulation draws by key."""
    path = write_experiment(tmp_path, more=SUMS.format(bits=32) + OF_SITES, per_round=4, rounds=1)
    for out in ("one", "two"):
        run_nearby(path, tmp_path / out, make_sites(path, tmp_path / f"{out}-sites"))
    models = [RunFolder(tmp_path / out).load_model()["fc.weight"] for out in ("one", "two")]
    spread = 2.0 * (4 / 3) ** 0.5 / 4  # of a sum in which all four added what three are counted on
    apart = float((models[0].double() - models[1].double()).std())
    assert apart == pytest.approx(2**0.5 * spread, rel=0.15)
