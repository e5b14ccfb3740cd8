"""What low-rank adaptation is: a product beside weights that stay, and their sum in the end."""

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.models import MODELS
from fedlens.models.freeze import train_last, weighted_layers
from fedlens.network.low_rank import low_rank, merged
from tests.models.test_freeze import described, net


class Residual(nn.Module):
    """Two convolutions of one pixel, one of three, and what goes around them."""

    def __init__(self):
        super().__init__()
        self.narrow, self.filter = nn.Conv2d(6, 3, 1, bias=False), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.widen = nn.BatchNorm2d(3), nn.Conv2d(3, 6, 1)

    def forward(self, x):
        return x + self.widen(torch.relu(self.norm(self.filter(self.narrow(x)))))


def blocks():
    torch.default_generator.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.Sequential(Residual(), Residual()),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
    )


def adapted(rank=2):
    module = blocks()
    low_rank(module, rank, weighted_layers(module)[-1])
    return module


def images(seed=0):
    return torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_it_begins_at_the_model_as_it_is():
    assert torch.equal(adapted().eval()(images()), blocks().eval()(images()))


def test_only_the_products_and_the_head_are_trained():
    trained = {name for name, p in adapted().named_parameters() if p.requires_grad}
    products = [f"2.{i}.{layer}" for i in (0, 1) for layer in ("narrow", "widen")] + ["5"]
    expected = {f"{layer}.{part}.weight" for layer in products for part in ("lora_down", "lora_up")}
    assert trained == expected | {"7.weight", "7.bias"}
    rank = 2  # of narrow and widen (3 + 6 numbers a rank, twice), and of the linear layer
    count = sum(p.numel() for p in adapted(rank).parameters() if p.requires_grad)
    assert count == rank * (2 * 2 * (3 + 6) + 24 + 8) + 8 * 4 + 4


def test_the_merged_model_is_the_same_function():
    module = adapted().eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "lora_up" in name:
                p.copy_(torch.randn(p.shape, generator=rng))
    plain = blocks().eval()
    before = plain(images())
    plain.load_state_dict(merged(module.state_dict()))
    torch.testing.assert_close(plain(images()), module(images()))
    assert not torch.allclose(plain(images()), before, atol=1e-2)
    weight, up, down = (
        module.state_dict()[f"5.{part}.weight"] for part in ("layer", "lora_up", "lora_down")
    )
    torch.testing.assert_close(plain[5].weight, weight + up @ down)


def test_a_model_without_products_is_merged_as_it_is():
    state = blocks().state_dict()
    assert merged(state) == state


@pytest.mark.parametrize("changes", [{}, {"train": "last-block"}])
def test_the_engines_agree_and_the_result_is_the_models_own(changes):
    def run(engine):
        plain = {"model": blocks(), "lora": {"rank": 2}, "precision": "fp64", "engine": engine}
        return fl.run(described(**plain, **changes))

    expected, found = run("sequential"), run("stacked")
    start = blocks().state_dict()
    assert expected.model.keys() == found.model.keys() == start.keys()
    for name, tensor in expected.model.items():
        torch.testing.assert_close(found.model[name], tensor, rtol=1e-9, atol=1e-9)
        is_moved = not torch.equal(tensor, start[name].to(tensor.dtype))
        first = name.startswith("2.0") and bool(changes)
        learns = "narrow" in name or "widen" in name or name.startswith(("5", "7"))
        frozen_bias = name in ("2.0.widen.bias", "2.1.widen.bias", "5.bias")
        assert is_moved == (learns and not first and not frozen_bias), name
    sent = [name for name in expected.tensors if "lora" in name or name.startswith("7")]
    count = sum(expected.tensors[name].numel() for name in sent)
    assert expected.records[0]["bytes_up"] == 3 * 4 * count


def test_what_cannot_learn_by_low_rank_is_refused():
    with pytest.raises(ValueError, match="lora"):
        fl.run(described(lora={"rank": 2}, train="head"))


def test_the_last_block_is_the_last_numbered_one_of_several_layers():
    module = blocks()
    train_last(module, "last-block")
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert {name.rpartition(".")[0] for name in trained} == {
        *(f"2.1.{layer}" for layer in ("narrow", "filter", "norm", "widen")),
        *("5", "7"),
    }
    with pytest.raises(ValueError, match="last-block"):
        train_last(net(), "last-block")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("resnet18", "layer4.1"),
        ("mobilenetv2", "features.17"),
        ("efficientnet-lite0", "features.16"),
    ],
)
def test_the_last_block_of_known_models(name, first):
    with torch.device("meta"):
        module = MODELS[name]((3, 32, 32), 4)
    train_last(module, "last-block")
    trained = next(name for name, p in module.named_parameters() if p.requires_grad)
    assert trained.startswith(f"{first}.")
