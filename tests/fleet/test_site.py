"""What a site lets out, and what it refuses."""

import errno
import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.config.experiment import Experiment
from fedlens.fleet import payload
from fedlens.fleet import terms as terms_of_sites
from fedlens.fleet.join import answer_by
from fedlens.fleet.log import LOG
from fedlens.fleet.policy import FILE
from fedlens.fleet.site import OWN_MISTAKE, Site
from fedlens.fleet.site_data import site_examples
from fedlens.fleet.terms import Terms, check_possible, for_fleet
from fedlens.setup.data import load_dataset
from fedlens.version import __version__
from tests.fleet.sites import CLASSES, Nearby, make_sites, run_nearby, write_experiment


def one_site(tmp_path, algorithm='{ name = "fedavg" }', approved=True, **options):
    path = write_experiment(tmp_path, algorithm, **options)
    site = make_sites(path, tmp_path / "sites", approved)[0]
    experiment = for_fleet(Experiment.read(path))
    return path, site, Terms.of(experiment, load_dataset(experiment.dataset, None))


def told(line, site):
    """What the site prints of a line of its log."""
    said = answer_by(line, site.home)
    assert said is not None
    return said


def sizes(site, terms):
    order = {"experiment": terms.hash, "terms": terms.text, "client": 0}
    return site.answer("sizes", order, {}).facts


def test_nothing_but_the_declared_payload_leaves_a_site(tmp_path):
    path = write_experiment(tmp_path, '{ name = "scaffold" }', holdout=0.2)
    made: list[Nearby] = []
    run_nearby(path, tmp_path / "run", make_sites(path, tmp_path / "sites"), nearby=made)
    allowed = {
        "sizes": {"experiment", "log", "size", "held_out", "versions"},
        "train": {"experiment", "log", "keys", "kept"},
        "test": {"experiment", "log", "correct", "held_out"},
        "keep": {"experiment", "log"},
    }
    replies = [reply for one in made for reply in one.replies]
    assert {what for _, what, _ in replies} == {*allowed}
    for _, what, arrived in replies:
        assert arrived.facts.keys() == allowed[what]
        names = {name.partition("/")[2] for name in arrived.tensors}
        names = {name.removesuffix("/model").removesuffix("/numbers") for name in names}
        sent = {"update/fc.weight", "update/fc.bias", "scalars/loss"}
        sent |= {"extra/control/fc.weight", "extra/control/fc.bias"}
        assert names == (sent if what == "train" else set())


def test_label_counts_are_told_only_where_the_policy_allows_it(tmp_path):
    _, site, terms = one_site(tmp_path, '{ name = "fedns" }')
    assert "label counts" in sizes(site, terms)["refused"]
    (site.home / FILE).write_text("label_counts = true\n")
    told = sizes(site, terms)
    assert sum(told["label_counts"]) == told["size"]


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ('algorithms = ["scaffold"]', "does not allow fedavg"),
        ("most_rounds = 1", "allows 1 rounds, not 2"),
        ("unknown = 1", OWN_MISTAKE),
    ],
)
def test_a_policy_is_kept_to(policy, why, tmp_path):
    _, site, terms = one_site(tmp_path)
    (site.home / FILE).write_text(policy + "\n")
    assert why in sizes(site, terms)["refused"]


def test_terms_of_another_version_are_refused(tmp_path, monkeypatch):
    _, site, terms = one_site(tmp_path)
    monkeypatch.setattr(terms_of_sites, "__version__", "9.9")
    refused = sizes(site, terms)["refused"]
    assert refused.endswith(f"for Fedlens {__version__}, and this is 9.9: install the same")


def test_an_experiment_is_refused_until_it_is_approved(tmp_path):
    _, site, terms = one_site(tmp_path, approved=False)
    assert "not approved" in sizes(site, terms)["refused"]
    assert [offer.terms.hash for offer in site.approvals.offers()] == [terms.hash]
    site.approvals.approve(site.approvals.offers()[0])
    assert sizes(site, terms)["size"] > 0
    assert site.approvals.offers() == []


def test_terms_of_another_hash_are_refused(tmp_path):
    _, site, terms = one_site(tmp_path)
    order = {"experiment": terms.hash, "terms": terms.text + " ", "client": 0}
    assert "cannot be taken" in site.answer("sizes", order, {}).facts["refused"]
    order = {"experiment": "0" * 64, "terms": terms.text, "client": 0}
    assert "not those of the hash" in site.answer("sizes", order, {}).facts["refused"]
    order = {"experiment": "../../etc/passwd", "client": 0, "keys": [1]}
    assert "not approved" in site.answer("train", order, {}).facts["refused"]


@pytest.mark.parametrize(
    ("key", "own"),
    [
        ("model", "fedlens.models.small:linear"),
        ("loss", "fedlens.algorithm.pieces:cross_entropy"),
        ("local.optimizer", "fedlens.algorithm.pieces.optimizers:adam"),
    ],
)
def test_code_of_its_own_is_refused_unless_the_policy_names_it(tmp_path, key, own):
    path, site, _ = one_site(tmp_path)
    experiment = for_fleet(Experiment.read(path, [f"{key}={own}"]))
    terms = Terms.of(experiment, load_dataset(experiment.dataset, None))
    site.approvals.approve(site.offer(terms, 0))
    assert "code of its own" in sizes(site, terms)["refused"]
    (site.home / FILE).write_text(f'own_code = ["{own}"]\n')
    assert sizes(site, terms)["size"] > 0


def test_a_schedule_of_its_own_is_code_of_its_own(tmp_path):
    own = "fedlens.config.schedules:cosine"
    mu = f'{{ name = "warm-up", rounds = 1, then = {{ name = "{own}", start = 0.1 }} }}'
    _, site, terms = one_site(tmp_path, f'{{ name = "fedprox", mu = {mu} }}')
    assert terms.own_code == [own]
    assert "code of its own" in sizes(site, terms)["refused"]


def test_sites_know_how_often_they_may_be_drawn_at_most(tmp_path):
    path, _, terms = one_site(tmp_path, '{ name = "fedvc", size = 16 }')
    assert terms.most_updates == 2 * 3  # rounds, clients of each
    share = for_fleet(Experiment.read(path, ["clients.per_round=0.5"]))
    with pytest.raises(ValueError, match="several times"):
        check_possible(share)


def test_a_round_that_was_not_approved_is_refused(tmp_path):
    _, site, terms = one_site(tmp_path)
    size = sizes(site, terms)["size"]
    order = {"experiment": terms.hash, "client": 0, "size": size, "counted": None, "keys": [1]}
    for wrong in (2, -1, None, "0"):
        refused = site.answer("train", {**order, "round": wrong}, {}).facts["refused"]
        assert refused == f"it was asked for round {wrong!r} of 2"


def test_an_update_that_is_too_long_does_not_leave(tmp_path):
    path = write_experiment(tmp_path, rounds=1, per_round=4)
    sites = make_sites(path, tmp_path / "sites")
    (sites[2].home / FILE).write_text("largest_norm = 1e-6\n")
    told, made = list[str](), list[Nearby]()
    run_nearby(path, tmp_path / "run", sites, told=told, nearby=made)
    assert any(line.startswith("cat: refused: its policy holds back") for line in told)
    sent = [a for one in made for name, what, a in one.replies if (name, what) == ("cat", "train")]
    assert all(not arrived.tensors for arrived in sent)


def test_a_model_of_another_form_is_refused(tmp_path):
    _, site, terms = one_site(tmp_path)
    order = {"experiment": terms.hash, "client": 0, "counted": None, "keys": [1], "round": 0}
    order["size"] = sizes(site, terms)["size"]
    model = {"params/fc.weight": torch.zeros(1, 4, 191), "params/fc.bias": torch.zeros(1, 4)}
    assert "another form" in site.answer("train", order, model).facts["refused"]


def test_a_site_says_what_was_asked_and_what_was_sent(tmp_path):
    _, site, terms = one_site(tmp_path)
    sizes(site, terms)
    line = (site.home / LOG).read_text().splitlines()[-1]
    assert json.loads(line)["asked"] == "sizes"


def test_images_in_class_folders_get_the_labels_of_the_experiment(tmp_path):
    _, site, terms = one_site(tmp_path)
    for name in ("yak", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(3):
            pixels = np.full((8, 8, 3), number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    own = Site(site.home, tmp_path / "images")
    own.approvals.approve(own.offer(terms, 0))
    assert sizes(own, terms)["size"] == 6
    held = site_examples(tmp_path / "images", terms, site.home / "cache")
    assert sorted(held.labels.tolist()) == [1, 1, 1, 3, 3, 3]
    (tmp_path / "images" / "emu").mkdir()
    Image.fromarray(pixels).save(tmp_path / "images" / "emu" / "0.png")
    assert "when it was approved" in sizes(own, terms)["refused"]
    own.approvals.approve(own.offer(terms, 0))
    assert sizes(own, terms)["refused"] == OWN_MISTAKE  # what its classes are called stays here
    last = (site.home / LOG).read_text().splitlines()[-1]
    assert "'emu', which the experiment does not have" in told(last, site)


def fails_to_read(monkeypatch):
    """Let the disk of a site fail while its examples are read."""

    def read(data, *_):
        raise OSError(errno.EIO, "Input/output error", str(data))

    monkeypatch.setattr("fedlens.fleet.site.site_examples", read)


def test_what_went_wrong_is_told_at_the_site_alone(tmp_path, monkeypatch):
    _, site, terms = one_site(tmp_path)
    fails_to_read(monkeypatch)
    with pytest.raises(RuntimeError) as raised:
        sizes(site, terms)
    assert str(raised.value) == "OSError: its log says why"
    last = (site.home / LOG).read_text().splitlines()[-1]
    assert told(last, site).startswith("failed: OSError: ")
    assert str(site.home) not in last
    assert str(site.home) in told(last, site)


def test_terms_say_in_words_what_is_asked(tmp_path):
    _, _, terms = one_site(tmp_path, '{ name = "fedns" }')
    text = "\n".join([*terms.describe(), *terms.effects()])
    assert terms.hash in text
    assert "how many examples it holds of each class" in text
    assert all(name in text for name in CLASSES)


@pytest.mark.parametrize(
    ("paper", "says"), [("fedavg", False), ("scaffold", True), ("fedbn", True)]
)
def test_terms_say_whether_a_site_remembers_anything(paper, says, tmp_path):
    _, _, terms = one_site(tmp_path, f'{{ name = "{paper}" }}')
    (line,) = (line for line in terms.effects() if line.startswith("stays at the site"))
    assert ("what it remembers" in line) == says


@pytest.mark.parametrize(
    ("paper", "leaves", "stays"),
    [
        ("fedavg", "updates of the model,", ""),
        ("ditto", "updates of the model,", "the layers or the model that are its own"),
        ("fedper", "updates of the layers that are not its own", "the layers or the model that"),
        ("local-only", "empty updates", "the layers or the model that are its own"),
        ("fedproto", "prototypes", "the layers or the model that are its own"),
    ],
)
def test_terms_say_what_leaves_a_site_and_what_of_the_model_never_does(
    paper, leaves, stays, tmp_path
):
    _, _, terms = one_site(tmp_path, f'{{ name = "{paper}" }}')
    sent, kept = terms.effects()[-2:]
    assert leaves in sent and stays in kept
    assert ("its own" in kept) == bool(stays)
    assert ("how many examples it holds of each class" in sent) == (paper == "fedproto")


def test_tensors_travel_bit_by_bit():
    pytest.importorskip("flwr")
    from fedlens.fleet.messages import packed, unpacked

    bits = torch.randint(0, 2**31, (257,), dtype=torch.int32)
    tensors = {
        "z/a": bits.view(torch.float32),
        "a/z": torch.tensor(-0.0, dtype=torch.float64),
        "m": torch.arange(6).view(2, 3),
    }
    facts, back, *_ = payload.read(*unpacked(packed(*payload.written({"n": 1}, tensors))))
    assert facts == {"n": 1}
    assert list(back) == list(tensors)
    for name, t in tensors.items():
        assert back[name].dtype == t.dtype
        assert back[name].numpy().tobytes() == t.numpy().tobytes()
    assert payload.mismatch(back, tensors) is None
