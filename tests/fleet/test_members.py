"""Sites that are invited, come later, get new keys or are withdrawn, while a server runs."""

import contextlib
import json
import ssl
import threading
from collections import Counter
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from fedlens.deploy.card import card
from fedlens.fleet import CA, CA_KEY, NODE_KEY, SERVER, SERVER_KEY
from fedlens.fleet.join import show
from fedlens.fleet.keys import (
    Invitation,
    check_server_keys,
    enrol,
    invite,
    invited,
    make_server_keys,
    make_site_key,
    public_keys,
    renew_server_keys,
    withdraw,
)
from fedlens.fleet.log import Log
from fedlens.fleet.members import Members, read_members
from fedlens.fleet.server import Job, run_job
from fedlens.storage.files import write_atomically
from fedlens.storage.run_files import read_records
from tests.fleet.sites import Nearby, make_sites, run_nearby, write_experiment
from tests.fleet.test_serve import made_keys


class Link:
    """Numbers keys in the order in which they come."""

    def __init__(self):
        self.nodes = dict[bytes, int]()

    def register(self, public):
        for key in public.values():
            self.nodes.setdefault(key, 100 + len(self.nodes))
        return {name: self.nodes[key] for name, key in public.items()}


@pytest.fixture
def members(tmp_path):
    keys = made_keys(tmp_path / "keys", "ann", "cat")
    (tmp_path / "home").mkdir()
    found = Members(keys, tmp_path / "home", Link(), list[str]().append)
    found.refresh()
    return found


def numbers(members):
    return {name: one.number for name, one in read_members(members.home).items()}


def add(members, name):
    place = members.keys.parent / name
    make_site_key(place, name)
    (members.keys / f"{name}.pub").write_bytes((place / f"{name}.pub").read_bytes())
    members.refresh()


def test_a_site_that_comes_later_leaves_the_numbers_of_the_others(members):
    assert numbers(members) == {"ann": 0, "cat": 1}
    add(members, "bob")
    assert numbers(members) == {"ann": 0, "cat": 1, "bob": 2}
    assert {*members.names.values()} == {"ann", "cat", "bob"}


def test_who_is_withdrawn_is_let_in_no_more_and_stands_in_the_log(members):
    withdraw(members.keys, "ann")
    members.refresh()
    found = read_members(members.home)
    assert (found["ann"].node, found["ann"].expected, found["cat"].number) == (None, False, 1)
    assert {*members.names.values()} == {"cat"}
    assert [one["event"] for one in Log(members.home).events()][-1] == "withdrawn"
    with pytest.raises(ValueError, match="not a site of this server"):
        withdraw(members.keys, "ann")


def test_a_site_with_a_new_key_keeps_its_number(members):
    before = read_members(members.home)["ann"]
    place = members.keys.parent / "keys" / "ann"
    (place / CA).touch()
    (place / "ann.pub").write_bytes((members.keys / "ann.pub").read_bytes())
    make_site_key(place, "ann", renew=True)
    (members.keys / "ann.pub").write_bytes((place / "ann.pub").read_bytes())
    members.refresh()
    after = read_members(members.home)["ann"]
    assert (after.number, after.node != before.node) == (before.number, True)
    assert [one["event"] for one in Log(members.home).events()][-1] == "key renewed"


def test_a_key_that_is_not_whole_changes_nothing(members):
    told = list[str]()
    members.notify = told.append
    (members.keys / "bob.pub").write_text("ecdsa-sha2-nist")
    members.refresh()
    assert "the keys stay as they were" in told[0]
    assert numbers(members) == {"ann": 0, "cat": 1}


def invitation(keys, name="eve", days=1.0):
    path = keys.parent / f"{name}.invite"
    invite(keys, name, "127.0.0.1:1", days, path)
    assert path.stat().st_mode & 0o077 == 0
    return Invitation.read(path)


def test_an_invited_site_has_its_number_before_it_comes(members):
    invitation(members.keys, "bob")
    members.refresh()
    found = read_members(members.home)["bob"]
    assert (found.number, found.node, found.invited) == (2, None, True)


def test_an_invitation_is_taken_once_and_from_the_same_site_again(tmp_path):
    keys = made_keys(tmp_path / "keys")
    made = invitation(keys)
    assert made.token not in "".join(path.read_text() for path in keys.glob("*.invited"))
    made.accept(tmp_path / "eve")
    made.accept(tmp_path / "other")
    one, other = ((tmp_path / home / "eve.pub").read_text() for home in ("eve", "other"))
    for token in ("wrong", made.token[:-1]):
        with pytest.raises(ValueError, match="another file"):
            enrol(keys, "eve", token, one)
    for _ in range(2):
        assert enrol(keys, "eve", made.token, one) == public_keys(keys)["eve"]
    with pytest.raises(ValueError, match="known already"):
        enrol(keys, "eve", made.token, other)
    assert not invited(keys)


def test_no_name_and_no_key_gets_past_an_invitation(tmp_path):
    keys = made_keys(tmp_path / "keys")
    made, late = invitation(keys), invitation(keys, "late", days=0.0)
    public = (keys / "ann.pub").read_text()
    for name, key in (("../eve", public), ("bob", public), ("eve", "ssh-rsa AAAA"), ("eve", None)):
        with pytest.raises(ValueError, match=r"name|invited|key"):
            enrol(keys, name, made.token, key)
    with pytest.raises(ValueError, match="another site has this key"):
        enrol(keys, "eve", made.token, public)
    with pytest.raises(ValueError, match="too old"):
        enrol(keys, "late", late.token, public)
    assert sorted(path.name for path in keys.glob("*.pub")) == ["ann.pub"]


def test_an_invited_site_makes_itself_known_through_the_gate(members, tmp_path):
    pytest.importorskip("flwr")
    from fedlens.fleet.flower import free_port
    from fedlens.fleet.gate import Gate

    made, port, told = invitation(members.keys), free_port(), list[str]()
    made.accept(tmp_path / "eve")
    (tmp_path / "eve" / CA).write_bytes((members.keys / CA).read_bytes())
    server, done = f"127.0.0.1:{port}", threading.Event()

    def look():
        while not done.wait(0.05):
            members.refresh()

    reading = threading.Thread(target=look)
    reading.start()
    try:
        with Gate("127.0.0.1", port, "127.0.0.1:1", members.keys, told.append, members.names):
            false = Invitation(made.server, "eve", "false", made.ca)
            with pytest.raises(
                ValueError, match=r"did not take the invitation of eve.*another file"
            ):
                show(false, tmp_path / "eve", server)
            for body in ("", "[]", "[" * 50_000, "x" * 100_000, '{"name": 3}'):
                assert post(port, members.keys / CA, body) == 403
            show(made, tmp_path / "eve", server)
            assert "eve" in members.names.values(), "it is registered when it has its answer"
    finally:
        done.set()
        reading.join()
    assert told[-1] == "eve came by its invitation"


def post(port, ca, body):
    trust = ssl.create_default_context(cafile=str(ca))
    asked = HTTPSConnection("127.0.0.1", port, context=trust, timeout=60)
    asked.request("POST", "/fedlens/enrol", body)
    return asked.getresponse().status


def test_one_file_is_all_that_a_site_needs(tmp_path, fedlens, monkeypatch):
    pytest.importorskip("flwr")
    keys = tmp_path / "keys"
    make_server_keys(keys, ["127.0.0.1"])
    words = ["--server", "10.0.0.1:9092", "--to", tmp_path]
    told = fedlens("fleet", "invite", keys, "ann", "bob", *words)
    assert (told.status, told.out.count("alone")) == (0, 2)
    asked = list[Any]()
    monkeypatch.setattr("fedlens.fleet.join.join", lambda *given: asked.append(given))
    monkeypatch.chdir(tmp_path)
    told = fedlens("fleet", "join", "ann.invite", "--data", "photos")
    assert told.status == 0, told.err
    ((home, name, data, server, *_),) = asked
    assert (home, name, data, server) == (Path("ann"), "ann", Path("photos"), "10.0.0.1:9092")
    assert (tmp_path / "ann" / NODE_KEY).is_file()
    assert fedlens("fleet", "join", "--data", "photos").err.startswith("fedlens: no --server")
    (tmp_path / "not.invite").write_text("{}")
    told = fedlens("fleet", "join", "not.invite", "--data", "photos")
    assert (told.status, "is no invitation" in told.err) == (2, True)


def test_renewed_certificates_hold_for_sites_that_have_the_older_ca(tmp_path, fedlens):
    pytest.importorskip("flwr")
    make_server_keys(tmp_path, ["127.0.0.1"])
    older, key = (tmp_path / CA).read_bytes(), (tmp_path / SERVER_KEY).read_bytes()
    told = fedlens("fleet", "keys", tmp_path, "--host", "127.0.0.1", "--renew")
    assert told.status == 0
    check_server_keys(tmp_path)
    assert (tmp_path / SERVER_KEY).read_bytes() != key
    (tmp_path / "older.pem").write_bytes(older)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / SERVER, tmp_path / SERVER_KEY)
    for ca in ("older.pem", CA):
        site = ssl.create_default_context(cafile=str(tmp_path / ca))
        here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
        one = site.wrap_bio(here, there, server_hostname="127.0.0.1")
        other = server.wrap_bio(there, here, server_side=True)
        for _ in range(3):
            for side in (one, other):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        assert one.version()
    (tmp_path / CA_KEY).unlink()
    with pytest.raises(ValueError, match=r"no ca\.key"):
        renew_server_keys(tmp_path, ["127.0.0.1"])


def test_a_site_takes_back_what_it_approved(tmp_path, fedlens):
    path = write_experiment(tmp_path, per_round=4)
    sites = make_sites(path, tmp_path / "sites")
    (approved,) = sites[0].approvals.approved()
    told = fedlens("fleet", "withdraw", sites[0].home, approved[:6])
    assert told.status == 0, told.err
    assert not sites[0].approvals.approved()
    told = fedlens("fleet", "withdraw", sites[0].home, approved[:6])
    assert (told.status, "no experiment" in told.err) == (2, True)
    assert sites[0].answer("train", {"experiment": approved, "client": 0}, {}).facts["refused"]
    assert [one["event"] for one in Log(sites[0].home).events()][-2:] == ["withdrawn", "answered"]


def test_a_run_goes_on_at_once_without_a_site_that_is_withdrawn(tmp_path):
    path = write_experiment(tmp_path, per_round=4, rounds=3)
    sites, made, told = make_sites(path, tmp_path / "sites"), list[Nearby](), list[str]()

    def change(name, what, arrived):
        if what == "train":
            made[-1].withdrawn = made[-1].away = {"bob"}
        return arrived

    run_nearby(path, tmp_path / "run", sites, change, told, made)
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    failed = [json.loads(line).get("failed") for line in lines]
    assert failed == [{}, {"unavailable": [1]}, {"unavailable": [1]}]
    assert told.count("bob: unavailable: it was withdrawn") == 3  # and gets no final model
    lineage = card(tmp_path / "run", "model.onnx", "onnx").partition("Whose updates are in it:")[2]
    assert "| bob | 1 | 1 |" in lineage
    assert "| ann | 3 | 1 to 3 |" in lineage


@pytest.mark.parametrize("killed", [False, True])
def test_a_site_that_comes_during_a_run_takes_part_from_then_on(killed, tmp_path):
    """Also ann, whose number is the first; and a server that is killed goes on with it."""
    path = write_experiment(tmp_path, '{ name = "scaffold" }', per_round=1.0, rounds=5)
    sites, made, told = make_sites(path, tmp_path / "sites"), list[Nearby](), list[str]()
    out, trained = tmp_path / "run", Counter[str]()

    def change(name, what, arrived):
        trained[name] += what == "train"
        return arrived

    def run(watch=None):
        by_name = {site.home.name: site for site in sites}

        def connect(names):
            nearby = Nearby([by_name[name] for name in names], change)
            nearby.away = set() if trained["dan"] else {"ann"}
            made.append(nearby)
            return nearby

        numbers = {name: number for number, name in enumerate(by_name)}
        job = Job(str(path), str(out), numbers, wait=0.1, at_least=3, resume=True)
        return run_job(job, connect, told.append, watch)

    def watch(record):
        if "round" in record:
            for nearby in made:
                nearby.away = set()
            if killed and record["round"] == 3:
                raise KeyboardInterrupt

    if killed:
        with pytest.raises(KeyboardInterrupt):
            run(watch)
    run(None if killed else watch)
    records = read_records(out)
    assert [len(record["clients"]) for record in records] == [3, 4, 4, 4, 4]
    assert "ann: takes part from round 2 on" in told
    known = json.loads((out / "sites.json").read_text())
    assert [(one["name"], one["number"]) for one in known] == [
        *(("bob", 1), ("cat", 2), ("dan", 3), ("ann", 0))
    ]
    lineage = card(out, "model.onnx", "onnx").partition("Whose updates are in it:")[2]
    assert "| ann | 4 | 2 to 5 |" in lineage and "| bob | 5 | 1 to 5 |" in lineage
    held = json.loads((out / "partition.json").read_text())
    assert held["num_clients"] == 4


def test_a_server_waits_for_those_who_were_invited(tmp_path):
    """And who comes later is asked, too, with the number that it was given."""
    path = write_experiment(tmp_path, per_round=4)
    sites, home = make_sites(path, tmp_path / "sites"), tmp_path / "home"
    home.mkdir()

    def write(count):
        known = {s.home.name: {"number": k, "node": k} for k, s in enumerate(sites[:count])}
        rest = {s.home.name: {"number": count, "invited": True} for s in sites[count : count + 1]}
        write_atomically(home / "members.json", json.dumps(known | rest).encode())

    write(3)

    def change(name, what, arrived):
        if (name, what) == ("cat", "sizes"):
            write(4)
        return arrived

    told = list[str]()
    run_nearby(path, tmp_path / "run", sites, change, told, home=str(home))
    known = json.loads((tmp_path / "run" / "sites.json").read_text())
    assert [(one["name"], one["number"]) for one in known] == [
        *(("ann", 0), ("bob", 1), ("cat", 2), ("dan", 3))
    ]
