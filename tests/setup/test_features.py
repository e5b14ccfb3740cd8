"""Training on the features of frozen layers, computed once."""

import pytest
import torch

import fedlens as fl
from fedlens.setup import features


def pictures():
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (60,), generator=rng)
    images = torch.randint(256, (60, 3, 32, 32), generator=rng, dtype=torch.uint8)
    images[:, 0] = images[:, 0] // 4 + 60 * labels[:, None, None].byte()
    train, test = fl.Examples(images[:40], labels[:40]), fl.Examples(images[40:], labels[40:])
    return fl.Dataset("pictures", train, test, ("a", "b", "c"))


def experiment(**changes):
    tables = {
        "dataset": pictures(),
        "model": "mobilenetv2",
        "norm": "frozen",
        "train": "head",
        "rounds": 2,
        "precision": "fp64",
        "engine": "sequential",
        "clients": {"count": 4, "partition": "iid"},
        "local": {"lr": 0.1, "batch_size": 10},
    }
    return fl.Experiment.of(tables | changes)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedlens" / "features"


def in_images(monkeypatch, described):
    with monkeypatch.context() as patch:
        patch.setattr("fedlens.setup.assemble.cut_for", lambda *_: None)
        return fl.run(described)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("model", ["mobilenetv2", "resnet18"])
def test_a_run_on_features_ends_as_one_on_images(model, engine, monkeypatch, cache):
    described = experiment(model=model, engine=engine)
    there, here = in_images(monkeypatch, described), fl.run(described)
    assert len(list(cache.iterdir())) == 2  # of training and of test images
    assert there.model.keys() == here.model.keys()
    for name, tensor in there.model.items():
        torch.testing.assert_close(here.model[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
    assert there.final["test_loss"] == pytest.approx(here.final["test_loss"], rel=1e-9)


def test_features_are_kept_for_the_next_run(monkeypatch, cache):
    first = fl.run(experiment())
    with monkeypatch.context() as patch:
        patch.setattr(features, "AT_ONCE", 0)  # nothing could be computed
        again = fl.run(experiment())
    for name, tensor in first.model.items():
        assert torch.equal(again.model[name], tensor)


def test_a_damaged_cache_is_computed_again(cache):
    first = fl.run(experiment())
    for file in cache.rglob("*.npy"):
        file.write_bytes(b"damaged")
    for name, tensor in fl.run(experiment()).model.items():
        assert torch.equal(tensor, first.model[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"train": "all"},  # nothing is frozen first
        {"augment": {"flip": True}},  # each step sees other images
        {"model": "alexnet-32", "norm": "shared"},  # dropout among the frozen layers
    ],
)
def test_images_are_trained_on_where_features_would_change(changes, cache):
    fl.run(experiment(**changes))
    assert not cache.exists()
