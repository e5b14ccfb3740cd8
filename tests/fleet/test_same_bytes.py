"""A fleet ends with the bytes of the simulation, whatever the algorithm."""

import json

import pytest

import fedlens as fl
from fedlens.algorithms import ALGORITHMS
from fedlens.fleet.policy import FILE
from fedlens.fleet.terms import for_fleet
from fedlens.storage.run_files import read_records
from tests.fleet import normed
from tests.fleet.sites import TESTED, Nearby, make_sites, model_bytes, run_nearby, write_experiment

OPTIONS = {  # where the defaults are for more clients or larger ones
    "fedvc": ", size = 16",
    "trimmed-mean": ", share = 0.34",
    "krum": ", byzantine = 0",
    "bulyan": ", byzantine = 0",
    "clip": ", norm = 0.5",
}
ASYNCHRONOUS = {"fedbuff", "fedasync"}  # which a fleet refuses
PAPERS = {
    **{
        name: f'{{ name = "{name}"{OPTIONS.get(name, "")} }}'
        for name in ALGORITHMS
        if name not in ASYNCHRONOUS
    },
    "fedprox, scheduled": '{ name = "fedprox", mu = { name = "cosine", start = 0.5 } }',
    "clip, quantize x scaffold": '{ name = "scaffold" }, { name = "clip", norm = 0.5 }, '
    '{ name = "quantize", bits = 8 }',
}


BYTES = ("bytes_up", "bytes_down")
KEEPS = {"fedper", "fedrep", "fedbabu", "lg-fedavg", "local-only", "fedproto"}  # layers
ADAM = 'batch_size = 8, lr = 0.01, optimizer = "adam", clip = 1.0, reset = false'


@pytest.mark.parametrize("paper", [*sorted(PAPERS.keys() - KEEPS), "adam, kept"])
def test_a_fleet_ends_with_the_bytes_of_the_simulation(paper, tmp_path):
    path = write_experiment(tmp_path, PAPERS.get(paper, PAPERS["fedavg"]))
    if paper == "adam, kept":
        path.write_text(path.read_text().replace("batch_size = 8, lr = 0.1", ADAM))
    sites = make_sites(path, tmp_path / "sites")
    for site in sites:
        (site.home / FILE).write_text(TESTED)
    nearby: list[Nearby] = []
    run_nearby(path, tmp_path / "fleet", sites, nearby=nearby)
    fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
    assert model_bytes(tmp_path / "fleet") == model_bytes(tmp_path / "here")
    fleet, here = (read_records(tmp_path / name) for name in ("fleet", "here"))
    for one, other in zip(fleet, here, strict=True):
        for name in ("train_loss", "clients", "test_accuracy", "examples", "batches", *BYTES):
            assert one[name] == other[name], name
    sent = [
        tensor
        for one in nearby
        for _, what, reply in one.replies
        for name, tensor in reply.tensors.items()
        if what == "train" and name.split("/")[1] in ("update", "counters", "extra")
    ]
    counted = sum(record["bytes_up"] for record in fleet)
    # A number alone, such as q-FedAvg's h, may take 8 bytes.
    assert abs(sum(t.nbytes for t in sent) - counted) <= 8 * sum(t.numel() == 1 for t in sent)


@pytest.mark.parametrize(
    ("paper", "norm"),
    [
        ("scaffold", "local"),
        *((name, "shared") for name in ("fedbn", "fedper", "ditto", "apfl", "fedala")),
    ],
)
def test_a_site_goes_on_with_layers_of_its_own(paper, norm, tmp_path):
    """And tests the model with them."""
    path = write_experiment(tmp_path, PAPERS[paper], holdout=0.3, model=normed.NAME, norm=norm)
    sites = make_sites(path, tmp_path / "sites")
    for site in sites:
        (site.home / FILE).write_text(f'{TESTED}own_code = ["{normed.NAME}"]\n')
    run_nearby(path, tmp_path / "fleet", sites)
    fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
    assert model_bytes(tmp_path / "fleet") == model_bytes(tmp_path / "here")
    fleet, here = (
        json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("fleet", "here")
    )
    assert fleet["client_accuracy"] == here["client_accuracy"]
