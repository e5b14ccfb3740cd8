"""Print docs/compositions.md: which algorithms `fedlens.compose` accepts together.

python tools/make_compositions.py > docs/compositions.md
"""

import re
from collections.abc import Iterator
from typing import Any

from fedlens.algorithm import EXCLUSIVE, Algorithm, Amendment, compose, same
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.algorithms import ALGORITHMS
from fedlens.config.experiment import Experiment
from fedlens.setup.algorithm import make_algorithm

BASE = Algorithm(select=Uniformly(10), draw=Epochs(2, batch_size=32), solve=Sgd(0.1))
OPTIONS: dict[str, dict[str, Any]] = {"fedavg": {"over": "population"}, "fedvc": {"size": 64}}

HEAD = """\
# Which algorithms compose

Name several algorithms in one experiment, and Fedlens combines them from left to right. Two of
them cannot refill the same slot of a round in different ways: such a run is refused before it
starts. The table lists, for default options, which slots each algorithm refills, and which others
it combines with. Its row `fedavg` has `over = "population"`, since plain FedAvg refills nothing.
Algorithms that add to `objective` or `channel` combine with others that do. The order does not
matter, except for steps of the channel, which run in the order in which they are named, and for
`bucketing` and `nnm`, which are named after the combination that they go before.

This page is made by `python tools/make_compositions.py` from what `fedlens.compose` accepts.

| algorithm | refills | goes with |
|---|---|---|
"""


PRIVACY = """
## With privacy

The same for [`[privacy]`](privacy.md), by its `unit`, for default options: yes, or why not.

| algorithm | `client` | `example` |
|---|---|---|
"""
AFTER = {"bucketing": ["median"]}  # what an algorithm goes before


def made(name: str) -> Amendment:
    return ALGORITHMS[name](**OPTIONS.get(name, {}))


def goes(*names: str) -> bool:
    """Whether these algorithms compose, in this order."""
    try:
        compose(BASE, *map(made, names))
    except ValueError:
        return False
    return True


def refilled(name: str) -> Iterator[str]:
    amended = compose(BASE, made(name))
    for slot in (*EXCLUSIVE, "objective", "channel", "download"):
        if not same(getattr(amended, slot), getattr(BASE, slot)):
            yield f"`{slot}`"


def private(name: str, unit: str) -> str:
    """Whether an algorithm goes with privacy, or why not."""
    options = {"bulyan": {"byzantine": 0}} | OPTIONS
    algorithm = [*AFTER.get(name, []), {"name": name, **options.get(name, {})}]
    clients = {"count": 100, "per_round": 10}
    tables = {"dataset": "cifar10", "model": "lenet5", "rounds": 10, "clients": clients}
    privacy = {"unit": unit, "noise": 1.0}
    described = Experiment.of(tables | {"algorithm": algorithm, "privacy": privacy})
    try:
        make_algorithm(described)
    except ValueError as why:
        return re.sub(r"^privacy does not cover this algorithm \((.*)\): .*$", r"\1", str(why))
    return "yes"


def page() -> str:
    rows = []
    for name in ALGORITHMS:
        others = [
            other
            for other in ALGORITHMS
            if other != name and (goes(name, other) or goes(other, name))
        ]
        rows.append(f"| {name} | {', '.join(refilled(name))} | {', '.join(others)} |\n")
    rows.append(PRIVACY)
    for name in ALGORITHMS:
        rows.append(f"| {name} | {private(name, 'client')} | {private(name, 'example')} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    print(page(), end="")
