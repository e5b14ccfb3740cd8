"""Label noise and feature shift, client by client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.config.names import PARTITIONS
from fedlens.core.federation import Examples, Holdings, Pool
from fedlens.data.partitions.altered import Altered, _blurred, _turned
from fedlens.data.partitions.dealing import apply_partition
from fedlens.setup import build, partition


def examples(num: int = 600, side: int = 8, dtype: torch.dtype = torch.uint8) -> Examples:
    values = np.random.default_rng(0).integers(0, 256, (num, 2, side, side + 2))
    images = torch.from_numpy(values)
    images = images.to(dtype) if dtype == torch.uint8 else images.to(dtype) / 255
    return Examples(images, torch.arange(num) % 10, {"writer": np.arange(num) % 3})


def altered(name: str, given: Examples, num_clients: int, **options: Any) -> Altered:
    made = apply_partition(name, options, Pool(given, 10, num_clients, np.random.default_rng(0)))
    assert isinstance(made, Altered)
    return made


def test_labels_are_wrong_as_often_as_the_range_says() -> None:
    given = examples(20_000, side=1)
    made = altered("noisy-labels", given, 4, low=0.2, high=0.6)
    wrong = [
        float((made.examples.labels != given.labels)[made.held.members(k)].double().mean())
        for k in range(4)
    ]
    assert all(0.17 < share < 0.63 for share in wrong)
    assert max(wrong) - min(wrong) > 0.05
    shift = (made.examples.labels - given.labels) % 10
    seen = torch.bincount(shift[shift > 0], minlength=10)[1:].double()
    assert float(((seen - seen.mean()) ** 2 / seen.mean()).sum()) < 30
    assert torch.equal(made.examples.images, given.images)
    everything = altered("noisy-labels", given, 4, low=1.0, high=1.0).examples.labels
    assert not (everything == given.labels).any()
    assert torch.equal(altered("noisy-labels", given, 4, high=0.0).examples.labels, given.labels)


def test_examples_at_no_client_stay_as_they_are() -> None:
    given = examples()
    of = {"name": "proportions", "sizes": "low", "mode": "truncate"}
    made = altered("noisy-labels", given, 5, of=of, low=1.0, high=1.0)
    nobody = torch.ones(600, dtype=torch.bool)
    nobody[made.held.index] = False
    assert int(nobody.sum()) == 450
    assert torch.equal(made.examples.labels != given.labels, ~nobody)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_shift_of_nothing_changes_nothing(dtype: torch.dtype) -> None:
    given = examples(dtype=dtype)
    made = altered("shifted", given, 5)
    assert torch.equal(made.examples.images, given.images)
    assert made.examples.images.dtype == dtype
    held = PARTITIONS["iid"](Pool(given, 10, 5, np.random.default_rng(0)))
    assert isinstance(held, Holdings) and made.held.digest() == held.digest()


def test_each_client_has_noise_of_its_own() -> None:
    given = Examples(torch.full((600, 1, 8, 8), 128, dtype=torch.uint8), torch.arange(600) % 10)
    made = altered("shifted", given, 6, noise=0.2)
    spread = [
        float(made.examples.images[made.held.members(k)].double().std() / 255) for k in range(6)
    ]
    assert all(0 < level < 0.21 for level in spread)
    assert max(spread) - min(spread) > 0.03


def test_blur_smooths_white_noise_as_its_width_says() -> None:
    given = examples(60, side=16, dtype=torch.float32).images
    blurred = _blurred(given, 1.0)
    kernel = np.exp(-(np.arange(-3, 4) ** 2) / 2)
    kernel /= kernel.sum()
    inside = blurred[:, :, 3:-3, 3:-3]
    assert float(inside.std() / given.std()) == pytest.approx((kernel**2).sum(), rel=0.05)
    assert float(blurred.mean()) == pytest.approx(float(given.mean()), abs=0.01)


def test_each_client_has_a_blur_of_its_own() -> None:
    made = altered("shifted", examples(side=16), 6, blur=2.0)
    spread = [float(made.examples.images[made.held.members(k)].double().std()) for k in range(6)]
    assert max(spread) > 1.5 * min(spread)


def test_images_turn_about_their_centre_without_being_stretched() -> None:
    point = torch.zeros(1, 1, 9, 21)
    point[0, 0, 4, 14] = 1  # four to the right of the centre
    turned = _turned(point, 90.0)
    places = turned[0, 0].nonzero().tolist()
    assert [p for p in places if turned[0, 0, p[0], p[1]] > 0.9] in ([[0, 10]], [[8, 10]])
    image = torch.rand(1, 3, 8, 8)
    torch.testing.assert_close(
        _turned(image, 90.0), torch.rot90(image, 1, (2, 3)), atol=1e-5, rtol=0
    )


def test_clients_train_on_what_they_see_and_are_judged_on_what_is_true() -> None:
    given = examples()
    data = fl.Dataset("noise", given, given, tuple("abcdefghij"))
    of = {"name": "natural", "column": "writer"}
    noisy = fl.Named("noisy-labels", {"of": of, "low": 1.0, "high": 1.0})
    clients = fl.Clients(partition=noisy)
    described = fl.Experiment(data, fl.Named("linear"), rounds=1, clients=clients)
    setup = build(described)
    assert not (setup.federation.labels == given.labels).any()
    assert torch.equal(setup.parts["test"].labels, given.labels)
    _, train, held = partition(described)
    assert held.names == ("0", "1", "2")
    assert torch.equal(train.labels, setup.federation.labels)
    assert fl.run(described).status == "finished"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("noisy-labels", {"low": 0.6, "high": 0.5}, "low is 0.6 and high 0.5: choose"),
        ("noisy-labels", {"high": 1.5}, "high is 1.5: choose 0 to 1"),
        ("noisy-labels", {"of": {"alpha": 3}}, "give the name of a partition, or a table with"),
        ("noisy-labels", {"of": "iidd"}, "unknown partition 'iidd': did you mean 'iid'?"),
        ("shifted", {"of": {"name": "shards", "per": 1}}, "no option 'per'"),
        ("shifted", {"of": {"name": "fresh", "per_class": 1}}, "of is 'fresh', which does not"),
        ("shifted", {"of": {"name": "drawn", "per_class": 1}}, "each example to one client for"),
        ("shifted", {"blur": -1.0}, "blur is -1.0: choose 0 or more"),
        ("shifted", {"noise": float("nan")}, "noise is nan: choose 0 or more"),
    ],
)
def test_mistakes_are_answered_with_their_remedy(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        altered(name, examples(), 5, **options)
    assert message in str(refused.value)
