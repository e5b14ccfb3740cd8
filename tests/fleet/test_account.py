"""What a site gives of its data in all: counted in its own ledger, and never past its budget."""

import json

import pytest
import torch

from fedlens.config.experiment import Experiment
from fedlens.fleet import terms as terms_of_sites
from fedlens.fleet.account import DATA, LEDGER, Account
from fedlens.fleet.log import HEAD, LOG, verify
from fedlens.fleet.policy import FILE
from fedlens.fleet.site import MISTAKE
from fedlens.fleet.terms import Terms, check_possible, for_fleet
from fedlens.privacy.accountant import epsilon
from fedlens.privacy.events import Release
from fedlens.privacy.ledger import Ledger
from fedlens.setup.data import load_dataset
from fedlens.storage.run_files import read_records, read_summary
from tests.fleet.sites import Nearby, make_sites, run_nearby, write_experiment

PRIVATE = 'privacy = { unit = "example", noise = 2.0, clip = 1.0, delta = 1e-4 }\n'
BUDGET = '[privacy]\nunit = "example"\nepsilon = {}\ndelta = 1e-4\n'


def one_site(tmp_path, more=PRIVATE, rounds=2, approved=True):
    path = write_experiment(tmp_path, more=more, rounds=rounds, per_round=4)
    site = make_sites(path, tmp_path / "sites", approved)[0]
    return site, terms_of(path)


def terms_of(path, *overrides):
    experiment = for_fleet(Experiment.read(path, list(overrides)))
    return Terms.of(experiment, load_dataset(experiment.dataset, None))


def trained(site, terms, round=0, model=0.0, keys=(1,)):
    size = site.answer("sizes", {"experiment": terms.hash, "terms": terms.text, "client": 0}, {})
    order = {"experiment": terms.hash, "client": 0, "round": round, "keys": [*keys]}
    order |= {"size": size.facts.get("size"), "counted": None}
    weight = torch.full((1, 4, 192), model)
    given = {"params/fc.weight": weight, "params/fc.bias": torch.zeros(1, 4)}
    return site.answer("train", order, given)


def spent(site):
    return [one.release for one in Ledger(site.home / LEDGER).entries]


def mistake(site):
    return (site.home / MISTAKE).read_text()


def test_sites_train_with_noise_of_their_own_and_send_no_measures(tmp_path):
    path = write_experiment(tmp_path, more=PRIVATE, per_round=4)
    sites, made = make_sites(path, tmp_path / "sites"), list[Nearby]()
    result = run_nearby(path, tmp_path / "run", sites, nearby=made)
    assert result.status == "finished"
    sent = [reply for one in made for _, what, reply in one.replies if what == "train"]
    assert len(sent) == 8
    names = {name.split("/")[1] for reply in sent for name in reply.tensors}
    assert names == {"update"}
    assert all("train_loss" not in record for record in read_records(tmp_path / "run"))
    told = read_summary(tmp_path / "run")["privacy"]
    held = [round(one.count * 8 / 2) for site in sites for one in [spent(site)[0]]]
    assert told["epsilon"] >= max(epsilon(spent(site), told["delta"]) for site in sites), held
    assert not any("seed" in line for line in told["not_covered"])


def test_noise_and_batches_of_a_site_are_not_those_of_any_key(tmp_path):
    """The same order to two copies of a site: without privacy the same bytes, with it others."""
    updates = {}
    for more in ("", PRIVATE):
        for copy in ("one", "two"):
            folder = tmp_path / copy / (more and "private")
            folder.mkdir(parents=True)
            site, terms = one_site(folder, more)
            updates[more, copy] = trained(site, terms).tensors
    for more in ("", PRIVATE):
        pairs = zip(updates[more, "one"].values(), updates[more, "two"].values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) == (not more)


def test_an_update_is_in_the_ledger_with_its_own_rate_and_steps(tmp_path):
    site, terms = one_site(tmp_path)
    size = trained(site, terms).facts and site.offer(terms, 0).size
    (found,) = spent(site)
    assert found == Release(2.0, "poisson", 8 / size, count=-(-size // 8))
    (entry,) = Ledger(site.home / LEDGER).entries
    assert (entry.data, entry.unit, entry.run, entry.round) == (DATA, "example", terms.hash, 1)
    assert "ledger" in (site.home / LOG).read_text()
    assert verify(site.home).wrong == []


def test_an_order_past_the_budget_is_refused_with_what_is_left(tmp_path):
    site, terms = one_site(tmp_path)
    size = site.offer(terms, 0).size
    step = Release(2.0, "poisson", 8 / size, count=-(-size // 8))
    once, twice = epsilon([step], 1e-4), epsilon([step, step], 1e-4)
    (site.home / FILE).write_text(BUDGET.format((once + twice) / 2))
    assert "keys" in trained(site, terms, 0).facts
    refused = trained(site, terms, 1, model=0.1).facts["refused"]
    assert f"{(twice - once) / 2:.3g} is left" in refused
    assert spent(site) == [step]
    (site.home / FILE).write_text(BUDGET.format(twice))
    assert "keys" in trained(site, terms, 1, model=0.1).facts


def test_the_budget_is_one_over_experiments_servers_and_changed_data(tmp_path):
    site, terms = one_site(tmp_path)
    trained(site, terms)
    other = terms_of(tmp_path / "experiment.toml", "privacy.noise=1.5", "seed=7")
    with (site.home / "data.npz").open("ab") as file:
        file.write(b" ")  # still readable, and another file
    site.approvals.approve(site.offer(other, 0))
    trained(site, other)
    assert [one.noise for one in spent(site)] == [2.0, 1.5]
    total = epsilon(spent(site), 1e-4)
    (site.home / FILE).write_text(BUDGET.format(total))
    assert "0 is left" in trained(site, other, 1, model=0.1).facts["refused"]


def test_a_site_with_a_budget_gives_nothing_without_privacy(tmp_path):
    site, terms = one_site(tmp_path, more="")
    (site.home / FILE).write_text(BUDGET.format(100))
    assert "protects nobody" in trained(site, terms).facts["refused"]


def test_a_repeated_order_gets_the_same_noise_and_costs_nothing(tmp_path):
    site, terms = one_site(tmp_path)
    first, again = trained(site, terms), trained(site, terms)
    assert first.tensors.keys() == again.tensors.keys()
    assert all(torch.equal(first.tensors[name], again.tensors[name]) for name in first.tensors)
    assert first.facts["keys"] == again.facts["keys"] and len(spent(site)) == 1


def test_a_server_cannot_average_the_noise_away_by_asking_in_turns(tmp_path):
    site, terms = one_site(tmp_path)
    replies = [trained(site, terms, round, model=float(round)) for round in (0, 1, 0, 1)]
    assert ["refused" in one.facts for one in replies] == [False, False, True, False]
    last, again = replies[1].tensors, replies[3].tensors
    assert all(torch.equal(last[name], again[name]) for name in last)
    assert "more than the 2 updates approved" in replies[2].facts["refused"]
    assert len(spent(site)) == 2


def cut(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:-1]))


SPOILT = {
    "lost": (lambda home: (home / LEDGER).unlink(), "is missing"),
    "emptied": (lambda home: (home / LEDGER).write_bytes(b""), "put the old files back"),
    "cut off": (lambda home: cut(home / LEDGER), "put the old files back"),
    "edited": (
        lambda home: (home / LEDGER).write_text(
            (home / LEDGER).read_text().replace('"noise": 2.0', '"noise": 9.0')
        ),
        "was changed",
    ),
    "lost with the end of the log": (
        lambda home: ((home / LEDGER).unlink(), cut(home / LOG)),
        "is missing",
    ),
    "lost with the head of the log": (
        lambda home: ((home / LEDGER).unlink(), (home / HEAD).unlink()),
        "is missing",
    ),
    "without its log": (
        lambda home: [(home / name).unlink() for name in (LOG, HEAD)],
        "put the old files back",
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_ledger_that_is_lost_or_edited_closes_the_site(how, tmp_path):
    site, terms = one_site(tmp_path)
    assert "keys" in trained(site, terms, 0).facts
    spoil, why = SPOILT[how]
    spoil(site.home)
    assert "its own files" in trained(site, terms, 1, model=0.1).facts["refused"]
    assert why in mistake(site)
    site.approvals.approve(site.offer(terms, 0))  # does not begin another one
    assert "its own files" in trained(site, terms, 1, model=0.1).facts["refused"]


def test_a_kill_between_ledger_and_log_leaves_the_site_open(tmp_path):
    site, terms = one_site(tmp_path)
    trained(site, terms, 0)
    Account(site.home).pay(terms, terms.algorithm, 30, 1)  # and killed before it trained
    assert "keys" in trained(site, terms, 1, model=0.1).facts
    assert len(spent(site)) == 3


def test_approval_shows_what_an_experiment_costs_and_what_remains(fedlens, tmp_path):
    site, terms = one_site(tmp_path, approved=False)
    (site.home / FILE).write_text(BUDGET.format(50))
    site.approvals.offer(site.offer(terms, 0))
    size = site.offer(terms, 0).size
    cost = epsilon([Release(2.0, "poisson", 8 / size, count=2 * -(-size // 8))], 1e-4)
    said = fedlens("fleet", "approve", site.home, terms.hash[:12], "--yes").out
    assert f"epsilon {cost:.3g} at delta 0.0001 for each of {size} examples, by 2 updates" in said
    assert f"epsilon 0 before, and {cost:.3g} with this experiment" in said
    assert f"epsilon 50; {50 - cost:.3g} remains" in said
    assert "guarantee: privacy of each example: noise 2.0, drawn at the site" in said
    (site.home / FILE).write_text(BUDGET.format(cost / 2))
    assert "the site would refuse" in "\n".join(Account(site.home).describe(terms, size))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("privacy = { noise = 1.0 }\n", "server of a fleet would have to add"),
        ('privacy = { unit = "example", epsilon = 8.0 }\n', "plan"),
        ('privacy = { unit = "example", noise = 1.0, ledger = "l" }\n', "own ledgers"),
    ],
)
def test_privacy_that_sites_cannot_keep_is_refused_by_both_sides(more, why, tmp_path, monkeypatch):
    path = write_experiment(tmp_path, more=more, per_round=4)
    experiment = for_fleet(Experiment.read(path))
    with pytest.raises(ValueError, match=why):
        check_possible(experiment)
    if "ledger" not in more:
        monkeypatch.setattr(terms_of_sites, "check_possible", lambda _: None)
        with pytest.raises(ValueError, match=why):
            Terms.of(experiment, load_dataset(experiment.dataset, None))


def test_a_budget_is_a_number_above_0(tmp_path):
    site, terms = one_site(tmp_path)
    (site.home / FILE).write_text(BUDGET.format(-1))
    assert "its own files" in trained(site, terms).facts["refused"]
    assert "above 0" in mistake(site)


def test_the_ledger_reads_like_any_other(fedlens, tmp_path):
    site, terms = one_site(tmp_path)
    trained(site, terms, 0)
    trained(site, terms, 1, model=0.1)
    said = json.loads(fedlens("privacy", "ledger", site.home / LEDGER, "--json").out)
    assert (said["spent"][0]["runs"], said["spent"][0]["rounds"]) == (1, 2)
