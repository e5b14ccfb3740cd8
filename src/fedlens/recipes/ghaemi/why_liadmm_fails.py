"""Why LIADMM fails on non-iid clients: six hypotheses, a control, each alone, all but each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedlens.config.experiment import Experiment, Named
from fedlens.recipes.ghaemi.algorithms import SPLITS, Split, experiment, failed, outcome, recipe
from fedlens.recipes.page import curves, note
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Table, Text

BASE, ALL = "LIADMM as printed", "all six"
CONTROL = "control: one epoch of SGD"
"""SGD in place of the single step, no momentum, one dual update: H1, H3 and H4 build on it."""
ABOUT_TRAINING = ("H1", "H3", "H4")


class Hypothesis(NamedTuple):
    short: str  # in a legend
    says: str
    liadmm: Mapping[str, Any] = {}  # changed options of the algorithm
    setting: Mapping[str, Any] = {}  # changed settings of the experiment


HYPOTHESES = {
    "H1": Hypothesis(
        "dual in every step",
        "the dual is subtracted in every step, not once a round",
        {"local": "training", "dual": "step"},
    ),
    "H2": Hypothesis(
        "double softmax",
        "a double softmax gives no gradient back once the net is saturated",
        setting={"loss": "double_softmax"},
    ),
    "H3": Hypothesis(
        "ten epochs",
        "ten epochs in place of one step exceed the stable gain of 2/3",
        {"local": "training"},
        {"epochs": None},
    ),
    "H4": Hypothesis(
        "momentum 0.9",
        "momentum of 0.9 amplifies what is sent",
        {"local": "training"},
        {"momentum": 0.9},
    ),
    "H5": Hypothesis(
        "dual counts a tenth",
        "the dual counts a tenth of the primal in the mean (1/m against 1/C)",
        {"dual_weight": 0.1},
    ),
    "H6": Hypothesis(
        "cohort averaged", "only the round's clients are averaged", {"average": "sampled"}
    ),
}
ALONE = {BASE: (), CONTROL: (), **{f"{h} alone": (h,) for h in HYPOTHESES}, ALL: (*HYPOTHESES,)}
REST = {f"all but {h}": tuple(other for other in HYPOTHESES if other != h) for h in HYPOTHESES}
"""The hypotheses that are switched on, by the first words of a cell."""


def why_liadmm_fails(scale: Scale) -> Recipe:
    wanted: list[tuple[str, Split]] = [(name, "non-iid") for name in ALONE]
    wanted += [(name, "iid") for name in (BASE, CONTROL, ALL)]
    if scale.name != "small":
        for h in HYPOTHESES:
            wanted += [(f"{h} alone", "iid"), *((f"all but {h}", split) for split in SPLITS)]
    cells = {f"{name}, {split}": _cell(scale, split, name) for name, split in wanted}
    return recipe(scale, "why-liadmm-fails", blocks, cells=cells, ours=True)


def _cell(scale: Scale, split: Split, name: str) -> Experiment:
    """LIADMM as printed (logits, no momentum, one pass where it trains), with hypotheses on."""
    options: dict[str, Any] = {"gamma": 0.05, **({"local": "training"} if name == CONTROL else {})}
    setting: dict[str, Any] = {"loss": "cross_entropy", "momentum": 0.0, "epochs": 1}
    for h in (ALONE | REST)[name]:
        options |= HYPOTHESES[h].liadmm
        setting |= HYPOTHESES[h].setting
    return experiment(scale, split, Named("liadmm", options), **setting)


def blocks(results: Results) -> list[Block]:
    said = {f"{h} alone": one.says for h, one in HYPOTHESES.items()}
    said[CONTROL] = "no momentum, dual once"
    legend = {f"{h} alone": f"{h} alone, {one.short}" for h, one in HYPOTHESES.items()}
    rows = []
    for name in ALONE:
        runs = name, f"all but {name.removesuffix(' alone')}"
        ends = [outcome(results, f"{run}, {split}") for run in runs for split in SPLITS]
        rows.append([name, said.get(name, ""), *ends])
    return [
        Table(
            title="Six hypotheses",
            name="hypotheses",
            header=(
                *("switched on", "what it says", "iid", "non-iid"),
                *("iid, all six but it", "non-iid, all six but it"),
            ),
            rows=rows,
        ),
        curves(
            results,
            {f"{name}, non-iid": legend.get(name, name) for name in ALONE},
            title="Test accuracy with two classes a client",
        ),
        Text(title="What these runs say", paragraphs=_verdict(results)),
        note(__name__, "How to read it"),
    ]


def _verdict(results: Results) -> list[str]:
    """Sentences about what follows from the runs."""
    words = [_by_itself([h for h in HYPOTHESES if failed(results, f"{h} alone, non-iid")])]
    if failed(results, f"{CONTROL}, non-iid"):
        words.append(
            f"The control fails as well: {_listed(list(ABOUT_TRAINING))} owe that to SGD in place "
            "of the one step, and show nothing more."
        )
    else:
        words.append(
            "The control does not fail, so SGD in place of the one step is not a cause by itself."
        )
    if not failed(results, f"{ALL}, non-iid"):
        words.append("All six together do not fail in these runs, unlike the report's run.")
    else:
        words.append("All six together fail, as the report's run does.")
        rest = {h: f"all but {h}, non-iid" for h in HYPOTHESES}
        needed = [
            h for h, cell in rest.items() if cell in results.runs and not failed(results, cell)
        ]
        if needed:
            words.append(f"Without {_listed(needed, 'or')} the other five do not fail.")
        elif rest["H1"] in results.runs:
            words.append("Taking any single one of them away does not prevent that.")
    if results.scale.name != "paper":
        words.append(
            "At this scale that is a hint and no more: the model is smaller, and the rounds fewer."
        )
    return words


def _by_itself(fails: list[str]) -> str:
    if not fails:
        return "None of the six makes LIADMM fail by itself with two classes a client."
    if len(fails) == 1:
        return f"{fails[0]} is the only one that makes LIADMM fail by itself."
    return f"By themselves {_listed(fails)} make LIADMM fail; the others do not."


def _listed(names: list[str], last: str = "and") -> str:
    return f"{', '.join(names[:-1])} {last} {names[-1]}" if len(names) > 1 else "".join(names)
