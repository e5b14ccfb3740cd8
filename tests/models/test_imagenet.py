"""`weights = "imagenet"`: weights in an installed package."""

import importlib.util

import pytest
import torch

import fedlens as fl
from fedlens.models import MODELS
from fedlens.models.weights import IMAGENET, load_imagenet
from fedlens.setup import build

NAME = "efficientnet-lite0"


def pictures():
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(256, (40, 3, 32, 32), generator=rng, dtype=torch.uint8)
    examples = fl.Examples(images, torch.arange(40) % 2)
    return fl.Dataset("pictures", examples, examples, ("a", "b"))


def experiment(**changes):
    tables = {"dataset": pictures(), "model": NAME, "rounds": 1, "weights": "imagenet"}
    return fl.Experiment.of(tables | {"normalise": "imagenet", "norm": "frozen"} | changes)


def test_they_are_read_whole_and_see_images_from_minus_one_to_one():
    setup = build(experiment(train=1, augment={"flip": True}))
    assert setup.weights is not None
    assert setup.weights.new_layers == ["classifier.1"]
    assert setup.weights.licence == "Apache-2.0"
    assert (setup.network.mean, setup.network.std) == ((0.5,) * 3, (0.5,) * 3)


def test_they_know_a_crossword_puzzle():
    """A figure to compare with: of 1,000 classes a board of black and white squares is no. 918."""
    model = MODELS[NAME]((3, 224, 224), 1000)
    load_imagenet(model, NAME)
    where = torch.arange(224) // 28
    board = (where[:, None] + where) % 2 * 2.0 - 1  # from -1 to 1
    with torch.no_grad():
        logits = model.eval()(board.expand(1, 3, -1, -1))
    assert int(logits.argmax()) == 918


def test_padding_is_that_of_the_weights():
    model = MODELS[NAME]((3, 64, 64), 10)
    x = torch.zeros(1, 3, 64, 64)
    x[..., 0, 0] = 1.0
    with torch.no_grad():
        stem = model.get_submodule("features.0")
        seen = stem.get_submodule("0")(stem.get_submodule("pad")(x))
    kernel = stem.get_submodule("0").weight
    assert isinstance(kernel, torch.Tensor)
    # TensorFlow pads a stride of 2 at the end alone: the first pixel meets the first weight.
    torch.testing.assert_close(seen[0, :, 0, 0], kernel[:, :, 0, 0].sum(1))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"normalise": "dataset"}, "normalise"),
        ({"model": "resnet18"}, NAME),
        ({"norm": "group"}, "GroupNorm"),
        ({"weights_sha256": "0" * 64}, "file that has this sum"),
    ],
)
def test_what_does_not_go_together_is_one_line(changes, word):
    with pytest.raises(ValueError, match=word) as refused:
        build(experiment(**changes))
    assert "\n" not in str(refused.value)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="pretrained"):
        load_imagenet(MODELS[NAME]((3, 32, 32), 2), NAME)


def test_the_file_is_the_one_that_was_meant(monkeypatch):
    wrong = IMAGENET[NAME]._replace(sha256="0" * 64)
    monkeypatch.setitem(IMAGENET, NAME, wrong)
    with pytest.raises(ValueError, match="sha256"):
        load_imagenet(MODELS[NAME]((3, 32, 32), 2), NAME)
