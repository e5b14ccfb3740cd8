"""A head, or few numbers beside each layer: in a fleet, with privacy, and on Ray."""

from dataclasses import replace

import pytest
import torch

import fedlens as fl
from fedlens.fleet.terms import for_fleet
from fedlens.storage.run_files import read_records
from tests.fleet.sites import make_sites, model_bytes, run_nearby, write_experiment

MODEL = '{ name = "tests.fleet.wide:model", hidden = 30 }'
POLICY = 'own_code = ["tests.fleet.wide:model"]\n'
FEW = {
    "head": ('train = "head"\n', 30 * 4 + 4),
    "lora": ("lora = { rank = 2 }\n", 2 * (192 + 30) + 30 * 4 + 4),
}
PRIVATE = '[privacy]\nunit = "example"\nclip = 1.0\nnoise = 0.5\ndelta = 1e-3\n'


@pytest.fixture
def described(tmp_path):
    """Writes an experiment that starts from the model of another run."""
    path = write_experiment(tmp_path, rounds=1)
    path.write_text(path.read_text().replace('"linear"', MODEL))
    fl.run(fl.Experiment.read(path), tmp_path / "before")

    def write(few, more=""):
        path = write_experiment(tmp_path, rounds=2, more=more)
        begins = f'weights = "{tmp_path / "before"}"\nseed = 5\n{FEW[few][0]}'
        path.write_text(begins + path.read_text().replace('"linear"', MODEL))
        return path

    return write


def sites_of(path, folder):
    sites = make_sites(path, folder)
    for site in sites:
        (site.home / "policy.toml").write_text(POLICY)
    return sites


@pytest.mark.parametrize("few", FEW)
def test_in_a_fleet_it_ends_as_simulated_and_little_is_sent(few, described, tmp_path):
    path = described(few)
    run_nearby(path, tmp_path / "fleet", sites_of(path, tmp_path / "sites"))
    fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
    assert model_bytes(tmp_path / "fleet") == model_bytes(tmp_path / "here")
    for record in read_records(tmp_path / "fleet"):
        assert record["bytes_up"] == record["bytes_down"] == 3 * 4 * FEW[few][1]


@pytest.mark.parametrize("few", FEW)
@pytest.mark.parametrize("where", ["fleet", "simulation"])
def test_with_privacy_of_examples_it_learns_and_the_rest_stays(few, where, described, tmp_path):
    path = described(few, PRIVATE)
    if where == "fleet":
        result = run_nearby(path, tmp_path / "run", sites_of(path, tmp_path / "sites"))
    else:
        result = fl.run(fl.Experiment.read(path), tmp_path / "run")
    assert result.status == "finished" and "epsilon" in str(result.summary)
    before = fl.load(tmp_path / "before").module.state_dict()
    changed = {n for n, t in result.model.items() if not torch.equal(t, before[n])}
    assert changed == {"3.weight", "3.bias"} | ({"1.weight"} if few == "lora" else set())


@pytest.mark.parametrize("few", FEW)
def test_on_ray_it_ends_with_the_bytes_of_processes(few, described, tmp_path, ray):
    experiment = fl.Experiment.read(described(few))
    for engine in ("processes", "ray"):
        fl.run(replace(experiment, engine=engine), tmp_path / engine)
    assert model_bytes(tmp_path / "ray") == model_bytes(tmp_path / "processes")
