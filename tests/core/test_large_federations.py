"""A round costs what its cohort costs, however many clients there are."""

import json
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedlens.algorithm.pieces import BySize, Uniformly
from fedlens.algorithm.pieces.select import LARGE
from fedlens.config.experiment import Clients, Experiment
from fedlens.core import keys
from fedlens.core.by_client import BITS, ByClient
from fedlens.core.federation import (
    MOST_DESCRIBED,
    Dataset,
    Examples,
    Federation,
    Fixed,
    Holdings,
    Pool,
    offsets_of,
)
from fedlens.data.partitions import PARTITIONS
from fedlens.data.statistics import counts, emd_of
from fedlens.rounds import ClientMemory, begin, run_round
from fedlens.rounds.client_memory import Room
from fedlens.runs.run import run
from fedlens.setup import build

MANY = 2 * LARGE
EXAMPLES = Examples(
    torch.arange(MANY * 4, dtype=torch.uint8).view(MANY, 1, 2, 2), torch.arange(MANY) % 2
)
DATA = Dataset("dots", EXAMPLES, Examples(EXAMPLES.images[:4], EXAMPLES.labels[:4]), ("a", "b"))

BY_SIZE = [{"name": "fedprox", "sampling": "by-size"}]
ALGORITHMS: list[list[Any]] = [["fedavg"], ["scaffold"], ["feddyn"], ["fedadmm"]]
FRESH, DRAWN = {"name": "fresh", "per_class": 3}, {"name": "drawn", "per_class": 3}
UNEVEN = {"name": "drawn", "low": 0, "high": 5}
VIRTUAL = [{"name": "fedvc", "size": 32}]
CASES = [
    *product(ALGORITHMS, ["iid", FRESH, DRAWN, UNEVEN]),
    *product([BY_SIZE, VIRTUAL], ["iid", DRAWN, UNEVEN]),
]


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that an operation makes, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        made = func(*args, **kwargs)
        for tensor in _tensors(made):
            if tensor.untyped_storage().data_ptr() not in given:
                self.numel = max(self.numel, tensor.numel())
        return made


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def largest_in_a_round(num_clients: int, partition: Any, algorithm: list[Any]) -> int:
    experiment = Experiment(
        dataset=DATA,
        model="linear",
        rounds=3,
        engine="sequential",
        device="cpu",
        clients=Clients(count=num_clients, per_round=4, partition=partition),
        algorithm=algorithm,
    )
    setup = build(experiment)
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    state, _ = run_round(setup.program, setup.federation, setup.engine, state, seed=0)
    with Largest() as largest:
        run_round(setup.program, setup.federation, setup.engine, state, seed=0)
    return int(largest.numel)


@pytest.mark.parametrize(("algorithm", "partition"), CASES, ids=str)
def test_no_tensor_of_a_round_is_as_large_as_the_federation(algorithm, partition):
    assert 0 < largest_in_a_round(MANY, partition, algorithm) < 2_000


def test_the_measure_sees_a_tensor_that_is_as_large_as_the_federation():
    with Largest() as largest:
        torch.arange(MANY)
    assert largest.numel == MANY


def held(sizes: torch.Tensor) -> Federation:
    split = Fixed(Holdings(torch.arange(int(sizes.sum())), offsets_of(sizes)))
    return Federation(EXAMPLES, 2, split)


def test_of_many_clients_a_few_are_drawn_each_as_often_and_none_twice():
    federation = held(torch.ones(MANY, dtype=torch.int64))
    select, root = Uniformly(MANY // 8), keys.root(7)
    drawn = [select(federation, 0, keys.fold(root, round)) for round in range(40)]
    for clients in drawn:
        assert len(clients.unique()) == len(clients) == MANY // 8
    tenths = torch.cat(drawn) * 10 // MANY
    assert (tenths.bincount() / len(tenths)).tolist() == pytest.approx([0.1] * 10, abs=0.002)
    assert not torch.equal(drawn[0], drawn[1])


def test_with_more_than_an_eighth_of_them_every_client_draws():
    chosen = Uniformly(MANY // 8 + 1)(held(torch.ones(MANY, dtype=torch.int64)), 0, keys.root(7))
    draws = keys.uniform(keys.fold(keys.root(7), torch.arange(MANY)))
    assert torch.equal(chosen, draws.argsort()[: len(chosen)])


def test_draws_by_size_are_those_of_the_sums_of_sizes():
    sizes = torch.tensor([3, 0, 1, 4, 2])
    key = keys.root(3)
    draws = keys.uniform(keys.fold(key, torch.arange(1000))) * 10
    wanted = torch.searchsorted(sizes.double().cumsum(0), draws, right=True)
    assert torch.equal(BySize(1000)(held(sizes), 0, key), wanted)


def test_what_clients_remember_is_a_value_that_shares_what_did_not_change():
    leaf = 1 << BITS
    before = ByClient({client: str(client) for client in range(0, 40 * leaf, 3)})
    after = before.changed({5: "five", 6: "six", 10**9: "far"})
    assert (before.get(5), before[6], 10**9 in before) == (None, "6", False)
    assert (after[5], after[6], after[10**9]) == ("five", "six", "far")
    assert len(after) == len(before) + 2 == len(list(after))
    assert dict(after) == {**dict(before), 5: "five", 6: "six", 10**9: "far"}
    branch = before._branches[0], after._branches[0]
    assert [place for place in branch[0] if branch[0][place] is not branch[1][place]] == [0]
    with pytest.raises(KeyError, match="7"):
        after[7]


def test_memory_from_a_checkpoint_goes_on():
    kept = {"dual": {"w": torch.ones(1)}}
    memory = ClientMemory({3: kept}, 10)
    after = memory.put(torch.tensor([3, 200]), [kept, kept], torch.tensor([10, 5]), Room(), 1)
    assert (sorted(after.rows), after.num_examples, sorted(memory.rows)) == ([3, 200], 15, [3])


def test_many_clients_are_counted_and_not_listed():
    one_each = held(torch.ones(MANY, dtype=torch.int64)).described()
    assert counts(one_each, EXAMPLES.labels, 2) == {"num_clients": MANY}
    with Largest() as largest:
        assert emd_of(one_each, EXAMPLES.labels, 2) == pytest.approx(1.0)
    assert largest.numel <= 2 * MANY


@pytest.mark.parametrize("name", ["fresh", "drawn"])
def test_a_split_of_many_that_is_drawn_is_described_by_its_first_clients(name):
    rng = np.random.default_rng(0)
    split = PARTITIONS[name](Pool(EXAMPLES, 2, 1_000_000, rng), per_class=1)
    described = Federation(EXAMPLES, 2, split).described()
    assert len(described) == MOST_DESCRIBED
    assert counts(described, EXAMPLES.labels, 2, 1_000_000) == {"num_clients": 1_000_000}


@pytest.mark.parametrize("name", ["fresh", "drawn"])
def test_a_whole_run_of_a_million_makes_no_tensor_as_large_as_the_federation(name, tmp_path):
    few = Examples(EXAMPLES.images[:1000], EXAMPLES.labels[:1000])
    experiment = Experiment(
        dataset=Dataset("dots", few, few, ("a", "b")),
        model="linear",
        rounds=2,
        engine="sequential",
        device="cpu",
        clients=Clients(count=1_000_000, per_round=4, partition={"name": name, "per_class": 1}),
    )
    with Largest() as largest:
        run(experiment, tmp_path / "run")
    assert 0 < largest.numel <= 4 * MOST_DESCRIBED
    listed = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert listed == {"num_clients": 1_000_000, "emd": 0.0}
