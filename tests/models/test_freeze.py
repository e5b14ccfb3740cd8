"""Frozen layers, and the larger models, over the engines."""

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.algorithm.pieces import Epochs, Sgd
from fedlens.core.federation import Examples, Federation, Fixed, Holdings
from fedlens.models import MODELS
from fedlens.models.freeze import freeze_norms, train_last
from fedlens.network.network import Network
from fedlens.setup import build
from tests.federations import ENGINES, train

BATCH = 8
ONE_STEP = fl.Algorithm(draw=Epochs(1, BATCH), solve=Sgd(0.05))


def ragged(sizes=(3, 8, 5), channels=3, side=16):
    """Clients whose examples fit one batch, which not all of them fill."""
    rng = torch.Generator().manual_seed(0)
    shape = (sum(sizes), channels, side, side)
    images = torch.randn(shape, generator=rng, dtype=torch.float64)
    labels = torch.randint(4, (sum(sizes),), generator=rng)
    members = torch.arange(sum(sizes)).split(list(sizes))
    return Federation(Examples(images, labels), 4, Fixed(Holdings.of(list(members))))


def net():
    torch.default_generator.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(4 * 64, 4),
    )


def trained_names(module):
    return [name for name, p in module.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("name", "options"),
    [("resnet18", {}), ("mobilenetv2", {"norm": "group"})],
)
def test_the_engines_agree_on_clients_that_do_not_fill_a_batch(name, options):
    def one_step(engine):
        torch.default_generator.manual_seed(0)
        module = MODELS[name]((3, 16, 16), 4, **options)
        return train(ONE_STEP, engine, 1, ragged((5, 8)), module)

    expected, found = one_step("sequential"), one_step("stacked")
    for tree in ("params", "buffers"):
        for key, tensor in getattr(expected, tree).items():
            torch.testing.assert_close(getattr(found, tree)[key], tensor, rtol=1e-9, atol=1e-9)


def test_the_last_layers_are_counted_by_their_weights():
    module = net()
    train_last(module, 1)
    assert trained_names(module) == ["8.weight", "8.bias"]
    module = net()
    train_last(module, 2)
    expected = ["3.weight", "3.bias", "4.weight", "4.bias", "8.weight", "8.bias"]
    assert trained_names(module) == expected
    module = net()
    train_last(module, 3)
    assert len(trained_names(module)) == len(list(module.parameters()))
    with pytest.raises(ValueError, match="train is 4"):
        train_last(module, 4)


@pytest.mark.parametrize(
    ("name", "options", "layers"),
    [
        ("resnet18", {}, ["layer4.1.conv2", "layer4.1.bn2", "fc"]),
        ("mobilenetv2", {}, ["features.18.0", "features.18.1", "classifier.1"]),
        ("mobilenetv2", {"bottleneck": 64}, ["classifier.1", "classifier.2"]),
        ("alexnet-32", {}, ["classifier.4", "classifier.6"]),
    ],
)
def test_two_layer_fine_tuning_trains_what_one_expects(name, options, layers):
    with torch.device("meta"):
        module = MODELS[name]((3, 32, 32), 4, **options)
    train_last(module, 2)
    trained = [key.rpartition(".")[0] for key in trained_names(module)]
    assert list(dict.fromkeys(trained)) == layers


def frozen(how):
    module = net()
    if how == "last two":
        train_last(module, 2)
    else:
        freeze_norms(module)
    return module


@pytest.mark.parametrize("how", ["last two", "norms"])
def test_frozen_tensors_are_constants_of_the_network(how):
    network = Network(frozen(how), dtype=torch.float64)
    names = {"last two": ("0.", "1."), "norms": ("1.", "4.")}[how]
    whole = net().state_dict()
    assert set(network.frozen) == {name for name in whole if name.startswith(names)}
    assert network.params.keys() | network.buffers.keys() == whole.keys() - network.frozen.keys()
    assert network.layout.entries.keys() == whole.keys() - network.frozen.keys()
    assert network.num_parameters == sum(p.numel() for p in network.params.values())


@pytest.mark.parametrize("how", ["last two", "norms"])
@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "sequential"])
def test_the_engines_agree_on_a_model_that_is_partly_frozen(how, engine):
    def two_rounds(engine):
        return train(ONE_STEP, engine, 2, ragged(side=8), frozen(how))

    expected, found = two_rounds("sequential"), two_rounds(engine)
    start = net().state_dict()
    for key, tensor in (expected.params | expected.buffers).items():
        torch.testing.assert_close((found.params | found.buffers)[key], tensor)
        assert not torch.equal(tensor, start[key].double()), key


def test_training_the_last_layers_is_sgd_on_them_alone():
    federation = ragged((8,), side=8)
    module = without_dropout(frozen("last two"))
    moved = train(ONE_STEP, "sequential", 1, federation, module)
    module = module.double().train()
    module[1].eval()  # a frozen layer keeps its statistics
    logits = module(federation.examples.images)
    nn.functional.cross_entropy(logits, federation.examples.labels).backward()
    for name, p in module.named_parameters():
        assert (p.grad is None) == (name not in moved.params)
        if p.grad is not None:
            torch.testing.assert_close(moved.params[name], (p - 0.05 * p.grad).detach())


def without_dropout(module):
    module[6].p = 0.0
    return module


def test_frozen_statistics_are_used_in_training_and_never_move():
    module = without_dropout(net())
    module[1].running_mean.fill_(0.25)
    module[4].running_var.fill_(2.0)
    freeze_norms(module)
    network = Network(module, dtype=torch.float64)
    images = ragged(side=8).examples.images
    keys, mask = torch.zeros(1, dtype=torch.int64), torch.ones(1, len(images))
    params = {name: p[None] for name, p in network.params.items()}
    logits, _ = network.single(params, {}, images[None], keys, mask)
    torch.testing.assert_close(logits[0], module.double().eval()(images))
    torch.testing.assert_close(logits[0], network.predict(network.params, {}, images))
    assert bool((network.frozen["1.running_mean"] == 0.25).all())


def described(**changes):
    part = ragged(side=8).examples
    dataset = fl.Dataset("noise", part, part, tuple("abcd"))
    plain = {"dataset": dataset, "model": net(), "rounds": 2, "engine": "sequential"}
    return fl.Experiment(**plain | {"clients": fl.Clients(count=3)} | changes)


def test_an_experiment_sends_and_counts_what_it_trains():
    whole, last = build(described()).network, build(described(train=1)).network
    assert whole.num_parameters == sum(p.numel() for p in net().parameters())
    assert last.num_parameters == 4 * 4 * 64 + 4 and not last.buffers
    setup = build(described(norm="frozen", precision="bf16"))
    assert not setup.network.buffers and not setup.network.layout.norm_names
    assert fl.run(setup.experiment).status == "finished"
    result = fl.run(described(train=1))
    assert result.records[0]["bytes_up"] == 3 * 4 * last.num_parameters


def test_local_norms_that_are_frozen_are_no_clients_memory():
    result = fl.run(described(train=2, norm="local"))
    assert result.status == "finished"


def test_what_cannot_be_frozen_is_refused():
    still = net().requires_grad_(False)
    for changes, message in [
        ({"model": still}, "nothing to train: leave some parameters unfrozen"),
        ({"train": 9}, "train is 9, but the model has 3 layers: choose 1 to 3"),
        ({"model": "linear", "norm": "frozen"}, 'norm is "frozen", but the model has no such'),
    ]:
        with pytest.raises(ValueError) as refused:
            build(described(**changes))
        assert message in str(refused.value)
    with pytest.raises(ValueError, match="affine"):
        freeze_norms(nn.Sequential(nn.BatchNorm2d(3, affine=False)))
