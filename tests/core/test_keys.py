"""Keys: the bits are pinned, look random, and depend on nothing but the words folded in."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.core import keys

words = st.integers(-(2**63), 2**63 - 1)


def splitmix(key: int, word: int) -> int:
    """The same hash in Python's whole numbers, as an unsigned number."""
    z = (key + word * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_bits_never_change():
    key = keys.root(0)
    assert key.item() == -2152535657050944081
    assert keys.fold(key, torch.arange(3)).tolist() == [
        5197578548964807871,
        -6411193824288604561,
        -5511663747979980962,
    ]
    assert keys.purpose("draw") == 3958905716670087988
    assert keys.shuffle_segments(np.array([0, 4, 10]), np.array([1, 2])).tolist() == [
        1,
        2,
        3,
        0,
        5,
        7,
        6,
        8,
        4,
        9,
    ]


def test_folding_is_splitmix64_of_a_published_stream():
    # The first outputs of splitmix64 seeded with 1234567 (rosettacode.org, Pseudo-random numbers).
    stream = keys.fold(torch.tensor(1234567), torch.arange(1, 4))
    unsigned = [value % 2**64 for value in stream.tolist()]
    assert unsigned == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(deadline=None)
@given(words, words)
def test_folding_is_the_same_arithmetic_as_in_whole_numbers(key, word):
    expected = splitmix(key, word)
    assert keys.fold(torch.tensor(key), word).item() % 2**64 == expected
    assert keys.fold(torch.tensor(key), torch.tensor(word)).item() % 2**64 == expected


@settings(deadline=None)
@given(words, words, words)
def test_words_are_folded_one_after_another_and_order_matters(key, a, b):
    k = torch.tensor(key)
    assert torch.equal(keys.fold(k, a, b), keys.fold(keys.fold(k, a), b))
    assert a == b or not torch.equal(keys.fold(k, a, b), keys.fold(k, b, a))


def test_folding_leaves_its_arguments_as_they_are():
    key, word = torch.tensor([3, 4]), torch.tensor([5, 6])
    keys.fold(key, 1, word)
    keys.fold(key)
    assert key.tolist() == [3, 4] and word.tolist() == [5, 6]


def test_tensors_of_words_broadcast():
    folded = keys.fold(torch.tensor([[1], [2]]), torch.arange(3))
    assert folded.shape == (2, 3)
    assert folded[1, 2] == keys.fold(torch.tensor(2), 2)


def test_a_million_counters_do_not_collide():
    assert len(keys.fold(keys.root(7), torch.arange(10**6)).unique()) == 10**6


def test_different_seeds_and_purposes_give_different_keys():
    seeds = [-1, 0, 1, 2**63, 2**64 - 2]
    assert len({keys.root(seed).item() for seed in seeds}) == len(seeds)
    assert keys.purpose("draw") != keys.purpose("select")
    assert 0 <= keys.purpose("draw") < 2**63


def test_words_can_be_folded_into_the_root_at_once():
    word = keys.purpose("select")
    for seed in (0, 1, -5, 2**63 - 1, 2**64 - 1):
        at_once = keys.root(seed, word, 7)
        assert at_once.item() == keys.fold(keys.root(seed), word, 7).item()
        assert at_once.item() == keys.fold(keys.root(seed), word, torch.tensor(7)).item()


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 62])
def test_flipping_any_bit_of_a_word_flips_half_of_the_bits(bit):
    word = torch.arange(4096)
    changed = keys.fold(keys.root(1), word) ^ keys.fold(keys.root(1), word ^ (1 << bit))
    ones = (changed[:, None] >> torch.arange(64)) & 1
    # 4096 coins have a standard deviation of 1/128; 64 of them stay within 5 of these.
    assert (ones.double().mean(0) - 0.5).abs().max() < 5 / 128


@pytest.mark.parametrize("axis", ["counter", "seed", "client"])
def test_uniform_numbers_are_uniform_along_every_axis(axis):
    n, cells = 100_000, 100
    if axis == "counter":
        drawn = keys.uniform(keys.fold(keys.root(5), torch.arange(n)))
    elif axis == "seed":
        drawn = keys.uniform(keys.fold(torch.arange(n), 3))
    else:
        drawn = keys.uniform(keys.fold(keys.root(5), torch.arange(n), 3))
    assert drawn.dtype == torch.float64 and drawn.min() >= 0 and drawn.max() < 1
    counts = torch.bincount((drawn * cells).long(), minlength=cells).double()
    chi_square = ((counts - n / cells) ** 2 / (n / cells)).sum()
    assert 50 < chi_square < 170  # 99 degrees of freedom: 1e-5 on either side


def test_neighbouring_counters_are_uncorrelated():
    drawn = keys.uniform(keys.fold(keys.root(5), torch.arange(100_001)))
    correlation = torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]))[0, 1]
    assert correlation.abs() < 5 / 100_000**0.5


def test_whole_numbers_below_a_bound_are_all_drawn_equally_often():
    drawn = keys.below(keys.fold(keys.root(2), torch.arange(90_000)), 9)
    counts = torch.bincount(drawn, minlength=9)
    assert len(counts) == 9 and (counts - 10_000).abs().max() < 500


def test_keys_are_the_same_under_vmap():
    batch = keys.fold(keys.root(3), torch.arange(5))

    def draw(key):
        return keys.uniform(keys.fold(key, 7, torch.arange(4))), keys.below(keys.fold(key, 1), 10)

    mapped = torch.func.vmap(draw)(batch)
    for row, key in enumerate(batch):
        numbers, whole = draw(key)
        assert torch.equal(mapped[0][row], numbers) and torch.equal(mapped[1][row], whole)


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), max_size=12), st.integers(0, 2**32))
def test_a_shuffle_permutes_inside_segments_whatever_stands_beside_them(sizes, seed):
    offsets = np.array([0, *sizes]).cumsum()
    segment_keys = keys.fold(keys.root(seed), torch.arange(len(sizes))).numpy()
    order = keys.shuffle_segments(offsets, segment_keys)
    assert len(order) == sum(sizes)
    for k, size in enumerate(sizes):
        inside = order[offsets[k] : offsets[k + 1]] - offsets[k]
        assert sorted(inside.tolist()) == list(range(size))
        alone = keys.shuffle_segments(np.array([0, size]), segment_keys[k : k + 1])
        assert np.array_equal(inside, alone)


def test_segments_of_one_length_are_shuffled_as_they_are_beside_another():
    own, ends = np.arange(4), np.array([0, 5, 10, 15, 16])
    alike = keys.shuffle_segments(ends[:-1], own[:-1])
    assert alike.tolist() == keys.shuffle_segments(ends, own)[:-1].tolist()


def test_every_position_of_a_shuffle_is_equally_likely():
    offsets = np.arange(0, 4 * 6001, 4)
    order = keys.shuffle_segments(offsets, keys.fold(keys.root(1).numpy(), np.arange(6000)))
    place = (order.reshape(6000, 4) - offsets[:-1, None]) @ [64, 16, 4, 1]
    counts = np.unique(place, return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 250) ** 2 / 250).sum() < 60  # 23 degrees of freedom


@given(st.integers(0, 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_the_bits_are_the_same_in_arrays_and_in_tensors(seed, word):
    words, key = torch.tensor([word, 0, -1, seed]), keys.root(seed)
    tensors, arrays = keys.fold(key, words, 3), keys.fold(key.numpy(), words.numpy(), 3)
    assert tensors.tolist() == arrays.tolist()
    assert keys.uniform(tensors).tolist() == keys.uniform(arrays).tolist()
    assert keys.below(tensors, 1000).tolist() == keys.below(arrays, 1000).tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_bits_are_the_same_on_a_gpu():
    host = keys.fold(keys.root(1), torch.arange(1000))
    device = keys.fold(keys.root(1), torch.arange(1000, device="cuda"))
    assert torch.equal(device.cpu(), host)
    assert torch.equal(keys.uniform(device).cpu(), keys.uniform(host))


def test_normal_numbers_have_mean_0_and_variance_1():
    drawn = keys.normal(keys.fold(keys.root(0), torch.arange(100_000)))
    assert abs(float(drawn.mean())) < 0.01 and float(drawn.var()) == pytest.approx(1.0, abs=0.02)
    assert float((drawn.abs() < 1.96).double().mean()) == pytest.approx(0.95, abs=0.005)
