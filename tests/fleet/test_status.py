"""How a run of a fleet is looked at: the page, `fedlens fleet status`, what left a site."""

import json
from urllib.request import urlopen

import pytest

from fedlens.fleet.payload import Reply
from fedlens.fleet.status import FILE, Page, Standing, Status
from fedlens.fleet.told import told_of
from fedlens.report.live import serving
from tests.fleet.sites import NAMES, make_sites, run_nearby, write_experiment


@pytest.fixture
def served(tmp_path):
    """A run in which bob refuses to train, and the update of cat is far too long."""
    path = write_experiment(tmp_path, per_round=4)
    sites = make_sites(path, tmp_path / "sites")

    def change(name, what, arrived):
        if (name, what) == ("bob", "train"):
            return Reply({"refused": "it will not"}, {})
        long = (name, what) == ("cat", "train")
        tensors = {n: t + 1e8 * long for n, t in arrived.tensors.items()}
        return arrived._replace(tensors=tensors)

    run_nearby(path, tmp_path / "run", sites, change, home=str(tmp_path / "home"))
    return tmp_path


def test_it_is_written_down_how_each_site_stands(served):
    found = Status.read(served / "home")
    assert (found.round, found.rounds, found.ended) == (2, 2, "finished")
    answers = {name: (one.used, one.last, one.asked) for name, one in found.sites.items()}
    assert answers == {"ann": (2, 2, ""), "bob": (0, 0, ""), "cat": (0, 0, ""), "dan": (2, 2, "")}
    assert found.sites["ann"].answer == "used in round 2"
    assert found.sites["bob"].answer == "refused in round 2: it will not"
    assert found.sites["cat"].answer.startswith("huge in round 2: its norm is")
    size = 2 * 4 * (4 * 192 + 4) + 2 * 8  # two updates in float32, and their losses
    assert abs(found.sites["ann"].got - size) < 64
    assert found.sites["ann"].sent == 3 * 4 * (4 * 192 + 4)  # of two rounds, and the final one


def test_the_status_is_printed_by_site_with_what_the_run_came_to(served, fedlens):
    told = fedlens("fleet", "status", served / "home")
    assert told.status == 0
    assert "finished; 4 of 4 sites here" in told.out
    rows = {line.split()[0]: line for line in told.out.splitlines() if line.startswith(NAMES)}
    assert "used in round 2" in rows["ann"]
    assert "refused in round 2: it will not" in rows["bob"]
    assert "final accuracy" in told.out
    found = json.loads(fedlens("fleet", "status", served / "home", "--json").out)
    assert found["sites"]["ann"]["used"] == 2


def test_a_site_tells_what_it_was_asked_and_what_left_it(served, fedlens):
    told = fedlens("fleet", "status", served / "sites" / "ann")
    assert told.status == 0
    (first, asked, left, guarantee, last) = told.out.splitlines()
    assert ": fedavg, 2 rounds; approved by " in first
    told = "asked: once how much it holds, 2 times to train, once to keep the final model; the last"
    assert told in asked
    assert "left the site: how many examples it holds; 2 updates of the model, 0.01 MB" in left
    assert guarantee.strip().startswith("guarantee: none")
    assert last == "images and labels did not leave this site"


def test_a_site_that_was_asked_nothing_says_so(tmp_path):
    (tmp_path / "approved").mkdir()
    assert next(told_of(tmp_path)) == "nothing was asked of this site, and nothing left it"


def test_a_folder_that_is_neither_is_refused(tmp_path, fedlens):
    told = fedlens("fleet", "status", tmp_path)
    assert (told.status, told.out) == (2, "")
    assert "is not the folder of a site" in told.err


def test_the_page_shows_sites_before_there_is_a_run_and_beside_it(served):
    home = served / "home"
    whole = (home / FILE).read_bytes()
    waiting = Status(home, sites={"ann": Standing(here=True), "bob": Standing()})
    waiting.write()
    with serving([served / "run"], beside=Page(home, "hospitals")) as address:
        before = urlopen(address).read().decode()
        assert "waiting for sites: 1 of 2 sites here" in before
        assert "hospitals" in before
        assert "Test accuracy" not in before
    (home / FILE).write_bytes(whole)
    with serving([served / "run"], beside=Page(home, "hospitals")) as address:
        after = urlopen(address).read().decode()
    assert "refused in round 2: it will not" in after
    assert "test accuracy" in after


def test_what_a_site_says_cannot_write_to_the_page(tmp_path):
    status = Status(tmp_path, sites={"ann": Standing()})
    status.fails("ann", "refused: <script>alert(1)</script>\x1b[2J")
    with serving([], beside=Page(tmp_path, "fleet")) as address:
        page = urlopen(address).read().decode()
    assert "<script>alert" not in page
    assert "\x1b" not in page


def test_a_run_that_is_resumed_goes_on_counting(served):
    before = Status.read(served / "home")
    again = Status(served / "home", before.experiment, sites={n: Standing() for n in NAMES})
    again.go_on()
    assert (again.round, again.sites["ann"].used, again.sites["ann"].here) == (2, 2, False)
    other = Status(served / "home", "another", sites={n: Standing() for n in NAMES})
    other.go_on()
    assert (other.round, other.sites["ann"].used) == (0, 0)
