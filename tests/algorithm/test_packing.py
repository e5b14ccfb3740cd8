"""What travels of an update: every number to the last bit, in as many bytes as are counted."""

from itertools import product
from math import ceil

import pytest
import torch

from fedlens.algorithm.channel import encode, first_memory, packed, unpacked
from fedlens.algorithms.clip import Clip
from fedlens.algorithms.eden import Eden
from fedlens.algorithms.powersgd import PowerSgd
from fedlens.algorithms.quantize import Quantize
from fedlens.algorithms.sign import Sign
from fedlens.algorithms.top_k import TopK
from fedlens.core import keys
from fedlens.core.bits import from_bits, to_bits
from fedlens.core.trees import map_tensors
from fedlens.network.layout import Layout

LAYOUT = Layout.of(torch.nn.Linear(50, 7))
START = torch.randn(7, 50, generator=torch.Generator().manual_seed(1))
CHANNELS = {
    "nothing": (),
    "clip": (Clip(0.5),),
    "loose clip": (Clip(1e9),),
    **{f"quantize to {bits}": (Quantize(bits),) for bits in (2, 3, 8, 13, 16)},
    "top-k": (TopK(0.1),),
    "top-k of all": (TopK(1.0),),
    "clip, quantize": (Clip(0.5), Quantize(4)),
    "quantize, top-k": (Quantize(5), TopK(0.2)),
    "top-k, quantize": (TopK(0.2), Quantize(5)),
    "sign": (Sign(),),
    "powersgd": (PowerSgd(2),),
    "powersgd, clip": (PowerSgd(1), Clip(1e9)),
    **{f"eden to {bits}": (Eden(bits),) for bits in (1, 2, 3, 4)},
    "eden, with the least error": (Eden(2, unbiased=False),),
    "top-k, eden": (TopK(0.2), Eden(3)),
    "sign, top-k": (Sign(feedback=False), TopK(0.2)),
}


def through(channel, update, seed=0):
    """An update after a channel, without its leading axis, and what was noted of it."""
    params = {"weight": START}
    memory = map_tensors(first_memory(channel, params), lambda t: t[None])
    sent = encode(channel, {"weight": update[None]}, memory, keys.root(seed)[None], LAYOUT)
    notes = {part: tree["weight"][0] for part, tree in sent.notes.items() if "weight" in tree}
    return sent.update["weight"].flatten(), notes


def sent_of(channel, seed=0):
    """An update of a client of float32 tensors."""
    draw = torch.Generator().manual_seed(seed)
    own = START + 0.1 * torch.randn(START.shape, generator=draw)
    return through(channel, own.double() - START.double(), seed)


@pytest.mark.parametrize("name", CHANNELS)
def test_all_numbers_arrive_in_the_bytes_that_are_counted(name):
    channel, start = CHANNELS[name], START.flatten()
    for seed in range(5):
        numbers, notes = sent_of(channel, seed)
        parts = packed(channel, numbers, "weight", notes, start)
        assert torch.equal(unpacked(channel, parts, len(numbers), start), numbers)
        bits = 32 * len(numbers)
        for step in channel:
            bits = step.num_bits(START.shape, bits, "weight")
        assert abs(sum(t.nbytes for t in parts.values()) - ceil(bits / 8)) <= 4, seed


@pytest.mark.parametrize("name", CHANNELS)
def test_zeros_arrive_as_zeros(name):
    channel = CHANNELS[name]
    zeros, notes = through(channel, torch.zeros(7, 50, dtype=torch.float64))
    assert not zeros.any()
    assert torch.equal(unpacked(channel, packed(channel, zeros, "weight", notes), 350), zeros)


def test_buffers_travel_as_they_are():
    for step in (TopK(0.1), Sign(), PowerSgd(1)):
        parts = packed((step,), torch.arange(20.0).double(), "buffer", {})
        assert parts.keys() == {"numbers"}
        assert step.num_bits(torch.Size((20,)), 640, "buffer") == 640


@pytest.mark.parametrize("steps", [(Quantize(4), Clip(0.1)), (Clip(0.1),), (Sign(),)])
def test_numbers_that_no_step_can_pack_arrive_as_they_are(steps):
    odd = torch.tensor([0.1, torch.nan, -torch.inf, 1e300], dtype=torch.float64)
    notes = dict.fromkeys((f"channel.{place}.scale" for place in (0, 1)), torch.ones(()))
    found = unpacked(steps, packed(steps, odd, "weight", notes), 4)
    assert found.view(torch.int64).tolist() == odd.view(torch.int64).tolist()


def test_whole_numbers_of_a_few_bits_lie_side_by_side():
    for width, count in product(range(1, 17), (0, 1, 7, 8, 65)):
        numbers = torch.randint(0, 2**width, (count,), generator=torch.Generator().manual_seed(3))
        content = to_bits(numbers, width)
        assert content.nbytes == ceil(count * width / 8)
        assert torch.equal(from_bits(content, count, width), numbers)


def changed(parts, **to):
    return {**parts, **{name.replace("_", "."): t for name, t in to.items()}}


def parts_of(step):
    numbers, notes = sent_of((step,))
    return packed((step,), numbers, "weight", notes)


SPARSE, COARSE = parts_of(TopK(0.2)), parts_of(Quantize(5))
LIES = {
    "a place before the first": (
        TopK(0.2),
        changed(SPARSE, **{"0_places": SPARSE["0.places"] - 99}),
    ),
    "a place after the last": (TopK(0.2), changed(SPARSE, **{"0_places": SPARSE["0.places"] + 99})),
    "places that are no integers": (TopK(0.2), changed(SPARSE, **{"0_places": SPARSE["numbers"]})),
    "fewer places": (TopK(0.2), changed(SPARSE, **{"0_places": SPARSE["0.places"][:-1]})),
    "more numbers": (TopK(0.2), changed(SPARSE, numbers=torch.zeros(350))),
    "no numbers": (TopK(0.2), {"0.places": SPARSE["0.places"]}),
    "numbers that are integers": (TopK(0.2), changed(SPARSE, numbers=SPARSE["0.places"])),
    "one part more": (TopK(0.2), changed(SPARSE, model=torch.zeros(350))),
    "fewer codes": (Quantize(5), changed(COARSE, **{"0_codes": COARSE["0.codes"][:-1]})),
    "no scale": (Quantize(5), {"0.codes": COARSE["0.codes"]}),
    "many scales": (Quantize(5), changed(COARSE, **{"0_scale": torch.zeros(350)})),
    "a step that does not pack": (Clip(1.0), {"0.codes": COARSE["0.codes"]}),
    "nothing": (Quantize(5), {}),
}


@pytest.mark.parametrize("lie", LIES)
def test_parts_that_cannot_be_are_refused(lie):
    step, parts = LIES[lie]
    with pytest.raises(ValueError, match=r"a tensor|its tensor"):
        unpacked((step,), parts, 350)
