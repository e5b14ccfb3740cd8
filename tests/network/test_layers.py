"""Keyed dropout and masked batch normalisation, alone, inside models, and under vmap."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from fedlens.core import keys
from fedlens.network.layers import (
    KeyedAttention,
    KeyedDropout,
    MaskedBatchNorm,
    group_norm,
    keyed_dropout,
    num_groups,
    prepare,
    side_inputs,
)

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Block(nn.Module):
    """A model with nested, shared and repeated layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout2d(0.3))
        self.fc = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.again = self.dropout

    def forward(self, x):
        x = self.norm(self.fc(self.body(x).mean((2, 3))))
        return torch.stack([self.dropout(x), self.again(x)])


def call(layer, x, **side):
    """A prepared layer's output with these keys or masks."""
    return functional_call(layer, side, (x,))


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(p):
    out = keyed_dropout(torch.ones(64, 3, 33, 33), keys.root(1), p, 0)
    n = out.numel()
    assert (out == 0).float().mean().item() == pytest.approx(p, abs=5 * (p * (1 - p) / n) ** 0.5)
    kept = out[out != 0].unique()
    assert len(kept) == 1 and kept.item() == pytest.approx(1 / (1 - p), rel=1e-4)


def test_dropout_of_nothing_and_of_everything():
    x = torch.randn(4, 5)
    assert torch.equal(keyed_dropout(x, keys.root(0), 0.0, 0), x)
    assert not keyed_dropout(x, keys.root(0), 1.0, 0).any()


def test_dropout_is_the_identity_in_eval_mode():
    x = torch.randn(4, 5)
    assert torch.equal(KeyedDropout(0.5, 0).eval()(x), x)


def test_a_mask_depends_on_key_layer_and_row_but_not_on_dtype_or_batch_size():
    ones = torch.ones(6, 200)
    mask = keyed_dropout(ones, keys.root(1), 0.5, 0) > 0
    assert torch.equal(mask, keyed_dropout(ones.to(torch.bfloat16), keys.root(1), 0.5, 0) > 0)
    assert torch.equal(mask[:4], keyed_dropout(ones[:4], keys.root(1), 0.5, 0) > 0)
    others = [
        keyed_dropout(ones, keys.root(2), 0.5, 0) > 0,
        keyed_dropout(ones, keys.root(1), 0.5, 1) > 0,
        keyed_dropout(ones, keys.root(1), 0.5, 0, call=1) > 0,
        mask.roll(1, 0),
    ]
    for other in others:
        assert 0.4 < (mask == other).float().mean() < 0.6


def test_a_mask_does_not_depend_on_the_memory_format():
    x = torch.randn(4, 6, 5, 5)
    last = keyed_dropout(x.to(memory_format=torch.channels_last), keys.root(1), 0.5, 0)
    assert torch.equal(last, keyed_dropout(x, keys.root(1), 0.5, 0))


def test_the_mask_never_changes():
    dropped = keyed_dropout(torch.ones(2, 10), keys.root(0), 0.5, 0).int().tolist()
    assert dropped == [[0, 0, 2, 0, 0, 2, 2, 0, 0, 2], [2, 0, 0, 2, 0, 2, 2, 2, 0, 2]]


def test_dropout2d_drops_whole_channels():
    out = keyed_dropout(torch.ones(50, 40, 3, 3), keys.root(0), 0.5, 0, channels=True)
    per_channel = out.flatten(2).sum(2)
    assert per_channel.unique().tolist() == [0, 18]
    assert 0.4 < (per_channel == 0).float().mean() < 0.6


def test_the_gradient_of_dropout_is_its_mask():
    x = torch.randn(3, 7, requires_grad=True)
    (slope,) = torch.autograd.grad(keyed_dropout(x, keys.root(0), 0.5, 0).sum(), x)
    assert torch.equal(slope, keyed_dropout(torch.ones(3, 7), keys.root(0), 0.5, 0))


def test_a_probability_outside_0_to_1_is_refused():
    with pytest.raises(ValueError, match="dropout"):
        KeyedDropout(1.5, 0)


SETTINGS = [
    {},
    {"momentum": None},
    {"momentum": 0.3, "eps": 1e-2},
    {"affine": False},
    {"track_running_stats": False},
]


def norm_pair(dims, settings):
    """A BatchNorm with something in its parameters and buffers, and the masked one."""
    torch.default_generator.manual_seed(0)
    kind = nn.BatchNorm1d if dims < 2 else nn.BatchNorm2d
    norm = kind(5, dtype=torch.float64, **settings)
    for tensor in [*norm.parameters(), *(b for b in norm.buffers() if b.is_floating_point())]:
        nn.init.uniform_(tensor, 0.5, 1.5)
    return norm, prepare(norm)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize("padding", ["garbage", "none", "an empty mask"])
def test_a_padded_batch_equals_pytorch_on_the_examples_alone(dims, settings, padding):
    norm, masked = norm_pair(dims, settings)
    for _ in range(3):
        real = torch.randn(6, 5, *[4] * dims, dtype=torch.float64) * 3 + 2
        mask = torch.ones(6)
        full = real
        if padding == "garbage":
            rows = torch.tensor([0, 2, 3, 5, 6, 8])  # examples need not come first
            full = torch.full((9, *real.shape[1:]), torch.inf, dtype=torch.float64)
            full[rows] = real
            mask = torch.zeros(9).index_fill(0, rows, 1.0)
        real.requires_grad_(True)
        full = full.detach().requires_grad_(True)
        out = norm(real)
        padded = call(masked, full, **({"mask": mask} if padding != "an empty mask" else {}))
        if padding == "garbage":
            padded = padded[rows]
        torch.testing.assert_close(padded, out, rtol=0, atol=1e-12)
        pull = torch.randn_like(out)
        inputs = (real, *norm.parameters())
        grads = torch.autograd.grad((out * pull).sum(), inputs)
        again = torch.autograd.grad((padded * pull).sum(), (full, *masked.parameters()))
        moved = again[0][mask != 0]
        torch.testing.assert_close((moved, *again[1:]), grads, rtol=0, atol=1e-12)
        for name in STATISTICS:
            a, b = getattr(masked, name), getattr(norm, name)
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_in_eval_mode_it_is_pytorchs(settings):
    norm, masked = norm_pair(2, settings)
    norm.eval(), masked.eval()
    x = torch.randn(6, 5, 3, 3, dtype=torch.float64)
    before = copy.deepcopy(masked.state_dict())
    torch.testing.assert_close(masked(x), norm(x), rtol=0, atol=1e-12)
    assert all(torch.equal(before[k], v) for k, v in masked.state_dict().items())


def test_a_batch_of_nothing_but_padding_leaves_the_statistics_as_they_are():
    for settings in SETTINGS[:3]:
        _, masked = norm_pair(2, settings)
        before = copy.deepcopy(masked.state_dict())
        out = call(masked, torch.randn(4, 5, 2, 2, dtype=torch.float64), mask=torch.zeros(4))
        assert out.isfinite().all()
        assert all(torch.equal(before[k], v) for k, v in masked.state_dict().items())


def test_statistics_of_low_precision_inputs_are_kept_in_float32():
    norm, masked = nn.BatchNorm2d(5), MaskedBatchNorm(nn.BatchNorm2d(5))
    x = (torch.randn(8, 5, 4, 4) + 100).to(torch.bfloat16)
    out = call(masked, x, mask=torch.ones(8))
    norm(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(masked.running_mean, norm.running_mean)


def test_an_input_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="5 channels"):
        MaskedBatchNorm(nn.BatchNorm1d(5))(torch.randn(4, 3))


def test_preparing_keeps_names_values_and_modes_and_does_not_touch_the_original():
    torch.default_generator.manual_seed(0)
    model = Block()
    model.body[1].eval()
    model.fc.weight.requires_grad_(False)
    before = {name: type(m) for name, m in model.named_modules()}
    prepared: Any = prepare(model)
    assert {name: type(m) for name, m in model.named_modules()} == before
    expected, state = model.state_dict(), prepared.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert all(a is not b for a, b in zip(prepared.parameters(), model.parameters(), strict=True))
    assert isinstance(prepared.body[1], MaskedBatchNorm) and not prepared.body[1].training
    assert not prepared.fc.weight.requires_grad
    assert prepared.dropout is prepared.again
    prepared.load_state_dict(expected)


def test_side_inputs_are_named_as_functional_call_wants_them():
    names = side_inputs(prepare(Block()))
    assert names == (["body.2.key", "dropout.key"], ["body.1.mask", "norm.mask"])
    assert side_inputs(prepare(nn.Dropout(0.5))) == (["key"], [])
    assert side_inputs(nn.Linear(2, 2)) == ([], [])


def test_what_is_not_supported_is_left_alone():
    class Own(nn.BatchNorm2d):
        pass

    model = nn.Sequential(nn.AlphaDropout(0.5), Own(3), nn.BatchNorm3d(3))
    assert [type(m) for m in prepare(model).children()] == [nn.AlphaDropout, Own, nn.BatchNorm3d]


def test_every_layer_and_every_place_draws_its_own_mask_and_each_pass_the_same():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    assert [m.layer for m in prepare(model).children()] == [0, 1]
    prepared = pickle.loads(pickle.dumps(prepare(Block()))).requires_grad_(False)
    x = torch.randn(8, 3, 6, 6)
    first, second = prepared(x)
    assert not torch.equal(first == 0, second == 0)
    assert torch.equal(prepared(x), torch.stack([first, second]))


def test_preparing_twice_is_preparing_once():
    once = prepare(Block())
    assert str(prepare(once)) == str(once)


def test_dropout_draws_no_numbers_from_torchs_generator():
    torch.default_generator.manual_seed(0)
    state = torch.get_rng_state()
    prepare(nn.Dropout(0.5))(torch.ones(4, 4))
    assert torch.equal(torch.get_rng_state(), state)


ATTENTIONS = {
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "keys of another size": {"kdim": 6, "vdim": 10, "batch_first": True},
}


@pytest.mark.parametrize("settings", ATTENTIONS.values(), ids=list(ATTENTIONS))
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_pytorchs_but_for_what_is_dropped(settings, masked):
    """With a share of 2^-20, which is rounded to nothing: its values, weights and gradients."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, dropout=0.0, **settings).double()
    dropping = copy.deepcopy(plain)
    dropping.dropout = 2.0**-20
    keyed: Any = prepare(dropping)
    assert isinstance(keyed, KeyedAttention)
    assert list(keyed.state_dict()) == list(plain.state_dict())
    sizes = (8, settings.get("kdim", 8), settings.get("vdim", 8))
    lengths = (5, 4, 4)
    given = [torch.randn(3, n, size).double() for n, size in zip(lengths, sizes, strict=True)]
    if not settings.get("batch_first"):
        given = [x.transpose(0, 1) for x in given]
    masks: dict[str, Any] = {}
    if masked:
        masks["attn_mask"] = torch.rand(6, 5, 4) < 0.3
        masks["attn_mask"][..., 0] = False
        masks["key_padding_mask"] = torch.tensor([[False] * 4, [False, True] * 2, [False] * 4])
    for one in (plain.train(), keyed.train()):
        out, weights = one(*given, **masks)
        (out.square().sum() + weights.square().sum()).backward()
        torch.testing.assert_close(out, plain(*given, **masks)[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(weights, plain(*given, **masks)[1], rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(keyed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-11, msg=name)


def test_attention_drops_its_weights_by_key():
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    keyed: Any = prepare(attention)
    x, state = torch.randn(4, 16, 8), torch.get_rng_state()
    keyed.train()
    _, weights = keyed(x, x, x, average_attn_weights=False)
    assert torch.equal(torch.get_rng_state(), state)
    dropped = float((weights == 0).double().mean())
    assert abs(dropped - 0.5) < 4 * math.sqrt(0.25 / weights.numel())
    keyed.eval()
    attention.eval()
    assert torch.equal(keyed(x, x, x)[0], attention(x, x, x)[0])


@pytest.mark.parametrize("ragged", [True, False])
def test_under_vmap_each_client_gets_what_it_gets_alone(ragged):
    num_clients, size = 3, 6
    torch.default_generator.manual_seed(0)
    models = [prepare(Block().double()) for _ in range(num_clients)]
    params, buffers = stack_module_state(models)
    key_names, mask_names = side_inputs(models[0])
    client_keys = keys.fold(keys.root(4), torch.arange(num_clients))
    counts = torch.tensor([6, 4, 2])
    mask = (torch.arange(size) < counts[:, None]).float() if ragged else torch.ones(3, 0)
    for name in key_names:
        buffers[name] = client_keys
    for name in mask_names:
        buffers[name] = mask
    images = torch.randn(num_clients, size, 3, 6, 6, dtype=torch.float64)

    def apply(params, buffers, x):
        return functional_call(models[0], (params, buffers), (x,))

    out = vmap(apply)(params, buffers, images)
    out.square().sum().backward()
    for c, model in enumerate(models):
        side = dict.fromkeys(key_names, client_keys[c])
        side |= dict.fromkeys(mask_names, mask[c])
        alone = functional_call(model, side, (images[c],))
        alone.square().sum().backward()
        torch.testing.assert_close(out[c], alone, rtol=0, atol=1e-12)
        for name, p in model.named_parameters():
            torch.testing.assert_close(params[name].grad[c], p.grad, rtol=1e-11, atol=1e-11)
        for name in ("body.1", "norm"):
            for statistic in STATISTICS:
                mine = getattr(model.get_submodule(name), statistic)
                torch.testing.assert_close(buffers[f"{name}.{statistic}"][c], mine)
                assert statistic != "num_batches_tracked" or mine == 1


def test_a_cumulative_average_works_under_vmap():
    norms = [prepare(nn.BatchNorm2d(2, momentum=None)) for _ in range(2)]
    params, buffers = stack_module_state(norms)
    x = torch.randn(2, 4, 2, 3, 3)
    for _ in range(2):
        vmap(lambda p, b, x: functional_call(norms[0], (p, b), (x,)))(params, buffers, x)
    torch.testing.assert_close(buffers["running_mean"], x.mean((1, 3, 4)))


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(1, 1), (3, 1), (7, 1), (8, 2), (16, 4), (24, 6), (64, 16), (128, 32), (144, 24), (512, 32)],
)
def test_the_number_of_groups_leaves_four_channels_a_group(channels, groups):
    assert num_groups(channels) == groups


def test_group_norm_takes_the_place_of_every_batch_norm():
    model = Block()
    nn.init.zeros_(model.norm.weight)
    grouped: Any = group_norm(model)
    assert isinstance(grouped.norm, nn.GroupNorm) and isinstance(grouped.body[1], nn.GroupNorm)
    assert isinstance(model.norm, nn.BatchNorm1d)
    assert list(grouped.state_dict()) == list(dict(model.named_parameters()))
    assert not grouped.norm.weight.any()
    assert grouped(torch.randn(1, 3, 6, 6)).isfinite().all()


def test_group_norm_replaces_masked_and_plain_layers_alike():
    norm = nn.BatchNorm2d(8, affine=False)
    for module in (norm, prepare(norm)):
        grouped = group_norm(module)
        assert isinstance(grouped, nn.GroupNorm) and grouped.num_groups == 2
        assert not list(grouped.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mask_is_the_same_on_a_gpu():
    x = torch.randn(8, 3, 7, 7)
    out = keyed_dropout(x.cuda(), keys.root(1).cuda(), 0.3, 2)
    assert torch.equal(out.cpu() == 0, keyed_dropout(x, keys.root(1), 0.3, 2) == 0)
