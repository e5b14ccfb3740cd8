"""Membership inference: its statistics in closed form, and models that do and do not memorise."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.audit import membership
from fedlens.audit.membership import Roc, coins, confidence, likelihood_ratios
from fedlens.setup import build

NORMAL = NormalDist()


def test_a_curve_worked_out_by_hand():
    roc = Roc.of(np.array([3.0, 2.0, 2.0, 1.0]), np.array([True, False, True, False]))
    assert roc.false.tolist() == [0, 0, 0.5, 1]
    assert roc.true.tolist() == [0, 0.5, 1, 1]
    assert roc.area == pytest.approx(0.875)
    assert roc.true_at(0.0) == 0.5
    assert roc.true_at(0.6) == 1.0


def test_equal_scores_tell_nothing():
    assert Roc.of(np.zeros(10), np.arange(10) < 5).area == pytest.approx(0.5)


def test_a_fair_coin_decides_for_each_run_and_example():
    member = coins(1000, 8, seed=3)
    assert abs(member.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(member) - np.eye(8)).max() < 0.15
    assert (member == coins(1000, 8, seed=3)).all()
    assert (member != coins(1000, 8, seed=4)).any()


def test_confidence_is_the_logit_of_the_probability():
    logits = torch.tensor([[2.0, 1.0, -1.0], [800.0, 0.0, 0.0]], dtype=torch.float64)
    p = float(logits[0].softmax(0)[1])
    found = confidence(logits, torch.tensor([1, 0]))
    assert float(found[0]) == pytest.approx(np.log(p / (1 - p)))
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("shadows", [32, 64])
def test_the_ratio_of_known_normals_has_the_area_of_its_closed_form(shadows):
    """φ ~ N(shift_i + 1.5 in, 1), where shift_i differs by example: AUC = Φ(1.5 / √2)."""
    draw = np.random.default_rng(0)
    member = coins(4000, shadows, 0)
    shift = 5 * draw.standard_normal(4000)
    values = shift + 1.5 * member + draw.standard_normal(member.shape)
    scores = likelihood_ratios(values, member)
    best = NORMAL.cdf(1.5 / 2**0.5)
    found = Roc.of(scores.ravel(), member.ravel())
    assert best - 0.05 < found.area < best
    expected = 1 - NORMAL.cdf(NORMAL.inv_cdf(0.99) - 1.5)
    assert found.true_at(0.01) == pytest.approx(expected, abs=0.06)
    # Without shadow runs an attacker cannot know the shifts.
    assert Roc.of(values.ravel(), member.ravel()).area < 0.62


@pytest.mark.parametrize("shadows", [4, 6, 16, 64])
def test_where_membership_changes_nothing_nothing_is_found(shadows):
    member = coins(4000, shadows, 0)
    values = np.random.default_rng(1).standard_normal((shadows, 4000))
    assert abs(Roc.of(likelihood_ratios(values, member).ravel(), member.ravel()).area - 0.5) < 0.02


def setup_of(passes):
    """Noise with labels by chance: all that a model can do is to memorise."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (80, 1, 8, 8), generator=draw, dtype=torch.uint8)
    labels = torch.randint(0, 4, (80,), generator=draw)
    examples = fl.Examples(images, labels)
    noise = fl.Dataset("noise", examples, examples, ("a", "b", "c", "d"))
    experiment = fl.Experiment.of(
        {
            "dataset": "fashion-mnist-mini",
            "model": "linear",
            "rounds": 2,
            "engine": "sequential",
            "clients": {"count": 4},
            "local": {"epochs": passes, "batch_size": 5, "lr": 0.1},
            "evaluate": {"on": []},
        }
    )
    return build(replace(experiment, dataset=noise))


def test_a_model_that_memorised_is_found_out_and_one_that_did_not_is_not():
    told: list[tuple[int, int]] = []
    found = membership.audit(setup_of(passes=20), 8, lambda done, total: told.append((done, total)))
    assert told == [(n, 16) for n in range(1, 17)]
    assert found.member.shape == (8, 80)
    assert found.roc().area > 0.75
    assert found.roc(found.clients == 1).area > 0.55
    assert found.accuracy.mean() < 0.5  # of what it has not seen
    assert found.bound(1e-5) > 0.3
    barely = replace(setup_of(passes=1), experiment=replace(setup_of(1).experiment, rounds=1))
    assert membership.audit(barely, 4).roc(plain=True).area < 0.75


@pytest.mark.parametrize("shadows", [-1, 0, 3])
def test_too_few_shadow_runs_are_refused(shadows):
    with pytest.raises(ValueError, match="4 or more"):
        membership.audit(setup_of(1), shadows)
