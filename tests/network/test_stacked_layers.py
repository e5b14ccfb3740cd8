"""Every row of the table of layers is, for several clients, what the layer is for each of them."""

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedlens.core import keys
from fedlens.network.layers import KeyedDropout, MaskedBatchNorm, prepare, side_inputs
from fedlens.network.network import Network
from fedlens.network.pool import AdaptivePool
from fedlens.network.stacked import layers as stacked_layers
from fedlens.network.stacked.layers import FORMS, MAPPED, StackedModule, form_of, read_module
from tests.federations import small_cnn

# PyTorch says so of its own convolution, which is the reference here.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

CLIENTS, BATCH = 3, 4
IMAGES, ROWS = (4, 6, 8), (8,)
Join = Callable[[Tensor, Tensor], Tensor]

EXAMPLES: dict[type[nn.Module], list[tuple[nn.Module, tuple[int, ...]]]] = {
    nn.Conv2d: [
        (nn.Conv2d(4, 6, 3, padding=1), IMAGES),
        (nn.Conv2d(4, 6, (2, 3), stride=2, padding=(1, 0), bias=False), IMAGES),
        (nn.Conv2d(4, 6, 1, stride=2), IMAGES),
        (nn.Conv2d(4, 6, 4, padding="same"), IMAGES),
        (nn.Conv2d(4, 8, 3, padding="valid", groups=2, dilation=2), IMAGES),
        (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGES),
        (nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4, bias=False), IMAGES),  # depthwise
        (nn.Conv2d(4, 4, (3, 2), padding="same", groups=4), IMAGES),
    ],
    nn.Linear: [
        (nn.Linear(8, 5), ROWS),
        (nn.Linear(8, 5, bias=False), ROWS),
        (nn.Linear(8, 5), IMAGES),
    ],
    nn.Flatten: [(nn.Flatten(), IMAGES), (nn.Flatten(2), IMAGES)],
    nn.GroupNorm: [
        (nn.GroupNorm(2, 4), IMAGES),
        (nn.GroupNorm(2, 4, affine=False), IMAGES),
        (nn.GroupNorm(2, 8), ROWS),
    ],
    MaskedBatchNorm: [(nn.BatchNorm2d(4), IMAGES), (nn.BatchNorm1d(8), ROWS)],
    KeyedDropout: [(nn.Dropout(0.5), ROWS), (nn.Dropout(0.5), IMAGES), (nn.Dropout2d(0.5), IMAGES)],
    nn.MaxPool2d: [(nn.MaxPool2d(2), IMAGES), (nn.MaxPool2d(3, 2, padding=1), IMAGES)],
    nn.AvgPool2d: [(nn.AvgPool2d(2), IMAGES)],
    nn.AdaptiveAvgPool2d: [(nn.AdaptiveAvgPool2d(2), IMAGES)],
    AdaptivePool: [(AdaptivePool(3), IMAGES)],
    nn.ReLU: [(nn.ReLU(), IMAGES), (nn.ReLU(inplace=True), ROWS)],
    nn.ReLU6: [(nn.ReLU6(), ROWS)],
    nn.Tanh: [(nn.Tanh(), ROWS)],
    nn.Sigmoid: [(nn.Sigmoid(), ROWS)],
    nn.SiLU: [(nn.SiLU(), IMAGES)],
    nn.GELU: [(nn.GELU(), IMAGES)],
    nn.Identity: [(nn.Identity(), IMAGES)],
    nn.LayerNorm: [(nn.LayerNorm(8), ROWS), (nn.LayerNorm(8), IMAGES)],  # of no row: by vmap
}
EVERY = [
    pytest.param(layer, shape, id=f"{layer}, {'rows' if shape == ROWS else 'images'}")
    for examples in EXAMPLES.values()
    for layer, shape in examples
]


def read(*layers: nn.Module) -> tuple[nn.Module, StackedModule]:
    module = prepare(nn.Sequential(*copy.deepcopy(layers))).double().train()
    stacked = read_module(module)
    assert stacked is not None
    return module, stacked


def agree(layers: list[nn.Module], shape: tuple[int, ...]) -> None:
    """Results and gradients of a stack of layers, and what it does to its buffers."""
    torch.default_generator.manual_seed(0)
    module, stacked = read(*layers)
    keyed, masked = side_inputs(module)
    params = {
        name: torch.randn(CLIENTS, *p.shape, dtype=p.dtype).requires_grad_()
        for name, p in module.named_parameters()
    }
    buffers = {
        name: torch.stack([b] * CLIENTS)
        for name, b in module.named_buffers()
        if name not in {*keyed, *masked}
    }
    x = torch.randn(CLIENTS, BATCH, *shape, dtype=torch.float64, requires_grad=True)
    client_keys = keys.fold(keys.root(7), torch.arange(CLIENTS))
    mask = (torch.arange(BATCH) < torch.tensor([[4], [3], [2]])).double()
    results: list[list[Tensor]] = []
    for own in (buffers, {name: b.clone() for name, b in buffers.items()}):
        if own is buffers:
            y = stacked(params | own, lambda tree: tree, x, client_keys, mask)
        else:
            each = []
            for c in range(CLIENTS):
                side = dict.fromkeys(keyed, client_keys[c]) | dict.fromkeys(masked, mask[c])
                mine = {name: t[c] for name, t in (params | own).items()}
                # A layer that works in place must not write into the clients' common input.
                each.append(functional_call(module, mine | side, (x[c].clone(),)))
            y = torch.stack(each)
        pull = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
        leaves = [x, *params.values()]
        results.append([y, *torch.autograd.grad((y * pull).sum(), leaves), *own.values()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_every_row_of_the_table_has_an_example():
    assert set(FORMS) <= set(EXAMPLES)
    for kind, examples in EXAMPLES.items():
        for layer, _ in examples:
            assert form_of(prepare(layer)) is FORMS.get(kind, MAPPED)


@pytest.mark.parametrize(("layer", "shape"), EVERY)
def test_a_layer_of_several_clients_is_that_of_each(layer, shape):
    agree([layer], shape)


@pytest.mark.parametrize(("layer", "shape"), EVERY)
def test_what_follows_a_layer_is_done_once(layer, shape):
    agree([layer, nn.ReLU(), nn.Tanh()], shape)


@pytest.mark.parametrize(
    "behind",
    [
        [nn.ReLU(), nn.MaxPool2d(2)],
        [nn.MaxPool2d(2), nn.ReLU()],
        [nn.ReLU(), nn.MaxPool2d(2, padding=1)],
        [nn.MaxPool2d(2, padding=(0, 1)), nn.ReLU()],
    ],
)
@pytest.mark.parametrize("convolution", [layer for layer, _ in EXAMPLES[nn.Conv2d]], ids=str)
def test_a_convolution_does_the_relu_and_the_pooling_behind_it(convolution, behind):
    _, stacked = read(convolution, *behind)
    assert len(stacked.absorbed) == 2
    agree([convolution, *behind], IMAGES)


@pytest.mark.parametrize("convolution", [layer for layer, _ in EXAMPLES[nn.Conv2d]], ids=str)
def test_a_convolution_does_the_dropout_behind_its_pooling(convolution):
    behind = [nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5), nn.ReLU()]
    _, stacked = read(convolution, *behind)
    assert len(stacked.absorbed) == 3
    agree([convolution, *behind], IMAGES)


def test_a_dropout_that_is_called_twice_draws_again_behind_each_convolution():
    drop, pool = nn.Dropout(0.4), nn.MaxPool2d(2)
    layers = [nn.Conv2d(4, 4, 3, padding=1), pool, drop, nn.Conv2d(4, 6, 3, padding=1), pool, drop]
    _, stacked = read(*layers)
    assert len(stacked.absorbed) == 4
    agree(layers, IMAGES)


class Block(nn.Module):
    """Two ways from the images to one result, which `join` makes of theirs."""

    def __init__(self, one: nn.Module, other: nn.Module, join: Join) -> None:
        super().__init__()
        self.one, self.other, self.join = one, other, join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.one(x), self.other(x))


def in_place(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


NORMS = [nn.GroupNorm(2, 4), nn.GroupNorm(1, 4, affine=False), nn.BatchNorm2d(4)]
JOINS: dict[str, tuple[Join, int]] = {  # and how many of its operations the norms do
    "addition": (lambda a, b: a + b, 1),
    "addition, ReLU": (lambda a, b: F.relu(a + b), 2),
    "the other way round": (lambda a, b: torch.relu(torch.add(b, a)), 2),
    "in place, ReLU6": (lambda a, b: F.relu6(in_place(a, b)), 2),
    "each its ReLU6 before": (lambda a, b: F.relu6(a) + F.relu6(b), 2),
    "a number besides": (lambda a, b: F.relu(a + b + 1.0), 1),
    "itself, then the other": (lambda a, b: F.relu(a + a) + b, 1),
    "read once more": (lambda a, b: F.relu(a + b) + a, 2),
}


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize(("join", "number"), JOINS.values(), ids=JOINS)
def test_a_norm_does_the_addition_and_the_relu_behind_it(join, number, norm):
    block = Block(nn.Sequential(nn.Conv2d(4, 4, 1), norm), copy.deepcopy(norm), join)
    assert len(read(block)[1].absorbed) == number
    agree([block], IMAGES)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_a_norm_adds_what_has_another_shape(norm):
    join, pixel = JOINS["addition, ReLU"][0], nn.AdaptiveAvgPool2d(1)
    for one, other in ((norm, pixel), (nn.Identity(), nn.Sequential(pixel, norm))):
        block = Block(one, other, join)
        assert len(read(block)[1].absorbed) == 2
        agree([block], IMAGES)


def test_a_relu_in_place_of_what_others_read_is_left_to_pytorch():
    block = Block(nn.Identity(), nn.ReLU(), lambda a, b: F.relu(a, inplace=True) + b)
    assert read_module(block) is None


def test_only_what_a_form_absorbs_is_taken_from_the_layers_behind():
    assert len(read(nn.Linear(8, 4), nn.ReLU(), nn.ReLU())[1].absorbed) == 1
    assert not read(nn.Conv2d(4, 6, 3), nn.MaxPool2d(3), nn.ReLU())[1].absorbed
    assert not read(nn.LayerNorm(8), nn.ReLU())[1].absorbed
    assert len(read(nn.GroupNorm(2, 4), nn.ReLU6(), nn.ReLU())[1].absorbed) == 1
    assert not read(nn.Conv2d(4, 6, 3), nn.Dropout(0.5), nn.MaxPool2d(2))[1].absorbed
    assert len(read(nn.Conv2d(4, 6, 3), nn.MaxPool2d(2), nn.Dropout2d(0.5))[1].absorbed) == 1


def test_a_layer_that_says_so_keeps_rows_as_rows_and_images_with_their_channels():
    for examples in EXAMPLES.values():
        for layer, shape in examples:
            if not form_of(prepare(layer)).keeps_rows:
                continue
            y = read(layer)[1](
                {f"0.{n}": p.double()[None] for n, p in layer.named_parameters()},
                lambda tree: tree,
                torch.randn(1, BATCH, *shape, dtype=torch.float64),
                torch.zeros(1, dtype=torch.int64),
                torch.ones(1, BATCH),
            )
            assert y.ndim == 2 + len(shape) and (shape == ROWS or y.shape[2] == shape[0])


def test_a_linear_layer_behind_flattened_images_takes_rows():
    layers = nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(6 * 24, 5)
    _, stacked = read(*layers)
    assert stacked.takes_rows("4") and stacked.flattened_channels("4") == 6
    _, stacked = read(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(6 * 24, 5))
    assert stacked.takes_rows("3") and stacked.flattened_channels("3") is None


def test_of_flattened_images_and_the_matrix_behind_them_the_smaller_one_is_copied():
    """Rows may come pixel by pixel, as images lie in memory: then it is the matrix."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 5))
    network = Network(module, dtype=torch.float64)
    for num_images, by_pixel in ((4, False), (6, True)):
        images = torch.rand(num_images, 3, 8, 8, dtype=torch.float64)
        with mock.patch.object(stacked_layers, "flatten", wraps=stacked_layers.flatten) as flatten:
            found = network.predict_stacked(network.params, images)
        assert flatten.call_args.kwargs == {"by_pixel": by_pixel}
        torch.testing.assert_close(found, network.predict(network.params, {}, images))


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_stacked_layers_predict_what_the_module_does(norm):
    network = Network(small_cnn(norm, dropout=0.3), dtype=torch.float64)
    images = torch.rand(5, 1, 8, 8, dtype=torch.float64)
    model = network.params | network.buffers
    expected = network.predict(network.params, network.buffers, images)
    torch.testing.assert_close(network.predict_stacked(model, images), expected)
