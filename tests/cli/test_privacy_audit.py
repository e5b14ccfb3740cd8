"""`fedlens privacy audit`: its page, its numbers, and its refusals."""

import json

import pytest

from tests.command_line import EXPERIMENT, forget_modules_of, only_line

DIGITS = """
import torch
import fedlens as fl

def digits(folder):
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (90, 3, 16, 16), generator=draw, dtype=torch.uint8)
    some = fl.Examples(images, torch.arange(90) % 3)
    return fl.Dataset("digits", some, some, ("0", "1", "2"))
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr("fedlens.audit.reconstruction.STEPS", 20)
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    return path


def test_an_audit_has_a_page_and_numbers(fedlens, file, tmp_path):
    out = tmp_path / "audit"
    done = fedlens("privacy", "audit", file, "--shadows", 4, "--out", out, "--json", "-q")
    assert (done.status, done.err) == (0, "")
    found = json.loads(done.out)
    assert found["membership"]["shadows"] == 4
    assert 0.4 < found["membership"]["area"] < 0.6
    own, changed = (
        [one for one in found["reconstruction"] if (one["training"] is None) == own]
        for own in (True, False)
    )
    assert [one["examples"] for one in own] == [1, 4]
    for key in ("examples", "steps", "clip", "noise"):
        assert len({one["training"][key] for one in changed}) > 2
    page = (out / "report.html").read_text()
    for words in (
        "Members found against false alarms",
        "By client",
        "What hides images",
        "does not mean that there is",
    ):
        assert words in page
    assert "without [privacy]" not in page
    again = fedlens("privacy", "audit", file, "--shadows", 4, "--out", out)
    assert again.status == 2
    assert only_line(again.err, "--overwrite")


def test_a_claim_stands_beside_what_was_measured(fedlens, file, tmp_path):
    file.write_text(file.read_text() + "[privacy]\nepsilon = 4.0\ndelta = 1e-3\n")
    words = ("--shadows", 4, "--out", tmp_path / "audit", "-q")
    done = fedlens("privacy", "audit", file, *words)
    assert (done.status, done.err) == (0, "")
    assert "claim       ε of one client: claimed 4.00, measured at least 0.00" in done.out
    assert "without     [privacy]:" in done.out
    page = (tmp_path / "audit" / "report.html").read_text()
    for expected in (
        "Does the claim hold?",
        "the same without [privacy]",
        "hides no upload from it",
    ):
        assert expected in page


def test_the_claim_for_an_example_is_measured_by_canaries_among_them(fedlens, file, tmp_path):
    more = '[privacy]\nunit = "example"\nepsilon = 4.0\ndelta = 1e-3\nledger = "ledger.jsonl"\n'
    file.write_text(file.read_text() + more)
    words = ("--shadows", 4, "--out", tmp_path / "audit", "-q")
    done = fedlens("privacy", "audit", file, *words)
    assert (done.status, done.err) == (0, "")
    assert "claim       ε of one example: claimed" in done.out
    assert "longer than the clip" in (tmp_path / "audit" / "report.html").read_text()
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [("algorithm=local-only", "last layer is not trained"), ("model=resnet18", "batch norm")],
)
def test_without_an_upload_to_attack_the_other_attacks_are_made(
    fedlens, tmp_path, monkeypatch, change, why
):
    monkeypatch.chdir(tmp_path)
    small = ("rounds=1", "dataset=digits:digits", "clients.count=2", "clients.per_round=1")
    words = (*small, change, "--shadows", 4, "--out", "audit", "-q")
    (tmp_path / "digits.py").write_text(DIGITS)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    done = fedlens("privacy", "audit", "experiment.toml", *words)
    assert done.status == 0
    assert only_line(done.err, why)
    assert "members" in done.out and "images" not in done.out
    forget_modules_of(tmp_path)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--shadows", 3], "4 or more"),
        (["--client", 70], "client is 70"),
        (["clients.count=0"], "count"),
        (["privacy.noise=1.0", "privacy.noise_cohort=10", "privacy.delta=1e-3"], "noise_cohort"),
        (["rounds=0"], "rounds"),
    ],
)
def test_mistakes_are_told_before_anything_trains(fedlens, file, tmp_path, words, why):
    done = fedlens("privacy", "audit", file, *words, "--out", tmp_path / "a", "-q")
    assert done.status == 2
    assert only_line(done.err, why)
    assert not (tmp_path / "a").exists()
