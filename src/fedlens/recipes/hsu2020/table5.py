"""Table 5: rounds to reach a relative accuracy, pretrained and from scratch."""

from __future__ import annotations

from fedlens.recipes.hsu2020 import pretraining
from fedlens.recipes.hsu2020.setting import (
    BASES,
    Method,
    is_other_data,
    population,
    said_goal,
    stand_in,
)
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Table, Text
from fedlens.report.numbers import NONE
from fedlens.runs.budgets import rounds_to

SHARES = (10, 50, 90)
PUBLISHED = {
    ("pretrained", Method("FedAvg", goal=10)): ("165 (1.0×)", "669 (4.1×)", "4,912 (29.8×)"),
    ("pretrained", Method("FedAvg", goal=100)): ("165 (1.0×)", "567 (3.4×)", "3,780 (22.9×)"),
    ("pretrained", Method("FedAvgM", goal=10)): ("79 (1.0×)", "249 (3.2×)", "1,505 (19.1×)"),
    ("pretrained", Method("FedAvgM", goal=100)): ("60 (1.0×)", "116 (1.9×)", "420 (6.9×)"),
    ("scratch", Method("FedAvg", goal=10)): ("9,005 (1.0×)", "39,236 (4.4×)", "> 50k"),
    ("scratch", Method("FedAvg", goal=100)): ("7,793 (1.0×)", "> 20k", "> 20k"),
    ("scratch", Method("FedAvgM", goal=10)): ("1,463 (1.0×)", "5,788 (4.0×)", "> 50k"),
    ("scratch", Method("FedAvgM", goal=100)): ("977 (1.0×)", "3,733 (3.8×)", "> 20k"),
}
"""In brackets: the ratio to the rounds that reach 10%."""


def table5(scale: Scale) -> Recipe:
    clients = population(scale, "geo")
    return Recipe(
        title="Rounds to a relative accuracy",
        about="How many rounds it takes to reach 10%, 50% and 90% of what centralised training "
        "from the same start reaches. The paper finds that pretraining saves orders of magnitude. "
        f"{pretraining.WITH_FEDVC}",
        cells=pretraining.cells(scale, clients),
        blocks=blocks,
        stand_in=f"{stand_in(clients)} {pretraining.stand_in(scale, clients)}".strip(),
        other_data=is_other_data(clients),
    )


def blocks(results: Results) -> list[Block]:
    rows: list[list[str]] = []
    for (start, method), published in PUBLISHED.items():
        line = [method.base, start, said_goal(results.scale, method.goal)]
        for share, theirs in zip(SHARES, published, strict=True):
            line += [theirs, _ours(results, start, method, share)]
        rows.append(line)
    header = ["method", "start", "K"]
    for share in SHARES:
        header += [f"published @{share}%", f"ours @{share}%"]
    return [
        Table(
            title="Rounds to reach a relative accuracy",
            caption="The first evaluated round in which the test accuracy was so much of that of "
            "centralised training from the same start, and how many times that of 10% it is.",
            header=header,
            rows=rows,
            published=frozenset(range(3, len(header), 2)),
        ),
        *pretraining.bounds(results),
        Text(title="In these runs", paragraphs=(_speed(results),)),
    ]


def _ours(results: Results, start: str, method: Method, share: int) -> str:
    """The rounds of the first seed, and their ratio to the rounds of the smallest share."""
    whole, runs = (results.runs[f"{start}, {name}"] for name in ("centralised", method.name))
    if not whole or not runs:
        return NONE
    run, best = runs[0], whole[0].final("test_accuracy") or 0.0
    found, first = (rounds_to(run.rounds, s / 100 * best) for s in (share, SHARES[0]))
    if found is None or first is None:
        return f"> {run.num_rounds:,}"
    return f"{found:,} ({found / first:.1f}×)"


def _speed(results: Results) -> str:
    words = []
    for base in BASES:
        found = {
            start: _ours(results, start, Method(base, goal=10), 90)
            for start in pretraining.STARTS
            if f"{start}, centralised" in results.runs
        }
        told = " and ".join(f"{rounds} {start}" for start, rounds in found.items())
        words.append(f"{base} with the smaller report goal reaches 90% in {told} rounds")
    return "; ".join(words) + "."
