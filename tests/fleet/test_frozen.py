"""Layers that are loaded and not trained: sites get them once, and then the rest alone."""

import pytest
import torch

import fedlens as fl
from fedlens.fleet.site_data import num_examples
from fedlens.fleet.terms import for_fleet
from fedlens.storage.run_files import read_records
from tests.fleet.sites import (
    Nearby,
    make_sites,
    model_bytes,
    run_nearby,
    terms_of,
    write_experiment,
)

MODEL = '{ name = "tests.fleet.wide:model", hidden = 30 }'
POLICY = 'own_code = ["tests.fleet.wide:model"]\n'
HEAD = 30 * 4 + 4


@pytest.fixture
def pretrained(tmp_path):
    """An experiment that trains the head of a model that another run has made."""
    path = write_experiment(tmp_path, rounds=1)
    path.write_text(path.read_text().replace('"linear"', MODEL))
    fl.run(fl.Experiment.read(path), tmp_path / "before")
    path = write_experiment(tmp_path, rounds=3)
    more = f'weights = "{tmp_path / "before"}"\ntrain = 1\nseed = 5\n'
    path.write_text(more + path.read_text().replace('"linear"', MODEL))
    sites = make_sites(path, tmp_path / "sites")
    for site in sites:
        (site.home / "policy.toml").write_text(POLICY)
    return path, sites


def test_the_body_comes_once_and_then_the_head_alone(pretrained, tmp_path):
    path, sites = pretrained
    nearby = list[Nearby]()
    run_nearby(path, tmp_path / "fleet", sites, nearby=nearby)
    fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
    assert model_bytes(tmp_path / "fleet") == model_bytes(tmp_path / "here")
    asked, trained = nearby
    sizes = [sum(t.nbytes for t in tensors.values()) for _, _, tensors in asked.sent]
    assert sorted(sizes) == [0] * 4 + [4 * (192 * 30 + 30)] * 4
    assert {sum(t.nbytes for t in one.values()) for _, _, one in trained.sent} == {4 * HEAD}
    for record in read_records(tmp_path / "fleet"):
        assert record["bytes_up"] == record["bytes_down"] == 3 * 4 * HEAD
    # Another run of the same experiment sends them no more.
    for site in sites:
        approvals = site.approvals
        (approved,) = approvals.approved()
        approvals.approve(approvals.of(approved).offer)
    run_nearby(path, tmp_path / "again", sites, nearby=nearby)
    assert not any(tensors for _, _, tensors in nearby[2].sent)
    assert model_bytes(tmp_path / "again") == model_bytes(tmp_path / "here")


def test_other_layers_than_were_approved_are_refused(pretrained):
    path, sites = pretrained
    terms = terms_of(for_fleet(fl.Experiment.read(path)), [site.home for site in sites])
    assert any("layers that stay as they are" in line for line in terms.describe())
    (site, *_), given = sites, {"1.weight": torch.ones(30, 192), "1.bias": torch.ones(30)}
    order = {"experiment": terms.hash, "terms": terms.text, "client": 0}
    assert site.answer("sizes", order, {}).facts["lacks"] == "layers"
    refused = site.answer("sizes", order, given).facts["refused"]
    assert refused == "the layers that were sent are not those that were approved"
    size = num_examples(site.data)
    train = {"experiment": terms.hash, "client": 0, "size": size, "round": 0, "keys": [1]}
    refused = site.answer("train", train, {}).facts["refused"]
    assert refused == "it has lost the layers that stay as they are: begin another run"
