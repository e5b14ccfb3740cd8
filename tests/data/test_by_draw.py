"""Clients who draw their examples from all, each on its own: in every round, or once."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.algorithms.fedir import TellLabels
from fedlens.core.federation import AT_ONCE, Examples, Federation, Pool
from fedlens.data.partitions.by_draw import Drawn, Fresh
from fedlens.data.partitions.dealing import apply_partition
from fedlens.setup import build, partition
from fedlens.setup.devices import demand_memory

BOTH = pytest.mark.parametrize("name", ["fresh", "drawn"])


def examples(labels: Any) -> Examples:
    labels = torch.as_tensor(labels, dtype=torch.int64)
    return Examples(torch.zeros(len(labels), 1, 4, 4, dtype=torch.uint8), labels)


def described(train: Examples, **clients: Any) -> fl.Experiment:
    data = fl.Dataset("blank", train, train, tuple("abcdefghij"))
    return fl.Experiment(data, fl.Named("linear"), rounds=2, clients=fl.Clients(**clients))


def split(name: str, given: Examples, num_clients: int, seed: int = 0, **options: Any) -> Any:
    return apply_partition(name, options, Pool(given, 10, num_clients, np.random.default_rng(seed)))


UNEVEN = examples(np.random.default_rng(1).permutation(np.repeat([0, 1, 3], [40, 12, 90])))
EVERYONE = torch.arange(6)


def counts_of(
    split: Fresh | Drawn, round: int, cohort: torch.Tensor = EVERYONE
) -> np.ndarray[Any, Any]:
    return split.holdings(round, cohort).label_counts(UNEVEN.labels, 4).numpy()


@BOTH
def test_clients_have_so_many_of_each_class_and_none_twice(name: str) -> None:
    made = split(name, UNEVEN, 6, per_class=12)
    for round in range(5):
        held = made.holdings(round, EVERYONE)
        assert (counts_of(made, round) == [12, 12, 0, 12]).all()
        for client in range(6):
            assert len(held.members(client).unique()) == 36


@BOTH
def test_counts_are_uniform_in_their_range(name: str) -> None:
    made = split(name, UNEVEN, 1000, low=1, high=10)
    counts = counts_of(made, 0, torch.arange(1000))
    assert not counts[:, 2].any()
    seen = np.stack([np.bincount(counts[:, label], minlength=11) for label in (0, 1, 3)])
    assert not seen[:, 0].any()
    expected = 100
    chi = ((seen[:, 1:] - expected) ** 2 / expected).sum(1)
    assert (chi < 30).all()  # 9 degrees of freedom: one in 2,300 is beyond


@BOTH
def test_draws_are_uniform_and_independent_of_each_other(name: str) -> None:
    made = split(name, UNEVEN, 4000, per_class=3)
    held = made.holdings(0, torch.arange(4000))
    small = UNEVEN.labels == 1
    times = torch.bincount(held.index, minlength=len(UNEVEN))[small].numpy()
    assert ((times - 1000) ** 2 / 750).sum() < 35  # 3 of 12: 1000 ± 27 times each
    # Pairs within a client: each of the 66 pairs of 12 is as likely.
    rank = torch.cumsum(small, 0) - 1
    chosen = rank[held.index[small[held.index]]].view(4000, 3).sort(1).values
    pairs = torch.cat([chosen[:, [0, 1]], chosen[:, [0, 2]], chosen[:, [1, 2]]])
    seen = torch.bincount(pairs[:, 0] * 12 + pairs[:, 1])
    seen = seen[seen > 0].double()
    assert len(seen) == 66
    assert float(((seen - 12_000 / 66) ** 2 / (12_000 / 66)).sum()) < 120


def test_fresh_data_depend_on_seed_round_and_client_alone() -> None:
    made = split("fresh", UNEVEN, 6, low=1, high=10)
    whole = made.holdings(3, EVERYONE)
    part = split("fresh", UNEVEN, 6, low=1, high=10).holdings(3, torch.tensor([4, 1, 4]))
    for place, client in enumerate((4, 1, 4)):
        assert torch.equal(part.members(place), whole.members(client))
    assert whole.digest() != made.holdings(4, EVERYONE).digest()
    assert (
        whole.digest()
        != split("fresh", UNEVEN, 6, 1, low=1, high=10).holdings(3, EVERYONE).digest()
    )
    assert not torch.equal(whole.members(0), whole.members(1))


def test_what_is_drawn_once_depends_on_seed_and_client_alone() -> None:
    options = {"low": 1, "high": 10}
    made = split("drawn", UNEVEN, 6, **options)
    whole = made.holdings(0, EVERYONE)
    part = split("drawn", UNEVEN, 6, **options).holdings(7, torch.tensor([4, 1, 4]))
    for place, client in enumerate((4, 1, 4)):
        assert torch.equal(part.members(place), whole.members(client))
    assert whole.digest() == made.holdings(3, EVERYONE).digest()
    assert torch.equal(made.sizes(0), made.sizes(3))
    assert whole.digest() == split("fresh", UNEVEN, 6, **options).holdings(0, EVERYONE).digest()
    assert whole.digest() != split("drawn", UNEVEN, 6, 1, **options).holdings(0, EVERYONE).digest()
    assert not torch.equal(whole.members(0), whole.members(1))


@BOTH
@pytest.mark.parametrize("options", [{"per_class": 4}, {"low": 1, "high": 6}])
def test_sizes_are_known_without_drawing_what_clients_hold(name, options):
    split_ = split(name, examples(np.arange(300) % 3), AT_ONCE + 20, **options)
    some = torch.arange(AT_ONCE - 20, AT_ONCE + 20)
    for number in (0, 5):
        assert torch.equal(split_.sizes(number)[some], split_.holdings(number, some).sizes)
    federation = Federation(UNEVEN, 10, split_)
    for number in (0, 5):
        sizes = split_.sizes(number)
        assert torch.equal(federation.sizes(number), sizes)
        assert torch.equal(federation.offsets(number)[1:], sizes.cumsum(0))
        assert federation.num_examples(number) == int(sizes.sum())
    few = Federation(UNEVEN, 10, split_).shortened(5)
    assert torch.equal(few.sizes(0)[some], few.holdings(0, some).sizes)


@BOTH
def test_all_clients_are_asked_some_at_a_time(name: str) -> None:
    made = Federation(UNEVEN, 10, split(name, UNEVEN, AT_ONCE + 3, low=1, high=4))
    parts = [*made.parts(2)]
    assert [len(part) for part in parts] == [AT_ONCE, 3]
    everyone = made.everyone(2)
    assert torch.equal(torch.cat([part.index for part in parts]), everyone.index)
    last, first = AT_ONCE + 2, 0
    asked = made.holdings(2, torch.tensor([last, first]))
    assert torch.equal(asked.members(0), everyone.members(last))
    assert torch.equal(asked.members(1), everyone.members(first))
    told = TellLabels(None).init({"w": torch.zeros(1)}, made)["labels"]["p"]
    counts = made.label_counts(made.everyone(0)).sum(0)
    assert torch.equal(told, counts.double() / counts.sum())


@pytest.mark.parametrize("options", [{"per_class": 4}, {"low": 1, "high": 6}])
def test_of_a_million_clients_nothing_is_kept(options: dict[str, int]) -> None:
    made = split("drawn", UNEVEN, 1_000_000, **options)
    held = made.holdings(0, torch.tensor([999_999, 0]))
    assert len(held) == 2
    made.sizes(0)
    kept = [*vars(made).values(), *vars(made.first).values()]
    assert len(kept) == len(fields(Drawn)) + len(fields(Fresh))
    assert max(one.numel() for one in kept if isinstance(one, torch.Tensor)) == len(UNEVEN)


@BOTH
@pytest.mark.parametrize("algorithm", ["fedavg", {"name": "fedvc", "size": 32}])
def test_a_run_is_the_same_from_every_engine_and_after_a_stop(name, algorithm, tmp_path) -> None:
    rng = np.random.default_rng(0)
    labels = torch.arange(200) % 10
    images = torch.from_numpy(rng.integers(0, 256, (200, 1, 4, 4), dtype=np.uint8))
    data = fl.Dataset(
        "noise", Examples(images, labels), Examples(images, labels), tuple("abcdefghij")
    )

    def experiment(engine: Any) -> fl.Experiment:
        drawn = fl.Named(name, {"low": 1, "high": 9})
        return fl.Experiment(
            dataset=data,
            model=fl.Named("linear"),
            rounds=4,
            engine=engine,
            precision="fp64",
            clients=fl.Clients(count=5, per_round=3, partition=drawn),
            algorithm=algorithm,
        )

    whole = fl.run(experiment("sequential")).model
    other = fl.run(experiment("stacked")).model
    for part, tensor in whole.items():
        torch.testing.assert_close(other[part], tensor, rtol=1e-9, atol=1e-12)

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment("sequential"), tmp_path / "run", watch=stop)
    resumed = fl.resume(tmp_path / "run", experiment=experiment("sequential")).model
    assert all(torch.equal(resumed[part], tensor) for part, tensor in whole.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set per_class, or set both low and high"),
        ({"low": 1}, "set per_class, or set both low and high"),
        ({"per_class": 2, "low": 1, "high": 3}, "set per_class, or set both low and high"),
        ({"per_class": 0}, "per_class is 0: choose 1 or more"),
        ({"low": 3, "high": 2}, "low is 3 and high 2: choose"),
        ({"low": 0, "high": 0}, "high is 0: choose 1 or more"),
        ({"per_class": 13}, "class 1 has 12 examples, but a client may draw 13 of each"),
    ],
)
@BOTH
def test_mistakes_are_answered_with_their_remedy(
    name: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        split(name, UNEVEN, 6, **options)
    assert message in str(refused.value)


@BOTH
def test_more_clients_than_can_be_numbered_in_memory_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is 1,000,000,000,000: choose at most 1,000"):
        split(name, UNEVEN, 10**12, per_class=1)


@BOTH
def test_the_memory_of_a_round_is_judged_without_a_number_for_every_client(name: str) -> None:
    setup = build(
        described(UNEVEN, count=10, per_round=2, partition={"name": name, "per_class": 1})
    )
    drawn = split(name, UNEVEN, 10**9, per_class=1)
    first = drawn.first if isinstance(drawn, Drawn) else drawn
    enormous = replace(first, num_clients=10**15)
    demand_memory(setup.experiment, setup.dataset, setup.program.algorithm, enormous)


@BOTH
def test_a_remedy_is_one_that_clients_who_draw_can_take(name: str) -> None:
    asked = described(UNEVEN, count=4, partition={"name": name, "per_class": 2})
    with pytest.raises(ValueError, match=f"choose another partition than '{name}', and set"):
        fl.run(replace(asked, evaluate=fl.Evaluate(local_only=True)))


@BOTH
def test_clients_who_draw_cannot_hold_some_out(name: str) -> None:
    train = examples(np.arange(60) % 10)
    partition_ = {"name": name, "per_class": 2}
    with pytest.raises(ValueError, match=r"clients\.holdout"):
        build(described(train, partition=partition_, holdout=0.5))
    assert partition(described(train, partition=partition_))[2].sizes.tolist() == [20] * 10


@BOTH
def test_the_terminal_counts_all_clients_also_those_that_are_not_described(name, here, fedlens):
    content = (
        'dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 1\nengine = "sequential"\n'
    )
    clients = f'clients = {{ count = 20000, per_round = 2, partition.name = "{name}" }}\n'
    (here / "many.toml").write_text(content + clients)
    ended = fedlens("run", "many.toml", "clients.partition.per_class=1")
    assert ended.status == 0
    assert ended.err.splitlines()[0].endswith(", 20,000 clients")
