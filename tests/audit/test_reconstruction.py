"""Images from uploads: those of a linear model come back, clipped or not; rounding hides them."""

from typing import Any

import pytest
import torch

import fedlens as fl
from fedlens.audit.reconstruction import (
    CHANGED,
    Reconstruction,
    Training,
    labels_in,
    reconstruct,
    reconstructions,
    similarity,
)
from fedlens.setup import Setup, build


def setup_of(**more: Any) -> Setup:
    plain = {
        "dataset": "fashion-mnist-mini",
        "model": "linear",
        "rounds": 1,
        "engine": "sequential",
        "clients": {"count": 5},
        "local": {"epochs": 1, "batch_size": 8, "lr": 0.1},
    }
    return build(fl.Experiment.of(plain | more))


def test_one_image_comes_back_through_a_linear_model():
    found = reconstruct(setup_of(), 0, 1, steps=400)
    assert found.labels.tolist() == found.found_labels.tolist()
    assert float(found.psnr) > 30
    assert float(found.ssim) > 0.9
    assert found.cosine > 0.999


def test_the_upload_of_a_client_is_the_same_on_every_engine():
    """A form of weights that only gives sums of uploads is not taken."""
    for how in (None, Training(), Training(clip=1.0, noise=0.01)):
        one, other = (
            reconstruct(setup_of(engine=engine), 0, 1, steps=20, training=how)
            for engine in ("sequential", "stacked")
        )
        assert one.cosine == pytest.approx(other.cosine, rel=1e-4)


def test_clipping_alone_hides_nothing():
    """A shorter update has the same direction."""
    clipped = setup_of(algorithm=["fedavg", {"name": "clip", "norm": 0.01}])
    assert float(reconstruct(clipped, 0, 1, steps=400).psnr) > 30


def test_an_upload_of_another_direction_gives_no_image():
    made = setup_of()
    rough = setup_of(algorithm=["fedavg", {"name": "quantize", "bits": 2}])
    plain, hidden = (reconstruct(one, 0, 1, steps=200) for one in (made, rough))
    assert float(hidden.psnr) < float(plain.psnr) - 10


@pytest.mark.parametrize(
    ("training", "least", "most"),
    [
        (Training(), 30, 99),
        (Training(steps=5), 30, 99),
        (Training(clip=0.1), 30, 99),
        (Training(clip=1.0, noise=0.1), 0, 15),
    ],
)
def test_noise_hides_an_image_and_neither_a_clip_nor_more_steps_do(training, least, most):
    """Whatever the experiment itself is: here it has noise, too."""
    made = setup_of(privacy={"unit": "example", "noise": 1.0, "delta": 1e-4})
    found = reconstruct(made, 0, 1, steps=400, training=training)
    assert least < float(found.psnr) < most


def test_one_thing_at_a_time_is_changed_and_no_more_images_are_sought_than_there_are(monkeypatch):
    monkeypatch.setattr("fedlens.audit.reconstruction.STEPS", 2)
    counted: list[tuple[int, int]] = []
    made = setup_of(clients={"count": 1000})  # of six images each
    found = reconstructions(made, 0, lambda done, total: counted.append((done, total)))
    assert [one.training for one in found[2:]] == [one for one in CHANGED if one.examples <= 6]
    assert counted[-1] == (2 * len(found), 2 * len(found))


def test_labels_are_read_off_the_gradient_of_the_last_layer():
    """With logits of zero it is mean(1 / L - [y = c]), which tells the counts exactly."""
    made = setup_of()
    network = made.network
    counts = torch.tensor([3, 0, 0, 1, 0, 0, 2, 0, 0, 0])
    gradient = {name: torch.zeros_like(t) for name, t in network.params.items()}
    gradient["fc.bias"] = 0.1 - counts / 6
    found = labels_in(network, gradient, 6, torch.Size(made.dataset.shape))
    assert torch.bincount(found, minlength=10).tolist() == counts.tolist()


def test_similarity_is_one_of_equal_images_and_low_of_noise():
    draw = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 3, 1, 16, 16, generator=draw)
    assert similarity(a, a).tolist() == pytest.approx([1.0] * 3)
    assert float(similarity(a, b).max()) < 0.2


def test_the_signal_to_noise_ratio_in_decibels():
    a = torch.zeros(1, 1, 8, 8)
    one = Reconstruction(a, a + 0.1, torch.tensor([1]), torch.tensor([1]), 1.0)
    assert float(one.psnr) == pytest.approx(20.0, abs=1e-4)
    assert one.right_labels == 1


def test_what_cannot_be_attacked_is_refused():
    made = setup_of()
    with pytest.raises(ValueError, match="client is 9"):
        reconstruct(made, 9, 1)
    with pytest.raises(ValueError, match="examples is 0"):
        reconstruct(made, 0, 0)
    normed = setup_of(model="resnet18")
    with pytest.raises(ValueError, match="batch norm"):
        reconstruct(normed, 0, 1)
