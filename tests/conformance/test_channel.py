"""Steps between upload and combine: clip and quantize, alone and with whatever else there is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedlens as fl
from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.channel import encode
from fedlens.algorithm.pieces import OwnModel, Uniformly, difference
from fedlens.algorithm.slots import ChannelStep, Decoded, Encoded
from fedlens.algorithms.admm import fedadmm
from fedlens.algorithms.clip import Clip, clip
from fedlens.algorithms.eden import Eden, eden
from fedlens.algorithms.median import median
from fedlens.algorithms.powersgd import PowerSgd, powersgd
from fedlens.algorithms.quantize import Quantize, quantize
from fedlens.algorithms.sign import Sign, sign
from fedlens.algorithms.top_k import TopK, top_k
from fedlens.core import Cohort, Local, Memory, Tree, Upload, keys, per_row
from fedlens.engines import Sequential
from fedlens.network.layout import Layout
from fedlens.network.network import Network
from fedlens.rounds import Outcome, State, begin, run_round
from fedlens.rounds.client import ClientProgram
from tests.federations import CPU, FEW, assert_equal, noisy_images, small_cnn, train
from tests.papers_under_test import ALGORITHMS, BASE, PLAIN

LAYOUT = Layout.of(torch.nn.Linear(2, 1, bias=False))


def keys_of(clients: int) -> Tensor:
    return keys.fold(keys.root(0), torch.arange(clients))


def rounds(
    algorithm: Algorithm, number: int = 1, norm: str = "group", sizes: list[int] = FEW
) -> tuple[State, Outcome]:
    federation, network = noisy_images(sizes), Network(small_cnn(norm), dtype=torch.float64)
    program = ClientProgram(algorithm, network.layout)
    engine = Sequential(network, federation.examples)
    state = begin(network, program, federation, CPU)
    for _ in range(number):
        state, outcome = run_round(program, federation, engine, state, seed=0)
    return state, outcome


def test_two_updates_are_clipped_as_worked_out_by_hand():
    update = {"weight": torch.tensor([[[3.0, 4.0]], [[0.0, 0.5]]], dtype=torch.float64)}
    sent, scalars, *_ = Clip(1.0).encode(update, {}, keys_of(2), LAYOUT)
    expected = torch.tensor([[[0.6, 0.8]], [[0.0, 0.5]]], dtype=torch.float64)
    torch.testing.assert_close(sent["weight"], expected)
    assert scalars["clipped_share"].tolist() == [1, 0]


def test_a_norm_that_nobody_reaches_is_fedavg_byte_for_byte():
    plain, _ = rounds(BASE, 2, "batch")
    loose, outcome = rounds(compose(BASE, clip(norm=1e6)), 2, "batch")
    assert_equal(found=loose.params | loose.buffers, expected=plain.params | plain.buffers)
    assert float(outcome.scalars["clipped_share"]) == 0


def test_no_update_is_longer_than_the_norm_and_buffers_are_left_as_they_are():
    one = replace(BASE, select=Uniformly(1))
    start = Network(small_cnn("batch"), dtype=torch.float64).params
    plain, _ = rounds(one, norm="batch")
    short, outcome = rounds(compose(one, clip(norm=0.01)), norm="batch")
    moved = [(short.params[name] - start[name]).square().sum() for name in start]
    assert float(torch.stack(moved).sum().sqrt()) == pytest.approx(0.01)
    assert_equal(found=short.buffers, expected=plain.buffers)
    assert float(outcome.scalars["clipped_share"]) == 1


def send_number(local: Local) -> Upload:
    """An update whose every entry is the number of the client."""
    assert local.clients is not None
    plain = difference(local).update
    return Upload(
        {name: torch.zeros_like(u) + per_row(local.clients, u) for name, u in plain.items()}
    )


@dataclass(frozen=True)
class ClipsClientZero(ChannelStep):
    """Says that it clipped client 0 and nobody else."""

    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        (number, *_) = (u.flatten(1)[:, 0] for u in update.values())
        return Encoded(update, {"clipped_share": (number == 0).double()})


def test_the_share_that_is_clipped_counts_clients_not_examples():
    federation, network = noisy_images([10, 10, 100]), Network(small_cnn(), dtype=torch.float64)
    algorithm = replace(
        PLAIN, select=Uniformly(3), upload=send_number, channel=(ClipsClientZero(),)
    )
    program = ClientProgram(algorithm, network.layout)
    engine = Sequential(network, federation.examples)
    state = begin(network, program, federation, CPU)
    _, outcome = run_round(program, federation, engine, state, seed=0)
    assert float(outcome.scalars["clipped_share"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_rounding_is_right_in_expectation_and_never_off_by_more_than_a_level(bits):
    values = torch.linspace(-1, 1, 101, dtype=torch.float64) ** 3
    clients = 4000
    update = {"w": values.expand(clients, -1)}
    sent = Quantize(bits).encode(update, {}, keys_of(clients), LAYOUT).update["w"]
    level = 1 / (2 ** (bits - 1) - 1)
    assert float((sent - values).abs().max()) < level * (1 + 1e-6)
    # The mean of n draws that are off by at most a level: five standard errors.
    assert float((sent.mean(0) - values).abs().max()) < 5 * level / 2 / clients**0.5
    assert len(sent.unique()) <= 2**bits - 1


def test_what_a_client_draws_depends_on_its_key_alone():
    torch.default_generator.manual_seed(0)
    update = {"a": torch.randn(5, 3, 4, dtype=torch.float64), "b": torch.randn(5, 7).double()}
    together = Quantize(4).encode(update, {}, keys_of(5), LAYOUT).update
    for row in (0, 3):
        alone = {name: u[row : row + 1] for name, u in update.items()}
        again = Quantize(4).encode(alone, {}, keys_of(5)[row : row + 1], LAYOUT).update
        assert_equal(found=again, expected={name: u[row : row + 1] for name, u in together.items()})
    a, b = ({"w": torch.full((1, 64), 0.3, dtype=torch.float64)} for _ in range(2))
    one = Quantize(2).encode(a, {}, keys_of(2)[:1], LAYOUT).update["w"]
    other = Quantize(2).encode(b, {}, keys_of(2)[1:], LAYOUT).update["w"]
    assert torch.equal(one, other) is (one.unique().numel() == 1), "the largest entry is exact"


def test_nothing_stays_nothing():
    update = {"w": torch.zeros(2, 5, dtype=torch.float64)}
    assert not Quantize(8).encode(update, {}, keys_of(2), LAYOUT).update["w"].any()


def test_bytes_are_those_that_are_really_sent():
    model = Network(small_cnn(), dtype=torch.float64).params
    entries, tensors = sum(p.numel() for p in model.values()), len(model)
    _, plain = rounds(BASE)
    _, clipped = rounds(compose(BASE, clip(norm=1.0)))
    _, small = rounds(compose(BASE, quantize(bits=8)))
    _, both = rounds(compose(BASE, clip(norm=1.0), quantize(bits=4)))
    assert plain.bytes_up == clipped.bytes_up == 5 * 4 * entries
    assert small.bytes_up == 5 * (entries + 4 * tensors)
    four = sum(-(-(4 * p.numel() + 32) // 8) for p in model.values())
    assert both.bytes_up == 5 * four
    assert plain.bytes_down == small.bytes_down == 5 * 4 * entries


@pytest.mark.slow
def test_the_mean_of_what_admm_clients_keep_is_the_server_model_whatever_the_channel_does():
    """The server holds the mean of what clients last sent, as it read it: they must know that."""
    everyone = replace(PLAIN, select=Uniformly(10))
    for channel in ((), (quantize(bits=4),), (clip(norm=0.05), quantize(bits=3))):
        algorithm = compose(everyone, fedadmm(rho=0.1), *channel)
        state, _ = rounds(algorithm, 3)
        sizes = torch.tensor(FEW, dtype=torch.float64)
        for name, value in state.params.items():
            z = torch.stack([state.clients.rows[k]["z"][name] for k in range(10)])
            mean = torch.tensordot(sizes / sizes.sum(), z, dims=1)
            torch.testing.assert_close(value, mean, rtol=1e-9, atol=1e-11)


@dataclass(frozen=True)
class Scaled(ChannelStep):
    """Clients send so much more, and the server takes it back."""

    factor: float
    linear: ClassVar[bool] = True

    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        return Encoded({name: u * self.factor for name, u in update.items()})

    def decode(
        self, combined: Tree, key: Tensor, cohort: Cohort, memory: Memory, round: int
    ) -> Decoded:
        return Decoded({name: u / self.factor for name, u in combined.items()})


@dataclass(frozen=True)
class Shifted(Scaled):
    """The same by a sum, which is undone after the mean."""

    linear: ClassVar[bool] = False

    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        return Encoded({name: u + self.factor for name, u in update.items()})

    def decode(
        self, combined: Tree, key: Tensor, cohort: Cohort, memory: Memory, round: int
    ) -> Decoded:
        return Decoded({name: u - self.factor for name, u in combined.items()})


@pytest.mark.parametrize("engine", ["sequential", "stacked, two at a time", "processes"])
@pytest.mark.parametrize("base", [BASE, compose(BASE, median())], ids=["mean", "median"])
def test_server_halves_undo_client_halves_in_reverse_order(base, engine):
    expected = train(base, "sequential")
    there_and_back = replace(base, channel=(Shifted(0.5), Scaled(4.0)))
    assert not there_and_back.sums_parts
    found = train(there_and_back, engine)
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-9, atol=1e-11)
    swapped = train(replace(base, channel=(Scaled(4.0), Shifted(0.5))), engine)
    torch.testing.assert_close(swapped.params, expected.params, rtol=1e-9, atol=1e-11)


def test_a_linear_channel_leaves_a_linear_combine_linear():
    assert compose(BASE, clip(), quantize()).sums_parts
    assert not compose(BASE, median(), clip()).sums_parts


SENDS = [
    name
    for name, algorithm in ALGORITHMS.items()
    if not algorithm.channel and not isinstance(algorithm.personal, OwnModel)
]


@pytest.mark.parametrize("name", SENDS)
def test_every_algorithm_takes_a_channel_that_does_nothing(name):
    """Clipping to a norm that nobody reaches changes no byte of any algorithm."""
    plain, _ = rounds(ALGORITHMS[name], 2, sizes=FEW)
    through, _ = rounds(compose(ALGORITHMS[name], clip(norm=1e9)), 2, sizes=FEW)
    assert_equal(found=through.params, expected=plain.params)


def sums(sizes: list[int], number: int, algorithm: Algorithm) -> tuple[Tree, Tree]:
    """What the server moved by in some rounds of one client, and what the client remembers."""
    start = Network(small_cnn(), dtype=torch.float64).params
    state, _ = rounds(algorithm, number, sizes=sizes)
    moved = {name: p - start[name] for name, p in state.params.items()}
    return moved, state.clients.rows[0]["channel.0.error"]


@pytest.mark.parametrize("step", [TopK(0.01), TopK(0.3), Sign(), PowerSgd(1)], ids=repr)
def test_what_was_sent_and_what_is_remembered_are_the_sum_of_all_updates(step):
    rng = torch.Generator().manual_seed(0)
    memory = of_two_clients(step.init({"weight": torch.zeros(4, 16)}))
    sent = whole = torch.zeros(2, 4, 16, dtype=torch.float64)
    for _ in range(20):
        # Quarters, so that no sum rounds.
        u = torch.randint(-40, 40, (2, 4, 16), generator=rng).double() / 4
        encoded = step.encode({"weight": u}, memory, keys_of(2), LAYOUT)
        if isinstance(step, TopK):
            few = -(-64 * step.share // 1)
            assert ((encoded.update["weight"] != 0).flatten(1).sum(1) <= few).all()
        sent, whole, memory = sent + encoded.update["weight"], whole + u, dict(encoded.memory)
    most = 1e-6 if isinstance(step, PowerSgd) else 0  # its sums round
    torch.testing.assert_close(memory["error"]["weight"], whole - sent, rtol=most, atol=most)


@pytest.mark.parametrize(
    "step", [top_k(share=0.1), sign(), powersgd(1)], ids=lambda step: step.name
)
def test_a_client_remembers_what_it_did_not_send_until_its_next_round(step):
    alone = replace(PLAIN, select=Uniformly(1))
    moved, error = sums([24], 1, compose(alone, step))
    whole, _ = rounds(alone, 1, sizes=[24])
    start = Network(small_cnn(), dtype=torch.float64).params
    for name, p in whole.params.items():
        torch.testing.assert_close(moved[name] + error[name], p - start[name])
        assert error[name].any() or (step.name == "powersgd" and p.dim() < 2)


def of_two_clients(memory: Memory) -> Memory:
    return {
        part: {n: t.expand(2, *t.shape) for n, t in tree.items()} for part, tree in memory.items()
    }


def test_signs_leave_out_what_the_paper_says():
    """||e||^2 = (1 - ||p||_1^2 / (n ||p||^2)) ||p||^2: nothing of entries of one magnitude."""
    p = torch.randn(2, 40, 25, generator=torch.Generator().manual_seed(0)).double()
    left = p - Sign(False).encode({"weight": p}, {}, keys_of(2), LAYOUT).update["weight"]
    flat = p.flatten(1)
    kept = flat.norm(p=1, dim=1).square() / (1000 * flat.square().sum(1))
    found = left.flatten(1).square().sum(1)
    torch.testing.assert_close(found, (1 - kept) * flat.square().sum(1), rtol=1e-6, atol=0)
    alike = 0.75 * torch.where(p < 0, -1.0, 1.0).double()
    sent = Sign(False).encode({"weight": alike}, {}, keys_of(2), LAYOUT).update["weight"]
    assert torch.equal(sent, alike)


def test_with_error_feedback_signs_are_right_in_the_long_run():
    """The same update in 400 rounds: the mean of what is sent comes near it, not without e."""
    u = torch.tensor([[[4.0, 1.0, 0.5, -0.1]]], dtype=torch.float64)
    mean = {}
    for step in (Sign(), Sign(False)):
        memory = {
            name: {n: t[None] for n, t in tree.items()}
            for name, tree in step.init({"weight": torch.zeros(1, 4)}).items()
        }
        total = torch.zeros_like(u)
        for _ in range(400):
            encoded = step.encode({"weight": u}, memory, keys_of(1), LAYOUT)
            total, memory = total + encoded.update["weight"], dict(encoded.memory)
        mean[step.feedback] = float((total / 400 - u).abs().max())
    assert mean[True] < 0.03 < 1 < mean[False]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_matrix_of_low_rank_is_sent_exactly(rank):
    """Up to float32; and what is beyond its rank is the error that is remembered."""
    draw = torch.Generator().manual_seed(rank)
    a, b = (torch.randn(2, size, rank, generator=draw).double() for size in (40, 25))
    for step in (PowerSgd(rank), PowerSgd(rank + 2)):
        memory = of_two_clients(step.init({"weight": torch.zeros(40, 25)}))
        for _ in range(2):
            u = {"weight": a @ b.transpose(1, 2)}
            encoded = step.encode(u, memory, keys_of(2), LAYOUT)
            memory = dict(encoded.memory)
        torch.testing.assert_close(encoded.update["weight"], u["weight"], rtol=1e-5, atol=1e-5)


def test_the_columns_of_a_round_before_come_nearer_to_the_largest_directions():
    """The same matrix again and again, without feedback: the error falls to that of the SVD."""
    m = torch.randn(1, 30, 20, generator=torch.Generator().manual_seed(0)).double()
    best = float(torch.linalg.svdvals(m[0])[2:].norm())
    step, errors = PowerSgd(2, feedback=False), list[float]()
    memory = {"q": {"weight": step.init({"weight": torch.zeros(30, 20)})["q"]["weight"][None]}}
    for _ in range(60):
        encoded = step.encode({"weight": m}, memory, keys_of(1), LAYOUT)
        memory = dict(encoded.memory)
        errors.append(float((m - encoded.update["weight"]).norm()))
    assert errors[0] > 1.05 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_a_matrix_of_zeros_does_not_end_what_powersgd_sends():
    step = PowerSgd(1)
    memory = of_two_clients(step.init({"weight": torch.zeros(6, 8)}))
    nothing = step.encode({"weight": torch.zeros(2, 6, 8).double()}, memory, keys_of(2), LAYOUT)
    assert not nothing.update["weight"].any()
    ones = {"weight": torch.ones(2, 6, 8).double()}
    again = step.encode(ones, dict(nothing.memory), keys_of(2), LAYOUT)
    torch.testing.assert_close(again.update["weight"], ones["weight"], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("unbiased", "errors"),
    [(True, (0.5708, 0.1331, 0.0358, 0.0096)), (False, (0.3634, 0.1175, 0.0346, 0.0095))],
)
@pytest.mark.parametrize("kind", ["a power of two", "another size", "few large entries"])
def test_eden_leaves_the_error_that_its_paper_says(unbiased, errors, kind):
    draw = torch.Generator().manual_seed(0)
    size = 4096 if kind == "a power of two" else 5000
    x = torch.randn(20, size, generator=draw).double()
    if kind == "few large entries":
        x = x**5
    for bits, expected in enumerate(errors, 1):
        sent = Eden(bits, unbiased).encode({"weight": x}, {}, keys_of(20), LAYOUT).update["weight"]
        error = (x - sent).square().sum(1) / x.square().sum(1)
        assert float(error.mean()) == pytest.approx(expected, rel=0.03)


def test_eden_is_right_in_expectation():
    """The mean over 4,000 seeds; without `unbiased` it is too short."""
    x = torch.linspace(-1, 2, 48, dtype=torch.float64).expand(4000, 48)
    means = [
        Eden(1, one).encode({"weight": x}, {}, keys_of(4000), LAYOUT).update["weight"].mean(0)
        for one in (True, False)
    ]
    along = [float((mean * x[0]).sum() / x[0].square().sum()) for mean in means]
    assert along[0] == pytest.approx(1, abs=1e-6)  # of each seed, by the choice of S
    assert along[1] == pytest.approx(2 / torch.pi, abs=0.02)
    assert float((means[0] - x[0]).norm() / x[0].norm()) < 0.05


def test_the_levels_of_eden_are_those_of_lloyd_and_max():
    """Each level is the mean of a normal number that is nearest to it."""
    from fedlens.algorithms.eden import LEVELS

    normal = torch.distributions.Normal(0.0, 1.0)
    for above in LEVELS.values():
        c = torch.tensor([*above], dtype=torch.float64)
        ends = torch.cat([torch.zeros(1), (c[1:] + c[:-1]) / 2, torch.tensor([40.0])]).double()
        density, below = normal.log_prob(ends).exp(), normal.cdf(ends)
        mean = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
        torch.testing.assert_close(mean, c, rtol=1e-6, atol=0)


def test_all_of_an_update_is_fedavg_byte_for_byte():
    plain, _ = rounds(BASE, 2, "batch")
    found, _ = rounds(compose(BASE, top_k(share=1.0)), 2, "batch")
    assert_equal(found=found.params | found.buffers, expected=plain.params | plain.buffers)


def test_mistakes_are_refused():
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share"):
            compose(BASE, top_k(share=share))
    wrong: Mapping[str, Any] = {"norm is 0": clip(norm=0.0), "norm is -1": clip(norm=-1.0)}
    for message, step in wrong.items():
        with pytest.raises(ValueError, match=message):
            compose(BASE, step)
    for rank in (0, -1):
        with pytest.raises(ValueError, match=f"rank is {rank}: choose 1"):
            compose(BASE, powersgd(rank=rank))
    for bits in (0, 5):
        with pytest.raises(ValueError, match=f"bits is {bits}: choose 1 to 4"):
            compose(BASE, eden(bits=bits))
    for bits in (0, 1, 17):
        with pytest.raises(ValueError, match=f"bits is {bits}: choose 2 to 16"):
            compose(BASE, quantize(bits=bits))


def test_an_experiment_names_channel_steps_like_algorithms():
    experiment = fl.Experiment.of(
        {
            "dataset": "fashion-mnist-mini",
            "model": "linear",
            "rounds": 2,
            "clients": {"count": 5},
            "algorithm": [
                "scaffold",
                {"name": "clip", "norm": 1.0},
                {"name": "quantize", "bits": 8},
            ],
        }
    )
    result = fl.run(experiment)
    assert all(0 <= record["clipped_share"] <= 1 for record in result.records)
    numbers = 7850
    assert result.records[0]["bytes_up"] == 5 * (numbers + 2 * 4 + 4 * numbers)  # and the control


@dataclass(frozen=True)
class InPlace(Clip):
    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        for tensor in update.values():
            tensor.mul_(0.5)
        return Encoded(update)


@dataclass(frozen=True)
class WrongReturn(Clip):
    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        return update  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (InPlace(1.0), r"InPlace \(test_channel.py, line \d+\) writes into the update"),
        (WrongReturn(1.0), r"WrongReturn \(test_channel.py, line \d+\) gave dict: let it return"),
    ],
)
def test_a_step_that_breaks_the_rules_of_encode_is_refused(step: Clip, message: str) -> None:
    update = {"w": torch.ones(2, 3, dtype=torch.float64)}
    with pytest.raises(ValueError, match=message):
        encode([step], update, {}, keys_of(2), LAYOUT)
