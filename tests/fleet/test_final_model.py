"""After a run each site has the final model, in a folder that commands take as a run's."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import fedlens as fl
from fedlens.fleet.final import place_of
from tests.fleet.real import Federation, with_code_of_tests
from tests.fleet.sites import CLASSES, make_sites, run_nearby, write_experiment


def models_of(tmp_path, **options):
    path = write_experiment(tmp_path, per_round=2, **options)
    sites = make_sites(path, tmp_path / "sites")
    result = run_nearby(path, tmp_path / "run", sites)
    assert result.status == "finished"
    places = []
    for site in sites:
        (experiment,) = site.approvals.approved()
        places.append(place_of(site.home, experiment))
    return result, places


def test_every_site_has_the_bytes_of_the_server_and_can_use_them(tmp_path, fedlens):
    result, places = models_of(tmp_path)
    for place in places:
        kept = load_file(place / "model.safetensors")
        assert kept.keys() == result.model.keys()
        assert all(torch.equal(kept[name], result.model[name]) for name in kept)
    photo, place = tmp_path / "photos" / "cat" / "a.jpg", places[0]
    photo.parent.mkdir(parents=True)
    Image.new("RGB", (20, 10), (90, 120, 60)).save(photo)
    asked = [fedlens("predict", one, photo, "--json").out for one in (place, tmp_path / "run")]
    assert asked[0] == asked[1] and json.loads(asked[0])[0]["classes"][0]["class"] in CLASSES
    ended = fedlens("evaluate", place, "--data", tmp_path / "photos")
    assert ended.status == 0 and "given at-sites, and no image files" in ended.err
    for name in ("m.pt", "m.safetensors"):
        assert fedlens("export", place, "--out", tmp_path / name).status == 0
    assert "cat, dog, owl" in (tmp_path / "m.pt.md").read_text()


@pytest.mark.parametrize(("algorithm", "model"), [("ditto", "linear"), ("fedbn", "resnet18")])
def test_a_site_keeps_the_model_that_it_was_measured_by(algorithm, model, tmp_path):
    result, places = models_of(
        tmp_path, algorithm=f'{{ name = "{algorithm}" }}', model=model, holdout=0.25, norm="shared"
    )
    kept = [load_file(place / "model.safetensors") for place in places]
    differ = {n for n in kept[0] if any(not torch.equal(kept[0][n], one[n]) for one in kept[1:])}
    assert differ and (algorithm == "ditto" or differ < kept[0].keys())
    for place in places:
        fl.load(place)
    assert result.final["client_accuracy_mean"] > 0


@pytest.mark.fleet
def test_it_comes_over_real_sockets(tmp_path, monkeypatch):
    with_code_of_tests(monkeypatch)
    path = write_experiment(tmp_path, count=2, per_round=2)
    with Federation(tmp_path, path).opened() as fleet:
        for name in fleet.sites:
            fleet.start(name)
        assert fleet.run(path, tmp_path / "run") == "finished"
        wanted = load_file(tmp_path / "run" / "model.safetensors")
        for site in fleet.sites.values():
            (experiment,) = site.approvals.approved()
            kept = load_file(place_of(site.home, experiment) / "model.safetensors")
            assert all(torch.equal(kept[name], wanted[name]) for name in wanted)
