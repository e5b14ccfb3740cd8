"""A named rule in place of a model's own first weights."""

import math
from dataclasses import replace

import pytest
from torch import nn

import fedlens as fl
from fedlens.models.initial import initialise
from fedlens.setup import build

EXPERIMENT = fl.Experiment(dataset="fashion-mnist-mini", model="mcmahan-cnn", rounds=1)


@pytest.mark.parametrize("rule", ["glorot", "he"])
def test_weights_have_the_variance_of_the_rule_and_biases_are_zero(rule):
    params = build(replace(EXPERIMENT, initialise=rule)).network.params
    for name, p in params.items():
        if name.endswith("bias"):
            assert not p.any()
            continue
        inputs, outputs = p[0].numel(), p.shape[0] * p[0, 0].numel()
        variance = 2 / inputs if rule == "he" else 2 / (inputs + outputs)
        assert abs(float(p.abs().max())) <= math.sqrt(3 * variance)
        assert float(p.var()) == pytest.approx(variance, rel=0.1), name


def test_it_follows_the_seed():
    first, again, other = (
        build(replace(EXPERIMENT, initialise="he", seed=seed)).network.params["fc2.weight"]
        for seed in (0, 0, 1)
    )
    assert first.equal(again) and not first.equal(other)


def test_a_model_with_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="initialise"):
        initialise(nn.Sequential(nn.Flatten()), "he")
