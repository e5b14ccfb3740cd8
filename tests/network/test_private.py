"""Clipped sums of single examples' gradients, against a loop over examples."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.config.names import MODELS
from fedlens.core import Tree, keys, squared_distance
from fedlens.network import private
from fedlens.network.functional import MappedModel
from fedlens.network.layers import group_norm
from fedlens.network.network import Network

CLASSES = 5
Given = tuple[Tree, Tensor, Tensor, Tensor]


class Twice(nn.Module):
    """Layers that one forward pass calls twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3)
        self.middle, self.last = nn.Linear(192, 192), nn.Linear(192, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.flatten(torch.relu(self.norm(self.conv(x))), 1)
        logits: Tensor = self.last(torch.relu(self.middle(torch.relu(self.middle(x)))))
        return logits


class Unread(nn.Module):
    """A module that cannot be read layer by layer; two of its layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.two.weight = self.one.weight
        self.drop, self.last = nn.Dropout(0.4), nn.Linear(192, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x).tanh()).tanh() * 2
        logits: Tensor = self.last(self.drop(x.reshape(len(x), -1)))
        return logits


def around(*layers: nn.Module, channels: int) -> nn.Module:
    """Layers of images 4 x 9 x 8 with this many channels in the end, and a head."""
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Tanh(), *pool, nn.Linear(channels, CLASSES))


GEOMETRIES: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "one by one": {"kernel_size": 1},
    "padding and stride": {"kernel_size": 3, "stride": 2, "padding": 1},
    "uneven": {"kernel_size": (3, 5), "stride": (2, 1), "padding": (1, 2), "dilation": (2, 1)},
    "two groups": {"kernel_size": 3, "groups": 2, "padding": "same"},
    "depthwise": {"kernel_size": 3, "groups": 4, "bias": False},
    "an even kernel": {"kernel_size": 4, "padding": "same", "dilation": 2},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
}
LAYERS = {
    "linear": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES)), (3, 8, 8)),
    "linear without bias": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES, bias=False)),
        (3, 8, 8),
    ),
    "norms": (
        lambda: around(
            nn.Conv2d(4, 6, 3),
            nn.GroupNorm(2, 6),
            nn.ReLU(inplace=True),
            nn.InstanceNorm2d(6, affine=True),
            nn.PReLU(6),
            channels=6,
        ),
        (4, 9, 8),
    ),
    "layer norm of rows": (
        lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(192), nn.Linear(192, CLASSES)),
        (3, 8, 8),
    ),
    "layers called twice": (Twice, (3, 8, 8)),
    "a module that is not read": (Unread, (3, 8, 8)),
}


def batch(network: Network, shape: tuple[int, ...], clients: int, size: int) -> Given:
    """Models, images, labels and a mask in which the last example of a client is padding."""
    rng = torch.Generator().manual_seed(1)
    kind: Any = {"generator": rng, "dtype": torch.float64}
    params = {
        name: (p + 0.05 * torch.randn(clients, *p.shape, **kind)).requires_grad_()
        for name, p in network.params.items()
    }
    images = torch.randn(clients, size, *shape, **kind)
    labels = torch.randint(CLASSES, (clients, size), generator=rng)
    mask = torch.ones(clients, size, dtype=torch.float64)
    mask[0, -1] = 0
    return params, images, labels, mask


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return each.view(labels.shape)


def by_ghosts(network: Network, given: Given, clip: float) -> Tree:
    params, images, labels, mask = given
    logits, notes = network.private(params, images, torch.arange(len(images)), mask)
    return notes.clipped_sums(losses_of(logits, labels), mask, clip)


def by_loop(network: Network, given: Given, clip: float) -> Tree:
    """The same by the plain module and autograd, for one example after another."""
    params, images, labels, mask = given
    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    for client in range(len(images)):
        own = {name: p[client : client + 1].detach().requires_grad_() for name, p in params.items()}
        for row in range(int(mask[client].sum())):
            # Dropout of a module that is read layer by layer is that of its row in the batch.
            rows, key = slice(images.shape[1]), torch.tensor([client])
            if isinstance(network.stacked, MappedModel):
                rows, key = slice(row, row + 1), keys.fold(key, torch.tensor([row]))
            shown = images[client : client + 1, rows]
            logits, _ = network.single(own, {}, shown, key, torch.ones(1, shown.shape[1]))
            loss = losses_of(logits, labels[client : client + 1, rows])[0, row - (rows.start or 0)]
            found = torch.autograd.grad(loss, [*own.values()])
            norm = math.sqrt(sum(float(g.square().sum()) for g in found))
            for name, g in zip(own, found, strict=True):
                sums[name][client] += g[0] * min(1.0, clip / norm)
    return sums


def agree(module: nn.Module, shape: tuple[int, ...], clip: float, clients: int = 2) -> None:
    network = Network(module, dtype=torch.float64)
    given = batch(network, shape, clients, size=3)
    found, expected = by_ghosts(network, given, clip), by_loop(network, given, clip)
    assert found.keys() == expected.keys()
    for name, g in expected.items():
        assert (found[name] - g).norm() <= 1e-10 * g.norm(), name


def made(module: type[nn.Module] | object) -> nn.Module:
    torch.default_generator.manual_seed(0)
    return module()  # type: ignore[operator]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The gradients of convolutions are not kept from the norms to the sum."""
    monkeypatch.setattr(private.OfImages, "is_kept", False)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("clip", [0.1, 1e6])
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_clipped_sum_of_convolutions_on_a_gpu_is_that_of_a_loop(geometry, clients, clip):
    test_the_clipped_sum_of_convolutions_is_that_of_a_loop(geometry, clients, clip)


@pytest.mark.parametrize("clip", [0.1, 1e6])
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_clipped_sum_of_convolutions_is_that_of_a_loop(geometry, clients, clip):
    options = GEOMETRIES[geometry]
    module = made(
        lambda: around(nn.Conv2d(4, 8, **options), nn.ReLU(), nn.Conv2d(8, 4, 3), channels=4)
    )
    if geometry == "an even kernel" and clients == 1:
        pytest.skip("PyTorch warns of it")
    agree(module, (4, 9, 8), clip, clients)


@pytest.mark.parametrize("clip", [0.1, 1e6])
@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("layers", LAYERS)
def test_the_clipped_sum_of_layers_is_that_of_a_loop(layers, clients, clip):
    module, shape = LAYERS[layers]
    agree(made(module), shape, clip, clients)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_weight_of_a_convolution_is_read_for_its_shape_alone():
    """A recorded step has weights of its own, and must wait for no copy of the module's."""
    x, dy = torch.randn(1, 2, 3, 5, 5), torch.randn(1, 2, 4, 3, 3)
    away = nn.Conv2d(3, 4, 3, device="meta")
    found = private.OfImages(away, frozenset({"weight"}), x, dy).weighted(torch.ones(1, 2))
    weight = torch.zeros(4, 3, 3, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(F.conv2d(x[0], weight), weight, dy[0])
    torch.testing.assert_close(found["weight"][0], expected)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("at_once", [1, 2**40])
def test_parts_of_a_batch_add_up_to_it(monkeypatch, at_once):
    monkeypatch.setitem(private.AT_ONCE, "cpu", at_once)
    module = made(lambda: around(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=2), channels=8))
    agree(module, (4, 9, 8), clip=0.1)


LARGE = ("alexnet-32", "resnet18")
OF_THE_SAME_LAYERS = ("alexnet", "vgg11")  # as alexnet-32, with 58 and 129 million numbers


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE))
        for name in MODELS
        if name not in OF_THE_SAME_LAYERS
    ],
)
def test_the_clipped_sum_of_each_model_is_that_of_a_loop(model):
    module = made(lambda: MODELS[model]((3, 32, 32), CLASSES))
    agree(group_norm(module), (3, 32, 32), clip=0.5, clients=1)


def test_frozen_parameters_are_no_part_of_the_norm():
    module: Any = made(lambda: around(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3), channels=4))
    module[0].weight.requires_grad_(False)
    module[1].requires_grad_(False)
    agree(module, (4, 9, 8), clip=0.1)


def test_one_example_moves_the_sum_by_at_most_the_clip():
    module = made(lambda: around(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), channels=8))
    network = Network(module, dtype=torch.float64)
    params, images, labels, mask = batch(network, (4, 9, 8), 2, size=4)
    clip = 0.05
    whole = by_ghosts(network, (params, 100 * images, labels, mask), clip)
    for row in range(3):
        less = mask.clone()
        less[:, row] = 0
        without = by_ghosts(network, (params, 100 * images, labels, less), clip)
        moved = squared_distance(whole, without).sqrt()
        assert (moved <= clip * (1 + 1e-12)).all()
        assert (moved >= clip * (1 - 1e-9)).all()  # all of these gradients are longer


def test_examples_without_a_gradient_are_no_mistake():
    network = Network(made(lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, CLASSES))))
    params = {n: p[None].clone().requires_grad_() for n, p in network.params.items()}
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    logits, notes = network.private(params, torch.randn(1, 3, 1, 2, 4), torch.zeros(1), mask)
    scale = torch.tensor([[1.0, 0.0, 1.0]])
    sums = notes.clipped_sums(logits.sum(2) * scale, mask, 1e-3)
    assert sum(float(g.square().sum()) for g in sums.values()) == pytest.approx(1e-6)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)]
)
def test_layers_that_mix_examples_are_refused(norm):
    network = Network(around(nn.Conv2d(4, 4, 3), norm, channels=4))
    with pytest.raises(ValueError, match="group"):
        _ = network.private


def test_frozen_batch_normalisation_mixes_nothing():
    module = around(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4).requires_grad_(False), channels=4)
    agree(module, (4, 9, 8), clip=0.1)
