"""Images with several labels on every engine, with rounds that are recorded and replayed."""

from dataclasses import replace

import pytest
import torch

from fedlens.algorithm.pieces import Objective
from fedlens.algorithm.pieces.losses import LossWith, NumberOption, binary_cross_entropy
from fedlens.core.federation import Examples
from tests.federations import FEW, noisy_images, small_cnn, train
from tests.papers_under_test import BASE

OFTEN = LossWith(binary_cross_entropy, (NumberOption("positive_weight", 3.0),))


@pytest.mark.parametrize("loss", [binary_cross_entropy, OFTEN])
@pytest.mark.parametrize(
    "engine", ["stacked", "stacked, recorded", "stacked, two at a time", "processes"]
)
def test_engines_agree(engine, loss):
    federation = noisy_images(FEW)
    rows = torch.nn.functional.one_hot(federation.labels, 4) | torch.tensor([0, 0, 1, 0])
    examples = Examples(federation.examples.images, rows)
    federation = replace(federation, examples=examples)
    algorithm = replace(BASE, objective=Objective(loss))
    ours, theirs = (
        train(algorithm, one, federation=federation, module=small_cnn())
        for one in ("sequential", engine)
    )
    for name, value in ours.params.items():
        torch.testing.assert_close(theirs.params[name], value, rtol=1e-9, atol=1e-11)
