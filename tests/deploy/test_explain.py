"""Heat maps are what the equations say, and show where a model looks."""

import csv
import io
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fedlens.deploy.explain import heat_maps, picture
from fedlens.models.resnet18 import resnet18


def pooled(images: int = 5) -> tuple[nn.Sequential, Tensor]:
    """Convolutions, a global mean and a linear layer; and images."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3, stride=2), nn.ReLU())
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    return module.double().eval(), torch.randn(images, 3, 13, 11, dtype=torch.float64)


def test_behind_a_global_mean_and_a_linear_layer_it_is_the_class_activation_map() -> None:
    module, images = pooled()
    labels = torch.tensor([0, 1, 2, 2, 0])
    (*_, linear), maps = module, module[:4](images)  # [N, 6, H, W]
    assert isinstance(linear, nn.Linear)
    weight = linear.weight[labels]  # [N, 6]
    cam = (weight[:, :, None, None] * maps).sum(1).relu()
    expected = cam / cam.amax((1, 2), keepdim=True)
    assert torch.allclose(heat_maps(module, images, labels), expected.detach(), atol=1e-12)


def test_it_is_the_sum_of_maps_weighted_by_the_mean_slopes_of_the_logit() -> None:
    """Behind a max pool and a hidden layer, where slopes differ; by finite differences."""
    torch.manual_seed(1)
    front = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh()).double()
    back = nn.Sequential(
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2)
    )
    back, images = back.double(), torch.randn(1, 1, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        maps, step = front(images), 1e-6
        slopes = torch.zeros_like(maps).view(-1)
        for place in range(maps.numel()):
            moved = [maps.clone(), maps.clone()]
            for sign, one in zip((1, -1), moved, strict=True):
                one.view(-1)[place] += sign * step
            high, low = (back(one)[0, 1] for one in moved)
            slopes[place] = (high - low) / (2 * step)
        weights = slopes.view_as(maps).mean((2, 3), keepdim=True)
        heat = (weights * maps).sum(1).relu()
    found = heat_maps(nn.Sequential(front, back), images, torch.tensor([1]))
    assert heat.max() > 0
    assert torch.allclose(found, heat / heat.max(), atol=1e-6)


def test_an_image_has_its_heat_map_whatever_is_beside_it() -> None:
    module, images = pooled(20)  # more than are explained at a time
    labels = torch.arange(20) % 3
    together = heat_maps(module, images, labels)
    each = [heat_maps(module, images[[i]], labels[[i]])[0] for i in range(20)]
    assert torch.allclose(together, torch.stack(each), atol=1e-12)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_frozen_layers_are_explained_too() -> None:
    module, images = pooled(2)
    labels = torch.tensor([0, 1])
    before = heat_maps(module, images, labels)
    assert torch.equal(before, heat_maps(module.requires_grad_(False), images, labels))


def test_the_maps_of_a_residual_network_are_those_before_its_mean() -> None:
    torch.manual_seed(0)
    module: Any = resnet18((3, 64, 64), 4).eval()
    images, kept = torch.randn(2, 3, 64, 64), []
    module.layer4.register_forward_hook(lambda *given: kept.append(given[-1]))
    heat = heat_maps(module, images, torch.tensor([1, 3]))
    (maps,) = kept
    cam = (module.fc.weight[[1, 3], :, None, None] * maps).sum(1).relu().detach()
    assert torch.allclose(heat, cam / cam.amax((1, 2), keepdim=True), atol=1e-5)


def test_a_model_without_convolutions_is_refused_by_name() -> None:
    class Rows(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.flatten(1))

    with pytest.raises(ValueError, match=r"Rows.* no convolution"):
        heat_maps(Rows(48, 2), torch.zeros(1, 3, 4, 4), torch.tensor([0]))


def test_where_the_class_is_the_heat_is() -> None:
    """A model that finds bright squares: the heat is on the square."""
    finder = nn.Conv2d(1, 1, 3, padding=1)
    module = nn.Sequential(finder, nn.ReLU(), nn.AvgPool2d(16), nn.Flatten())
    with torch.no_grad():
        finder.weight.fill_(1.0)
        nn.init.constant_(cast(Tensor, finder.bias), -4.0)
    image = torch.zeros(1, 1, 16, 16)
    image[0, 0, 3:6, 10:13] = 1.0
    (heat,) = heat_maps(module, image, torch.tensor([0]))
    assert divmod(int(heat.argmax()), 16) == (4, 11) and heat.max() == 1
    assert heat[8:].max() == 0
    shown = np.array(Image.open(io.BytesIO(picture((image[0] * 100).byte(), heat))))
    assert shown.shape == (256, 256, 3)
    red, green, blue = shown[72, 184].tolist()  # the middle of the square, 16 times as large
    assert red > green > blue
    assert shown[200, 40].tolist() == [0, 0, 0]


def test_predict_writes_a_picture_for_each_image(trained, here, fedlens) -> None:
    ended = fedlens("predict", trained.run, trained.images / "west", "--explain", "seen", "-q")
    rows = list(csv.DictReader(io.StringIO(ended.out)))
    assert ended.status == 0 and list(rows[0])[:3] == ["path", "heat_map", "class_1"]
    assert sorted(row["heat_map"] for row in rows) == sorted(map(str, Path("seen").iterdir()))
    for row in rows[:2]:
        assert Path(row["heat_map"]).stem.endswith(Path(row["path"]).stem)
        content = Path(row["heat_map"]).read_bytes()
        assert Image.open(io.BytesIO(content)).size == (264, 264)
    ended = fedlens("predict", trained.run, trained.images / "west", "--explain", "seen")
    assert (ended.status, ended.out) == (2, "") and "name a new folder" in ended.err
