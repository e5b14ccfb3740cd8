from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedlens.config import options
from fedlens.core.federation import Examples, Holdings, Pool
from fedlens.data.emd import emd
from fedlens.data.partitions import PARTITIONS
from fedlens.data.partitions.dealing import _without_replacement, apply_partition
from tests.counting import num_calls

ALPHAS = [0.0, 1e-320, 1e-12, 1e-3, 0.1, 1.0, 100.0, 1e6, 1e308, math.inf]
COMPLETE: dict[str, tuple[str, dict[str, Any]]] = {
    "iid": ("iid", {}),
    "proportions": ("proportions", {}),
    "shards": ("shards", {"per_client": 1}),
    "slices": ("slices", {"mixed": 0}),
    "classes": ("classes", {"per_client": 1}),
} | {
    f"{name}-{alpha}": (name, {"alpha": alpha})
    for name in ("dirichlet", "dirichlet-per-class")
    for alpha in ALPHAS
}


def examples_of(labels: Any) -> Examples:
    labels = torch.as_tensor(labels, dtype=torch.int64)
    return Examples(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), labels)


def balanced(num_examples: int, num_classes: int) -> Examples:
    return examples_of(np.random.default_rng(0).permutation(np.arange(num_examples) % num_classes))


def split(name: str, examples: Examples, num_clients: int, seed: int = 0, **given: Any) -> Holdings:
    held = PARTITIONS[name](Pool(examples, 100, num_clients, np.random.default_rng(seed)), **given)
    assert isinstance(held, Holdings)
    return held


def counts(holdings: Holdings, examples: Examples) -> np.ndarray[Any, Any]:
    return holdings.label_counts(examples.labels, 100).numpy()


@st.composite
def skewed(draw: Callable[..., Any]) -> tuple[Examples, int]:
    """Examples whose classes are of any size, with gaps, in any order, and some clients."""
    sizes = draw(st.dictionaries(st.integers(0, 30), st.integers(1, 60), min_size=1, max_size=8))
    labels = np.repeat(list(sizes), list(sizes.values()))
    seed = draw(st.integers(0, 2**32 - 1))
    labels = np.random.default_rng(seed).permutation(labels)
    return examples_of(labels), draw(st.integers(1, len(labels)))


@pytest.mark.parametrize("case", COMPLETE)
@settings(max_examples=25, deadline=None)
@given(data=skewed(), seed=st.integers(0, 2**32 - 1))
def test_every_example_is_used_once_and_no_client_is_empty(
    case: str, data: tuple[Examples, int], seed: int
) -> None:
    examples, num_clients = data
    name, given_options = COMPLETE[case]
    if name == "classes":
        assume(num_clients >= len(examples.labels.unique()))
    holdings = split(name, examples, num_clients, seed, **given_options)
    assert holdings.index.dtype == torch.int64
    assert len(holdings) == num_clients
    assert holdings.index.sort().values.tolist() == list(range(len(examples)))
    assert int(holdings.sizes.min()) >= 1
    if name not in ("classes", "dirichlet-per-class"):
        assert int(holdings.sizes.max() - holdings.sizes.min()) <= 1


@pytest.mark.parametrize("case", COMPLETE)
def test_equal_seeds_give_equal_partitions_and_others_do_not(case: str) -> None:
    name, given_options = COMPLETE[case]
    examples = balanced(2000, 10)
    first, again, other = (split(name, examples, 20, s, **given_options) for s in (1, 1, 2))
    assert first.digest() == again.digest() != other.digest()


@pytest.mark.parametrize(("name", "given_options"), COMPLETE.values(), ids=COMPLETE)
def test_ten_times_the_clients_take_no_more_calls_than_their_number(
    name: str, given_options: dict[str, Any]
) -> None:
    """Work that grew with the square of the clients would be a hundred times as much."""
    examples = balanced(6_000, 10)
    few, many = (
        num_calls(partial(split, name, examples, num_clients, **given_options))
        for num_clients in (300, 3_000)
    )
    assert many < 15 * few


@pytest.mark.parametrize(
    ("num_clients", "sizes", "mode", "expected"),
    [
        (10, "low", "renormalise", [500 + 1000 * i for i in range(10)]),
        (10, "low", "truncate", [500 + 1000 * i for i in range(10)]),
        (10, "high", "renormalise", [500] * 9 + [45_500]),
        (10, "high", "truncate", [500] * 9 + [45_500]),
        (5, "low", "truncate", [500, 1500, 2500, 3500, 4500]),
        (5, "low", "renormalise", [2000, 6000, 10_000, 14_000, 18_000]),
        (5, "high", "truncate", [500] * 5),
        (20, "low", "renormalise", [125 + 250 * i for i in range(20)]),
        (46, "high", "renormalise", [100] * 45 + [45_500]),
        (3, "homogeneous", "truncate", [16_666] * 3),
        (3, "homogeneous", "renormalise", [16_667, 16_667, 16_666]),
        (3, [0.1, 0.2, 0.7], "truncate", [5000, 10_000, 35_000]),
        (3, [1, 1, 3], "renormalise", [10_000, 10_000, 30_000]),
    ],
)
def test_proportions_are_the_papers(
    num_clients: int, sizes: Any, mode: str, expected: list[int]
) -> None:
    holdings = split("proportions", balanced(50_000, 10), num_clients, sizes=sizes, mode=mode)
    assert holdings.sizes.tolist() == expected
    assert len(holdings.index.unique()) == sum(expected)


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=30), st.integers(3000, 9000))
@settings(deadline=None)
def test_listed_proportions_lose_no_example_unless_truncated(
    sizes: list[float], num_examples: int
) -> None:
    examples = balanced(num_examples, 3)
    ideal = num_examples * np.array(sizes) / sum(sizes)
    whole = split("proportions", examples, len(sizes), sizes=sizes).sizes.numpy()
    floored = split("proportions", examples, len(sizes), sizes=sizes, mode="truncate")
    assert whole.sum() == num_examples
    assert np.abs(whole - ideal).max() <= 1
    assert np.abs(floored.sizes.numpy() - np.floor(ideal + 1e-6)).max() == 0


def test_stored_order_is_cut_into_slices_and_shuffled_order_is_not() -> None:
    examples = balanced(1000, 10)
    stored = split("proportions", examples, 10, sizes="low", order="stored")
    assert stored.index.tolist() == list(range(1000))
    shuffled = split("proportions", examples, 10, sizes="low")
    assert shuffled.index.tolist() != list(range(1000))


def test_a_client_of_two_shards_has_one_class_or_two_and_sometimes_the_same() -> None:
    examples = balanced(6000, 10)
    holdings = split("shards", examples, 100, per_client=2)
    num_classes = (counts(holdings, examples) > 0).sum(1)
    assert set(num_classes) == {1, 2}
    assert set(holdings.sizes.tolist()) == {60}


@given(skewed(), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_shards_differ_by_at_most_one_example(
    data: tuple[Examples, int], per_client: int, seed: int
) -> None:
    examples, num_clients = data
    assume(num_clients * per_client <= len(examples))
    holdings = split("shards", examples, num_clients, seed, per_client=per_client)
    assert len(holdings.index.unique()) == len(examples)
    assert int(holdings.sizes.max() - holdings.sizes.min()) <= per_client
    num_present = len(examples.labels.unique())
    assert ((counts(holdings, examples) > 0).sum(1) <= num_present).all()


@given(skewed(), st.integers(1, 8), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_every_client_has_exactly_its_number_of_classes(
    data: tuple[Examples, int], per_client: int, seed: int
) -> None:
    examples, num_clients = data
    available = np.bincount(examples.labels, minlength=100)
    present = available > 0
    assume(per_client <= present.sum())
    assume(np.minimum(available, num_clients).sum() >= num_clients * per_client)
    held = counts(split("classes", examples, num_clients, seed, per_client=per_client), examples)
    holders = (held > 0).sum(0)
    assert ((held > 0).sum(1) == per_client).all()
    free = present & (holders < available)
    assert holders[free].max(initial=0) - holders[free].min(initial=len(examples)) <= 1
    assert (holders[present] <= holders[free].min(initial=len(examples)) + 1).all()
    for label in np.flatnonzero(holders):
        of_holders = held[held[:, label] > 0, label]
        assert of_holders.sum() == available[label]
        assert of_holders.max() - of_holders.min() <= 1


def test_classes_meet_in_many_ways() -> None:
    examples = balanced(60_000, 10)
    held = counts(split("classes", examples, 100, per_client=2), examples) > 0
    assert set(held.sum(0)[:10]) == {20}
    assert len({tuple(row) for row in held}) > 30  # of 45 pairs


def test_classes_that_no_client_holds_are_left_out() -> None:
    examples = balanced(1000, 10)
    held = counts(split("classes", examples, 3, per_client=2), examples)
    assert sorted(held.sum(0))[-10:] == [0] * 4 + [100] * 6


@pytest.mark.parametrize(
    ("num_classes", "alpha", "published"),
    [
        (10, 0.0, 1.8000),
        (10, 0.05, 1.7519),
        (10, 0.1, 1.7434),
        (10, 0.5, 1.5616),
        (10, 1.0, 1.4386),
        (10, 100.0, 0.2550),
        (100, 0.0, 1.9800),
        (100, 0.5, 1.9169),
        (100, 1000.0, 0.267),
    ],
)
def test_dirichlet_is_as_skewed_as_the_released_splits(
    num_classes: int, alpha: float, published: float
) -> None:
    examples = balanced(50_000, num_classes)
    distances = []
    for seed in range(3):
        holdings = split("dirichlet", examples, 100, seed, alpha=alpha)
        assert set(holdings.sizes.tolist()) == {500}
        distances.append(emd(holdings.label_counts(examples.labels, num_classes)))
    assert np.mean(distances) == pytest.approx(published, abs=0.06)


@pytest.mark.parametrize(
    ("num_classes", "alpha"),
    [
        *((10, alpha) for alpha in (100.0, 10.0, 1.0, 0.5, 0.2, 0.1, 0.05)),
        *((100, alpha) for alpha in (1000.0, 100.0, 10.0, 5.0, 2.0, 1.0, 0.5)),
    ],
)
def test_dirichlet_is_as_skewed_as_its_prior_says(num_classes: int, alpha: float) -> None:
    """A class's share is Beta(a, b), whose mean absolute deviation has a closed form."""
    a = alpha / num_classes
    b = alpha - a
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(alpha)
    deviation = 2 * math.exp(
        a * math.log(a) + b * math.log(b) - (alpha + 1) * math.log(alpha) - log_beta
    )
    examples = balanced(50_000, num_classes)
    distances = [
        emd(
            split("dirichlet", examples, 100, seed, alpha=alpha).label_counts(
                examples.labels, num_classes
            )
        )
        for seed in range(3)
    ]
    assert np.mean(distances) == pytest.approx(num_classes * deviation, abs=0.06)


def test_when_a_class_runs_out_its_part_goes_to_the_others_in_proportion() -> None:
    """Equation 5 of Hsu et al. (2020), for three clients of 100 that draw one after another."""
    q = np.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [1 - 2e-300, 1e-300, 1e-300]])
    found = _without_replacement(np.array([100, 100, 100]), np.log(q), np.array([75, 125, 100]))
    assert found[0].tolist() == [50, 30, 20]
    # Of 50 wanted 25 are left: the other 25 are 0.3 and 0.2 over 1 - 0.5, so 15 and 10.
    assert found[1].tolist() == [25, 45, 30]
    # The only class it wants is gone. Of the others it wants as much of one as of the other.
    assert found[2].tolist() == [0, 50, 50]


def test_dirichlet_of_zero_deals_one_class_to_each_client_in_turn() -> None:
    examples = balanced(50_000, 10)
    held = counts(split("dirichlet", examples, 100, alpha=0.0), examples)
    assert set((held > 0).sum(1)) == {1}
    assert set((held > 0).sum(0)[:10]) == {10}


def test_dirichlet_of_infinity_copies_the_classes_of_the_data() -> None:
    examples = examples_of(np.repeat([0, 1, 2], [1000, 300, 77]))
    held = counts(split("dirichlet", examples, 10, alpha=math.inf), examples)
    assert (held.max(0) - held.min(0) <= 1).all()


def test_dirichlet_follows_the_classes_of_the_data_on_average() -> None:
    examples = examples_of(np.repeat([0, 1, 2], [9000, 900, 100]))
    first = [
        counts(split("dirichlet", examples, 50, seed, alpha=10.0), examples)[0] / 200
        for seed in range(300)
    ]
    assert np.mean(first, axis=0)[:3] == pytest.approx([0.9, 0.09, 0.01], abs=0.02)


@pytest.mark.parametrize("alpha", [0.0, 0.05, 1.0, math.inf])
def test_with_a_size_each_client_holds_that_many_and_nobody_the_rest(alpha: float) -> None:
    examples = balanced(500, 10)
    found = split("dirichlet", examples, 7, alpha=alpha, size=30)
    assert found.sizes.tolist() == [30] * 7
    assert len(found.index.unique()) == 210
    if alpha == math.inf:
        assert (counts(found, examples)[:, :10] == 3).all()


def test_the_two_dirichlets_name_the_same_skew_by_different_alphas() -> None:
    examples = balanced(50_000, 10)
    hsu = split("dirichlet", examples, 100, alpha=1.0)
    per_class = split("dirichlet-per-class", examples, 100, alpha=0.1)
    distances = [emd(h.label_counts(examples.labels, 10)) for h in (hsu, per_class)]
    assert distances[0] == pytest.approx(distances[1], abs=0.12)


@given(skewed(), st.sampled_from(ALPHAS), st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_small_clients_are_filled_up(
    data: tuple[Examples, int], alpha: float, min_size: int, seed: int
) -> None:
    examples, num_clients = data
    assume(num_clients * min_size <= len(examples))
    fill = partial(split, "dirichlet-per-class", examples, num_clients, seed, alpha=alpha)
    holdings = fill(min_size=min_size)
    assert int(holdings.sizes.min()) >= min_size
    assert len(holdings.index.unique()) == len(holdings.index) == len(examples)


def test_only_the_largest_clients_give() -> None:
    examples = balanced(5000, 10)
    before = split("dirichlet-per-class", examples, 50, alpha=0.05).sizes
    after = split("dirichlet-per-class", examples, 50, alpha=0.05, min_size=20).sizes
    gave = after < before
    assert gave.any()
    assert int(after[gave].max() - after[gave].min()) <= 1
    assert int(before[~gave].max()) <= int(after[gave].max())
    assert (after[before < 20] == 20).all()


@pytest.mark.parametrize(
    ("name", "num_clients", "given_options", "message"),
    [
        ("iid", 101, {}, "101 clients but 100 examples: choose"),
        ("proportions", 3, {"sizes": [0.5, 0.5]}, "2 proportions for 3 clients: list one"),
        ("proportions", 2, {"sizes": [0.5, -0.5]}, "sizes is -0.5: choose"),
        ("proportions", 2, {"sizes": [0.5, math.nan]}, "sizes is nan: choose"),
        ("proportions", 2, {"sizes": "large"}, "'large': expected"),
        ("proportions", 20, {"sizes": "low"}, "clients would hold none .*: choose"),
        ("shards", 60, {}, "120 shards but 100 examples: choose"),
        ("shards", 10, {"per_client": 0}, "per_client is 0: choose"),
        ("slices", 10, {"mixed": 10}, "mixed is 10 of 10"),
        ("classes", 10, {"per_client": 0}, "per_client is 0: choose"),
        ("classes", 10, {"per_client": 6}, "per_client is 6 .* 5 classes: choose at most 5"),
        ("classes", 100, {"per_client": 2}, "100 clients cannot hold 2 classes each.*: choose"),
        ("dirichlet", 10, {"alpha": -0.1}, "alpha is -0.1: choose"),
        ("dirichlet", 10, {"alpha": 1.0, "size": 11}, "size is 11"),
        ("dirichlet", 10, {"alpha": 1.0, "size": 0}, "size is 0"),
        ("dirichlet", 10, {"alpha": math.nan}, "alpha is nan: choose"),
        ("dirichlet-per-class", 10, {"alpha": -math.inf}, "alpha is -inf: choose"),
        ("dirichlet-per-class", 10, {"alpha": 1.0, "min_size": 11}, "at least 11: choose"),
        ("dirichlet-per-class", 10, {"alpha": 1.0, "min_size": 0}, "min_size is 0: choose"),
    ],
)
def test_a_mistake_is_answered_with_its_remedy(
    name: str, num_clients: int, given_options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        apply_partition(
            name, given_options, Pool(balanced(100, 5), 5, num_clients, np.random.default_rng(0))
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "given_options"),
    [
        ("iid", {}),
        ("proportions", {"sizes": [1, 2.5]}),
        ("proportions", {"sizes": "high", "mode": "truncate"}),
        ("shards", {}),
        ("slices", {}),
        ("classes", {"per_client": 2}),
        ("dirichlet", {"alpha": 1}),
        ("dirichlet-per-class", {"alpha": 0.5}),
    ],
)
def test_options_can_be_set_in_an_experiment_file(name: str, given_options: dict[str, Any]) -> None:
    function = PARTITIONS[name]
    resolved = options.resolve(options.options_of(function), given_options, name)
    pool = Pool(balanced(100, 5), 5, 2, np.random.default_rng(0))
    assert len(options.call(function, pool, options=resolved)) == 2


def test_slices_go_from_class_to_class_and_some_clients_have_all_of_them() -> None:
    examples = balanced(1000, 10)
    labels = examples.labels
    plain = split("slices", examples, 5)
    for client in range(5):
        assert set(labels[plain.members(client)].tolist()) == {2 * client, 2 * client + 1}
    mixed = split("slices", examples, 5, mixed=1)
    assert len(set(labels[mixed.members(4)].tolist())) == 10
    seen = [set(labels[mixed.members(client)].tolist()) for client in range(4)]
    assert max(map(len, seen)) <= 4 and set.union(*seen) == set(range(10))
    alike = split("slices", examples, 5, alike=0.5)
    held = labels[alike.members(0)]
    assert 0.5 <= float((held < 3).double().mean()) < 0.8
    assert alike.sizes.tolist() == plain.sizes.tolist() == [200] * 5


def test_a_long_tail_keeps_a_share_of_each_class() -> None:
    examples = balanced(1000, 10)
    holdings = split("slices", examples, 4, tail=0.5)
    held = torch.bincount(examples.labels[holdings.index], minlength=10)
    assert held.tolist() == [100, 50, 25, 12, 6, 3, 1, 0, 0, 0]
    assert int(holdings.sizes.max() - holdings.sizes.min()) <= 1
