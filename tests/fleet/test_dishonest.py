"""What a dishonest server tries, and what a site does not do."""

import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedlens.cli.main import app_of
from fedlens.config.sections import LocalTraining, Server
from fedlens.data.augment import Augment
from fedlens.fleet.approvals import MOST_OFFERS, Approvals
from fedlens.fleet.policy import FILE
from fedlens.fleet.terms import TOLD, TOLD_OF_CLIENTS, Images, Terms
from fedlens.storage.locks import one_writer
from tests.fleet.sites import TESTED

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")

from tests.fleet.dishonest import (
    Dishonest,
    changed,
    model_to_test,
    model_to_train,
    places_in,
    process_that_approves,
    with_value,
)

EVIL = "evil_code_of_a_server:call"
MODULE = EVIL.partition(":")[0]


@pytest.fixture
def evil(tmp_path, monkeypatch) -> Iterator[Path]:
    """A file that exists once the module that the server names was imported."""
    marker, folder = tmp_path / "imported", tmp_path / "modules"
    folder.mkdir()
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\ncall = print\n"
    (folder / f"{MODULE}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    yield marker
    sys.modules.pop(MODULE, None)


def approve(server: Dishonest, *words: str) -> tuple[int, str, str]:
    """The exit status, the output and the error of `fedlens fleet approve`."""
    words = ("fleet", "approve", str(server.site.home), *words)
    result = CliRunner().invoke(app_of(), list(words), input="y\n")
    return result.exit_code, result.output, str(result.exception or "")


@pytest.mark.parametrize(
    "form", [EVIL, {"name": EVIL, "x": 1}, [{"name": EVIL}]], ids=["text", "table", "list"]
)
def test_no_name_in_an_offer_is_imported_wherever_it_stands(form, tmp_path, evil):
    mu = '{ name = "warm-up", rounds = 1, then = { name = "cosine", start = 0.1 } }'
    server = Dishonest(tmp_path, algorithm=f'{{ name = "fedprox", mu = {mu} }}')
    places = places_in(server.terms.content.experiment, "experiment")
    assert len(places) > 40
    taken = 0
    for place in [*places, *(("experiment", "local", key) for key in ("anneal", "clip", "steps"))]:
        text = with_value(server.terms, place, form)
        if server.offered(text).startswith("its terms cannot be taken"):
            continue
        taken += 1
        terms = Terms(text)
        assert terms.own_code == [EVIL], place
        assert EVIL in "\n".join(terms.describe())
        server.site.approvals.approve(server.site.offer(terms, 0))  # even then
        assert "code of its own" in server.offered(text), place
    assert taken > (0 if isinstance(form, list) else 5)
    assert MODULE not in sys.modules
    assert not evil.exists()


@pytest.mark.parametrize("key", ["clip", "mechanism"])
def test_no_name_in_the_privacy_of_an_offer_is_imported(key, tmp_path, evil):
    server = Dishonest(tmp_path, more='privacy = { unit = "example", noise = 1.0 }\n')
    text = with_value(server.terms, ("experiment", "privacy", key), EVIL)
    assert "cannot be taken" in server.offered(text)
    assert MODULE not in sys.modules
    assert not evil.exists()


def test_a_name_that_the_policy_allows_is_imported_then(tmp_path, evil):
    server = Dishonest(tmp_path)
    text = with_value(server.terms, ("experiment", "loss"), EVIL)
    assert "not approved" in server.offered(text)
    status, said, error = approve(server, Terms(text).hash[:8])
    assert (status, evil.exists()) == (1, False)
    assert f"code of its own: {EVIL}" in said
    assert "own_code" in error
    (server.site.home / FILE).write_text(f'own_code = ["{EVIL}"]\n')
    approve(server, Terms(text).hash[:8])
    assert evil.exists()


@pytest.mark.parametrize(
    ("key", "value"), [("lr", {"name": "os:abort", "x": 1}), ("anneal", "os:abort")]
)
def test_a_process_that_approves_calls_nothing_that_the_server_named(key, value, tmp_path):
    server = Dishonest(tmp_path)
    text = with_value(server.terms, ("experiment", "local", key), value)
    assert "not approved" in server.offered(text)
    done = process_that_approves(server.site.home)
    assert done.returncode == 2
    assert "all of it:" in done.stdout
    assert "own_code" in done.stderr
    assert not server.site.approvals.approved()[1:]


def test_keys_that_no_site_needs_are_refused(tmp_path):
    server = Dishonest(tmp_path)
    image = tmp_path / "secret.safetensors"
    image.touch()
    wrong = [
        ("experiment", "weights"),
        ("experiment", "evaluate"),
        ("experiment", "attack"),
        ("experiment", "dataset"),
        ("experiment", "x"),
        ("experiment", "clients", "devices"),
        ("experiment", "clients", "partition"),
        ("experiment", "local", "x"),
        ("experiment", "server", "x"),
        ("experiment", "augment", "x"),
        ("data", "x"),
        ("x",),
    ]
    for place in wrong:
        refused = server.offered(with_value(server.terms, place, str(image)))
        assert "unknown key" in refused, place
        assert str(place[-1]) in refused
    assert not server.site.approvals.offers()


def test_an_option_that_is_left_out_is_not_used_in_silence(tmp_path):
    server = Dishonest(tmp_path, algorithm='{ name = "fedprox", mu = 0.5 }')
    for place in (("loss",), ("local", "lr"), ("clients", "holdout"), ("augment", "crop")):

        def leave_out(content, place=place):
            table = content["experiment"]
            for part in place[:-1]:
                table = table[part]
            del table[place[-1]]

        assert "lack" in server.offered(changed(server.terms, leave_out)), place
    text = with_value(server.terms, ("experiment", "algorithm"), [{"name": "fedprox"}])
    assert "not approved" in server.offered(text)
    assert "lack" in approve(server)[2]


CANDIDATES = (
    *(
        1,
        2,
        7,
        0.25,
        0.5,
        True,
        False,
        None,
        EVIL,
        {"name": EVIL, "x": 1},
        [{"name": EVIL}],
        {"rank": 3},
    ),
    *(
        "glorot",
        "processes",
        "sequential",
        "fp64",
        "group",
        "weights",
        "crop",
        [3, 4, 4],
        ["a", "b"],
        [0.25] * 3,
    ),
)


def test_the_text_to_approve_shows_every_key(tmp_path):
    """Whatever key of the schema has another value, the text is another, besides the hash."""
    terms = Dishonest(tmp_path).terms
    sections = {"local": LocalTraining, "server": Server, "augment": Augment}
    keys: list[tuple[str, ...]] = [
        ("experiment", key) for key in TOLD if key not in (*sections, "clients")
    ]
    keys += [("experiment", "clients", key) for key in TOLD_OF_CLIENTS]
    for name, section in sections.items():
        keys += [("experiment", name, f.name) for f in fields(section)]
    keys += [("data", f.name) for f in fields(Images)]
    for place in keys:
        seen = 0
        for value in CANDIDATES:
            try:
                other = Terms(with_value(terms, place, value))
            except ValueError:
                continue
            if other.hash != terms.hash and other.content != terms.content:
                seen += 1
                assert other.describe()[1:] != terms.describe()[1:], (place, value)
        assert seen, f"no other value of {place} was tried"


def test_the_text_to_approve_cannot_write_to_the_terminal(tmp_path):
    server = Dishonest(tmp_path)
    names = ["cat", "\x1b[2J\x1b[31mdog", "\x9b2J", "x\nleaves the site: nothing", "\u202egod"]
    text = with_value(server.terms, ("data", "classes"), names)
    assert "not approved" in server.offered(text)
    lines = Terms(text).describe()
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("leaves") for line in lines)
    said = approve(server)[1]
    assert "\x1b" not in said
    assert "\x9b" not in said


def test_malformed_offers_are_not_kept_and_block_no_other(tmp_path, caplog):
    server = Dishonest(tmp_path)
    deep = "[" * 100_000 + "]" * 100_000
    malformed = ["", "{}", "[]", "nonsense", deep, server.terms.text + " ", "x" * 2_000_000]
    malformed += [server.terms.text.replace('"rounds": 2', '"rounds": NaN')]
    malformed += [server.terms.text.replace('"rounds": 2', '"rounds": 2, "rounds": 2')]
    malformed += [with_value(server.terms, ("experiment", "algorithm"), "fedavg")]
    malformed += [with_value(server.terms, ("data", "shape"), [3, 0, 8])]
    malformed += [with_value(server.terms, ("data", "classes"), [7])]
    for text in malformed:
        assert server.offered(text).startswith("its terms cannot be taken"), text[:80]
    assert not server.site.approvals.offers()
    good = with_value(server.terms, ("experiment", "seed"), 7)
    assert "not approved" in server.offered(good)
    (server.site.home / "offered" / "damaged.json").write_bytes(b"\xff{")
    status, said, _ = approve(server)
    assert (status, "approved " in said) == (0, True)
    assert "damaged.json is left out" in caplog.text


def test_only_some_offers_are_kept(tmp_path):
    server = Dishonest(tmp_path)
    texts = [with_value(server.terms, ("experiment", "seed"), seed) for seed in range(1, 31)]
    assert all("not approved" in server.offered(text) for text in texts)
    assert len([*(server.site.home / "offered").iterdir()]) == MOST_OFFERS
    assert server.site.approvals.offers()[0].text == texts[-1]


def test_one_key_brings_no_more_updates_than_were_approved(tmp_path):
    server = Dishonest(tmp_path, rounds=3)
    refused = [server.refused("train", model_to_train(number)) for number in range(40)]
    assert [bool(why) for why in refused] == [False] * 3 + [True] * 37
    assert "more than the 3 updates approved" in refused[-1]


def test_every_key_of_an_order_counts(tmp_path):
    server = Dishonest(tmp_path, rounds=3)
    assert "more than the 3 updates" in server.refused(
        "train", model_to_train(0), keys=[*range(201)]
    )
    assert not server.refused("train", model_to_train(0), keys=[1, 2])
    assert "more than the 3 updates" in server.refused("train", model_to_train(1), keys=[1, 2])
    for wrong in ([], None, "1", [1.0], [2**64], [True]):
        assert "no valid keys" in server.refused("train", model_to_train(0), keys=wrong)


def test_the_same_order_is_free_and_gets_the_same_answer(tmp_path):
    """An order that differs in anything that an update depends on is another one."""
    server = Dishonest(tmp_path, algorithm='{ name = "scaffold" }', rounds=4)
    model = model_to_train(0) | {
        name.replace("params/", "told/control/"): torch.zeros_like(t)
        for name, t in model_to_train(0).items()
    }
    first = server.ask("train", model)
    assert "refused" not in first.facts
    for _ in range(6):
        again = server.ask("train", model)
        assert {**again.facts, "log": ""} == {**first.facts, "log": ""}
        assert all(torch.equal(again.tensors[name], t) for name, t in first.tensors.items())
    others: list[dict[str, Any]] = [{"round": 1}, {"keys": [2], "counted": 1}, {"keys": [2]}]
    answered = [not server.refused("train", model, **other) for other in others]
    assert sum(answered) == 3
    assert "more than the 4 updates" in server.refused("train", model, round=2)


def test_orders_at_the_same_time_are_counted_one_after_the_other(tmp_path):
    server = Dishonest(tmp_path)
    size = server.size()
    before = server.site.approvals.of(server.terms.hash)
    with one_writer(server.site.home / "approved"):  # as another order that is counted now
        assert server.refused("train", model_to_train(0), size=size, experiment=server.terms.hash)
    assert server.site.approvals.of(server.terms.hash) == before


def test_label_counts_are_not_found_by_tests_on_held_out_examples(tmp_path):
    server = Dishonest(tmp_path, holdout=0.5)
    assert "label_counts" in server.refused("sizes")
    for always in range(4):
        arrived = server.ask("test", model_to_test(always=always), size=15)
        assert "label_counts" in arrived.facts["refused"]
        assert "correct" not in arrived.facts


def test_no_more_models_are_tested_than_the_rounds_have(tmp_path):
    server = Dishonest(tmp_path, TESTED, rounds=2, holdout=0.2)
    for number in (0, 1, 0, 2, 0):
        assert server.ask("test", model_to_test(number)).facts["held_out"]
    assert "more than the 3 models approved" in server.refused("test", model_to_test(3))
    assert not server.refused("test", model_to_test(0)), "the same one may come again"
    other = {"model/fc.weight": torch.zeros(5, 192), "model/fc.bias": torch.zeros(5)}
    assert "another form" in server.refused("test", other)


@pytest.mark.parametrize("what", ["test", "train"])
def test_a_site_stays_the_client_that_it_was(what, tmp_path):
    """Another client number would hold out, and so test, other examples."""
    server = Dishonest(tmp_path, TESTED, rounds=60, holdout=0.2)
    model = model_to_test() if what == "test" else model_to_train(0)
    for asked in (False, True):  # before the first answer, and after it
        for client in range(1, 50):
            assert "approved as client 0" in server.refused(what, model, client=client, size=20)
            assert "approved as client 0" in server.refused("sizes", client=client)
        assert asked or not server.refused(what, model)
    for wrong in (-1, None, "0", 2**70):
        assert "no client" in server.refused("sizes", client=wrong)


def test_an_offer_that_changes_while_it_is_read_is_not_the_one_approved(tmp_path, monkeypatch):
    server = Dishonest(tmp_path)
    text = with_value(server.terms, ("experiment", "seed"), 7)
    order: dict[str, Any] = {"terms": text, "experiment": Terms(text).hash}
    assert "not approved" in server.refused("sizes", **order, client=1)

    def read_slowly(*_: object, **__: object) -> bool:
        assert "not approved" in server.refused("sizes", **order, client=2)
        return True

    monkeypatch.setattr("typer.confirm", read_slowly)
    status, said, _ = approve(server)
    assert (status, "client 1," in said) == (0, True)
    assert not server.refused("sizes", **order, client=1)
    assert "approved as client 1" in server.refused("sizes", **order, client=2)


def test_the_examples_are_fixed_by_the_approval_before_any_answer(tmp_path):
    server = Dishonest(tmp_path)
    with np.load(server.site.data) as held:
        np.savez(server.site.data, **{name: array[::-1] for name, array in held.items()})
    for what in ("sizes", "train", "test"):
        assert "when it was approved" in server.refused(what, model_to_train(0), size=1)


def test_few_examples_are_not_tested(tmp_path):
    server = Dishonest(tmp_path, "label_counts = true\n", holdout=0.1)
    assert "least_held_out" in server.refused("sizes")
    assert "least_held_out" in server.refused("test", model_to_test(), size=1)


def test_a_size_that_is_left_out_does_not_hide_that_the_examples_are_others(tmp_path):
    server = Dishonest(tmp_path)
    size = server.size()
    assert not server.refused("train", model_to_train(0))
    assert "number of its examples" in server.refused("train", model_to_train(0), size=None)
    with np.load(server.site.data) as held:
        np.savez(server.site.data, **{name: array[::-1] for name, array in held.items()})
    for what in ("train", "sizes"):
        assert "when it was approved" in server.refused(what, model_to_train(0), size=size)
    assert approve(server)[0] == 0
    assert not server.refused("train", model_to_train(0)), "approved again, for another run"


def test_an_approval_says_who_and_when(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "doctor")
    server = Dishonest(tmp_path)
    status, said, _ = approve(server, server.terms.hash[:12], "--yes")
    approval = Approvals(server.site.home).of(server.terms.hash)
    assert status == 0
    assert f"by doctor at {approval.at}" in said
    assert time.strptime(approval.at, "%Y-%m-%d %H:%M:%S %z")


def test_yes_without_digits_prints_the_command(tmp_path):
    server = Dishonest(tmp_path)
    server.offered(with_value(server.terms, ("experiment", "seed"), 7))
    error = approve(server, "--yes")[2]
    wanted = server.site.approvals.offers()[0].terms.hash[:12]
    assert f"`fedlens fleet approve {server.site.home} {wanted}`" in error
    assert approve(server, wanted, "--yes")[0] == 0
