"""Every model: its size, its shapes, its options, and clients side by side."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from fedlens.config import options
from fedlens.models import MODELS
from fedlens.network.layers import prepare

SIZES = [
    ("hsu-cnn", (3, 32, 32), {}, 797_962),
    ("hsu-cnn", (3, 32, 32), {"padding": "same"}, 1_756_426),
    ("hsu-cnn", (3, 24, 24), {"padding": "same"}, 1_068_298),
    ("mcmahan-cnn", (1, 28, 28), {}, 1_663_370),
    ("mcmahan-cnn", (1, 28, 28), {"geometry": "paper4"}, 1_663_370),
    ("fedns-cnn", (1, 28, 28), {}, 3_529_354),
    ("fedns-cnn", (1, 28, 28), {"padding": "valid"}, 1_366_666),
    ("alexnet-32", (3, 32, 32), {}, 23_272_266),
    ("alexnet", (3, 224, 224), {}, 57_044_810),
    ("alexnet", (3, 64, 90), {}, 57_044_810),
    ("resnet18", (3, 224, 224), {}, 11_181_642),
    ("resnet18", (3, 32, 32), {"stem": "cifar"}, 11_173_962),
    ("resnet18", (3, 64, 64), {"stem": "tiny", "norm": "group"}, 11_173_962),
    ("efficientnet-lite0", (3, 96, 96), {}, 4_652_008 - 990 * 1281),
    ("mobilenetv2", (3, 96, 96), {}, 2_236_682),
    ("mobilenetv2", (3, 96, 96), {"norm": "group"}, 2_236_682),
    ("mobilenetv2", (3, 32, 32), {"bottleneck": 64}, 2_236_682 - 12_810 + 81_984 + 650),
    ("vgg11", (3, 224, 224), {}, 128_807_306),
    ("vgg11", (3, 32, 32), {"pool": 1}, 28_144_010),
    ("pfl-cnn", (3, 32, 32), {}, 1_626_442),
    ("opacus-cnn", (1, 28, 28), {}, 26_010),
    ("tanh-cnn", (1, 28, 28), {}, 26_010),
    ("tanh-vgg", (3, 32, 32), {}, 550_570),
    ("fedrep-cnn", (3, 32, 32), {}, 307_842),
    ("lenet5", (1, 28, 28), {}, 61_706),
    ("lenet5", (1, 32, 32), {}, 61_706),
    ("simple-cnn", (3, 32, 32), {}, 62_006),
    ("simple-cnn", (1, 28, 28), {}, 44_426),
    ("linear", (1, 28, 28), {}, 7_850),
    ("linear", (3, 32, 32), {}, 30_730),
]


QUICK = [name for name in MODELS if name not in ("alexnet", "vgg11")]  # to be given weights
LEAST = {"alexnet": 63, "vgg11": 32}


def build(name, shape=(3, 32, 32), num_classes=10, given=None):
    resolved = options.resolve(options.options_of(MODELS[name]), given or {}, f"model {name}")
    return options.call(MODELS[name], shape, num_classes, options=resolved)


@pytest.mark.parametrize(("name", "shape", "given", "size"), SIZES)
def test_a_model_has_the_published_number_of_parameters(name, shape, given, size):
    with torch.device("meta"):
        model = build(name, shape, 10, given)
        assert sum(p.numel() for p in model.parameters()) == size
        assert model(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 48, 40), (4, 16, 23)])
def test_a_model_takes_images_of_other_shapes(name, shape):
    channels, *sides = shape
    shape = (channels, *(max(side, LEAST.get(name, 0)) for side in sides))
    with torch.device("meta"):
        assert build(name, shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "least"),
    [("hsu-cnn", 16), ("pfl-cnn", 6), ("lenet5", 12), ("alexnet-32", 15), *LEAST.items()],
)
def test_too_small_an_image_is_refused_with_the_least_size(name, least):
    with torch.device("meta"):
        assert build(name, (1, least, least))(torch.zeros(1, 1, least, least)).shape == (1, 10)
    message = f"{name} cannot take images of {least - 1} x 40: resize them to at least {least} x"
    with pytest.raises(ValueError, match=message):
        build(name, (1, least - 1, 40))


def test_a_wrong_option_is_refused():
    with pytest.raises(ValueError, match="did you mean 'same'"):
        build("hsu-cnn", given={"padding": "sam"})


def test_paper4_geometry_shrinks_as_in_its_table():
    model = build("mcmahan-cnn", (1, 28, 28), 10, {"geometry": "paper4"})
    x, sides = torch.zeros(1, 1, 28, 28), []
    for name, layer in model.named_children():
        x = layer(x)
        if name in ("conv1", "pool1", "conv2", "pool2"):
            sides.append(x.shape[-1])
    assert sides == [26, 14, 12, 7]


def test_pfl_cnn_starts_from_xavier_weights_and_zero_biases():
    torch.default_generator.manual_seed(0)
    model = build("pfl-cnn")
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    bound = (6 / (12544 + 128)) ** 0.5
    largest = model.fc1.weight.abs().max().item()
    assert 0.99 * bound < largest <= bound
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25, 0.5]


def test_tanh_vgg_starts_from_he_normal_and_glorot_weights():
    torch.default_generator.manual_seed(0)
    model = build("tanh-vgg")
    for name, p in model.named_parameters():
        inputs, outputs = p[0].numel(), len(p)
        if name.endswith("bias"):
            assert not p.any()
        elif p.ndim == 4:
            assert p.std().item() == pytest.approx((2 / inputs) ** 0.5, rel=0.1)
        else:
            assert 0.98 < p.abs().max().item() / (6 / (inputs + outputs)) ** 0.5 <= 1


@pytest.mark.parametrize("name", QUICK)
def test_the_seed_decides_the_weights(name):
    states = []
    for seed in (0, 0, 1):
        torch.default_generator.manual_seed(seed)
        states.append(torch.cat([p.flatten() for p in build(name).parameters()]))
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def narrow(name, shape):
    """A model in which no layer of 4096 takes the time of a test."""
    with torch.device("meta"):
        model = build(name, shape)
    for part in model.modules():
        if isinstance(part, nn.Sequential):
            for key, layer in part.named_children():
                if isinstance(layer, nn.Linear):
                    in_, out = (
                        16 if n == 4096 else n for n in (layer.in_features, layer.out_features)
                    )
                    part._modules[key] = nn.Linear(in_, out)
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.01, 0.1) if tensor.ndim < 2 else nn.init.xavier_normal_(
                tensor
            )
        else:
            tensor.zero_()
    return model


@pytest.mark.parametrize("name", MODELS)
def test_clients_side_by_side_get_what_each_gets_alone(name):
    torch.default_generator.manual_seed(0)
    side = max(16, LEAST.get(name, 0))
    models = [prepare(narrow(name, (3, side, side)).double()) for _ in range(2)]
    params, buffers = stack_module_state(models)
    images = torch.randn(2, 3, 3, side, side, dtype=torch.float64)
    out = vmap(lambda p, b, x: functional_call(models[0], (p, b), (x,)))(params, buffers, images)
    out.square().sum().backward()
    for c, model in enumerate(models):
        alone = model(images[c])
        alone.square().sum().backward()
        torch.testing.assert_close(out[c], alone)
        for key, p in model.named_parameters():
            torch.testing.assert_close(params[key].grad[c], p.grad)


def test_relu_on_logits_is_the_literal_reading_of_fedns():
    torch.default_generator.manual_seed(0)
    plain = build("fedns-cnn", (1, 28, 28))
    literal = build("fedns-cnn", (1, 28, 28), given={"relu_on_logits": True})
    literal.load_state_dict(plain.state_dict())
    images = torch.randn(4, 1, 28, 28)
    logits = plain(images)
    assert bool((logits < 0).any())
    assert torch.equal(literal(images), logits.clamp(min=0))
