"""Print docs/compositions.md: which algorithms `fedlens.compose` accepts together.

python tools/make_compositions.py > docs/compositions.md
"""

from collections.abc import Iterator
from typing import Any

from fedlens.algorithm import EXCLUSIVE, Algorithm, Amendment, compose, same
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.algorithms import ALGORITHMS

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
    for slot in (*EXCLUSIVE, "objective", "channel"):
        if not same(getattr(amended, slot), getattr(BASE, slot)):
            yield f"`{slot}`"


def page() -> str:
    rows = []
    for name in ALGORITHMS:
        others = [
            other
            for other in ALGORITHMS
            if other != name and (goes(name, other) or goes(other, name))
        ]
        rows.append(f"| {name} | {', '.join(refilled(name))} | {', '.join(others)} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    print(page(), end="")
