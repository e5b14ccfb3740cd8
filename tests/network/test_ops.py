"""The operations that have two forms: what the plain ones compute, and where the others may run."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedlens
from fedlens.core import Number, keys
from fedlens.network import ops
from fedlens.network.layers import keyed_dropout
from fedlens.network.pool import Windows
from fedlens.network.stacked import products
from fedlens.network.stacked.epilogue import KeyedMask

HOME = Path(fedlens.__file__).parent
SHAPES = {"kernel": (5, 2, 3, 3), "bias": (5,)}


def tree(clients: int, seed: int) -> dict[str, Tensor]:
    """Parameters [C, ...], kernels in the memory layout that `stacked` has them in."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(clients, *s, generator=generator) for name, s in SHAPES.items()}
    kernel = made["kernel"].permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)
    return made | {"kernel": kernel}


def step(lr: Number, decay: Number, clients: int = 3, drift: bool = True) -> dict[str, Tensor]:
    params = tree(clients, 0)
    ops.local_step_(
        params, tree(clients, 1), tree(1, 2), tree(clients, 3) if drift else {}, lr, decay
    )
    return params


@pytest.mark.parametrize("drift", [True, False])
def test_a_local_step_is_its_equation(drift):
    lr, decay = 0.1, 0.7
    w, g, s, d = (tree(c, seed) for seed, c in enumerate((3, 3, 1, 3)))
    for name, found in step(lr, decay, drift=drift).items():
        push = g[name] + d[name] if drift else g[name]
        expected = s[name] + decay * (w[name] - s[name]) - lr * push
        torch.testing.assert_close(found, expected)


def test_a_local_step_with_floats_keeps_its_rounding():
    # Models of recorded runs depend on it: one rounding after each of these, in this order.
    w, g, s, d = (tree(c, seed) for seed, c in enumerate((3, 3, 1, 3)))
    for name, found in step(0.1, 0.7).items():
        expected = w[name].mul_(0.7).add_(s[name], alpha=1 - 0.7).add_(g[name], alpha=-0.1)
        assert torch.equal(found, expected.add_(d[name], alpha=-0.1))


def test_each_client_steps_by_its_own_numbers():
    lr, decay = torch.tensor([0.1, 0.2, 0.0]), torch.tensor([0.7, 1.0, 0.5])
    for name, found in step(lr, decay).items():
        for client in range(3):
            alone = step(float(lr[client]), float(decay[client]))[name][client]
            torch.testing.assert_close(found[client], alone)


def test_a_number_may_be_a_tensor_of_one():
    expected = step(0.25, 0.5)
    for lr, decay in ((torch.tensor(0.25), 0.5), (0.25, torch.tensor(0.5))):
        for name, found in step(lr, decay).items():
            torch.testing.assert_close(found, expected[name])


def test_only_the_named_parameters_step():
    params = tree(2, 0)
    bias = {"bias": params["bias"].clone()}
    ops.local_step_(bias, tree(2, 1), tree(1, 2), tree(2, 3), 0.1, 0.9)
    assert not torch.equal(bias["bias"], params["bias"])
    assert torch.equal(params["kernel"], tree(2, 0)["kernel"])


def test_dropout_of_many_clients_is_that_of_each():
    client_keys = keys.fold(keys.root(3), torch.arange(2))
    for shape in ((2, 3, 8), (2, 3, 4, 5, 6), (2, 3, 4, 5)):
        x = torch.randn(shape)
        found = ops.dropout(x, KeyedMask(client_keys, 0.3, 1, call=2))
        expected = [
            keyed_dropout(a, k, 0.3, 1, call=2) for a, k in zip(x, client_keys, strict=True)
        ]
        assert torch.equal(found, torch.stack(expected))


@pytest.mark.parametrize(
    ("outs", "p", "is_fused"), [(8, 0.5, True), (6, 0.5, False), (8, 0.0, False)]
)
def test_a_convolution_keeps_its_kernel_where_that_cannot_do_the_dropout(
    monkeypatch, outs, p, is_fused
):
    from fedlens.network.kernels import functions

    given = []

    def convolve(x, weight, bias, padding, stride, *, relu, pool, mask, tap):
        assert tap is None
        given.append(mask)
        y = pool.maxima(products.apply(products.Convolve, x, weight, bias, padding, stride))
        return y if mask is None else ops.dropped_images(y, mask)

    x, weight = torch.randn(4, 3, 6, 6), torch.randn(2, outs, 3, 3, 3)
    mask = KeyedMask(keys.fold(keys.root(3), torch.arange(2)), p, layer=1)
    expected = ops.convolve(x, weight, None, (0, 0, 0, 0), pool=Windows(), mask=mask)
    monkeypatch.setattr(ops, "_multiplies_in_triton", lambda _: True)
    monkeypatch.setattr(functions, "convolve", convolve)
    found = ops.convolve(x, weight, None, (0, 0, 0, 0), pool=Windows(), mask=mask)
    assert torch.equal(found, expected)
    assert [one is not None for one in given] == [is_fused]


def test_a_batch_that_weighs_nothing_has_no_loss():
    loss = ops.mean_cross_entropy(torch.randn(2, 4, 3), torch.zeros(2, 4).long(), torch.zeros(2, 4))
    assert torch.equal(loss, torch.zeros(2))


class TestStepsByKernels:
    """Where kernels step all tensors, were they on a GPU."""

    @pytest.fixture(autouse=True)
    def _as_on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(ops, "_takes_triton", lambda x: x.dtype is not torch.float64)

    def fits(self, to, others, numbers=(), server=()):
        return ops._step_as_they_lie(list(to), [list(o) for o in others], numbers, list(server))

    def test_tensors_that_lie_alike_fit(self):
        to, grads, server = (tree(c, 0).values() for c in (3, 3, 1))
        assert self.fits(to, [grads], (0.1, torch.rand(3), torch.tensor(0.5)), server)

    def test_tensors_that_lie_otherwise_do_not(self):
        to, grads = tree(3, 0), tree(3, 1)
        grads["kernel"] = grads["kernel"].contiguous()
        assert not self.fits(to.values(), [grads.values()])
        server = tree(1, 2) | {"kernel": tree(1, 2)["kernel"].contiguous()}
        assert not self.fits(to.values(), [tree(3, 1).values()], (), server.values())
        holes = torch.randn(3, 8)[:, ::2]
        assert not self.fits([holes], [holes])

    def test_other_dtypes_do_not(self):
        to = [t.double() for t in tree(3, 0).values()]
        assert not self.fits(to, [to])
        half = [t.bfloat16() for t in tree(3, 0).values()]
        assert not self.fits(half, [half])

    def test_an_axis_of_one_may_have_any_stride(self):
        to, grad = torch.randn(3, 4, 1), torch.randn(3, 4).as_strided((3, 4, 1), (4, 1, 9))
        assert self.fits([to], [[grad]]) and not self.fits([], [[]])

    def test_numbers_of_other_clients_do_not(self):
        to = [torch.randn(3, 4)]
        assert not self.fits(to, [to], (torch.rand(2),))
        assert not self.fits(to, [to], (torch.rand(3, dtype=torch.float64),))
        last = [torch.randn(4, 3).T]  # one client's numbers do not lie side by side
        assert self.fits(last, [last], (0.1,)) and not self.fits(last, [last], (torch.rand(3),))


def test_a_kernel_steps_some_tensors_at_a_time():
    everything = list(range(2 * ops.STEP_TENSORS + 3))
    parts = [everything[some] for some in ops._batches(len(everything))]
    assert [*itertools.chain(*parts)] == everything
    assert max(map(len, parts)) == ops.STEP_TENSORS


@pytest.mark.slow
def test_everything_trains_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import fedlens, fedlens.engines, fedlens.algorithms, fedlens.network.ops as ops\n"
        "assert not any(name.startswith('fedlens.network.kernels.') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_are_asked_for_in_one_place():
    asking = {
        str(path.relative_to(HOME))
        for path in HOME.rglob("*.py")
        if "network.kernels" in path.read_text() and path.parent.name != "kernels"
    }
    assert asking == {"network/ops.py"}


def test_the_vocabulary_of_algorithms_does_not_speak_of_kernels():
    for folder in ("pieces", "algorithms"):
        for path in (HOME / folder).glob("*.py"):
            words = set(re.findall(r"\w+", path.read_text().lower()))
            assert not words & {"triton", "fused", "has_kernels"}, path
