"""A server without images: its sites have all of them, also those that models are tested on."""

import re

import pytest

import fedlens as fl
from fedlens.config.experiment import Experiment
from fedlens.fleet.terms import for_fleet
from fedlens.report import read_all
from fedlens.report.runs import headline
from tests.fleet.sites import CLASSES, make_sites, run_nearby, terms_of, write_experiment

STATED = f"""\
dataset = {{ name = "at-sites", classes = {list(CLASSES)}, shape = [3, 8, 8] }}
normalise = {{ mean = 0.5, deviation = 0.25 }}
evaluate = {{ on = [] }}
"""


def described(folder, stated=STATED):
    """An experiment, and sites that approved it; the server's images are gone."""
    path = write_experiment(folder, holdout=0.25, rounds=3)
    sites = make_sites(path, folder / "sites", approved=False)
    (folder / "data.npz").unlink()
    path.write_text(re.sub(r"dataset = .*\n", stated.replace("'", '"'), path.read_text()))
    return path, sites


def test_sites_alone_have_images_and_tests_and_the_page_has_the_curve(tmp_path, fedlens):
    path, sites = described(tmp_path)
    experiment = for_fleet(Experiment.read(path))
    terms = terms_of(experiment, [site.home for site in sites])
    for client, site in enumerate(sites):
        site.approvals.approve(site.offer(terms, client))
    out = tmp_path / "run"
    result = run_nearby(path, out, sites)
    curve = [record["client_accuracy_weighted"] for record in result.records]
    assert len(curve) == 3 and curve[-1] > 0.5
    assert f"{100 * curve[-1]:.1f}% accuracy on what clients hold out" in headline(read_all([out]))
    assert fedlens("report", out).status == 0
    assert "Accuracy at the clients" in (out / "report.html").read_text()
    assert fl.load(out).preprocessing.mean == (0.5,) * 3


@pytest.mark.parametrize(
    ("line", "other", "why"),
    [
        ("evaluate.*\n", "", "no test images: set evaluate.on"),
        ("normalise.*\n", "", "no images here, whose mean and deviation"),
        (r"\[3, 8, 8\]", "[3, 8]", "shape"),
        (r"\[3, 8, 8\]", "[3, 8, 0]", "shape"),
    ],
)
def test_what_the_server_cannot_do_without_images_is_said_at_once(line, other, why, tmp_path):
    path, sites = described(tmp_path, re.sub(line, other, STATED))
    with pytest.raises(ValueError, match=why):
        run_nearby(path, tmp_path / "run", sites)


def test_a_simulation_needs_images(tmp_path, fedlens):
    path, _ = described(tmp_path)
    ended = fedlens("run", path, "--out", tmp_path / "run")
    assert ended.status == 2 and "fedlens fleet serve" in ended.err
