"""Why LIADMM fails on non-iid clients: six hypotheses, a control, each alone, all but each."""

from __future__ import annotations

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
    liadmm: dict[str, Any]  # changed options of the algorithm
    setting: dict[str, Any]  # changed settings of the experiment


HYPOTHESES = {
    "H1": Hypothesis(
        "dual in every step",
        "the dual is subtracted in every step, not once a round",
        {"local": "training", "dual": "step"},
        {},
    ),
    "H2": Hypothesis(
        "double softmax",
        "a double softmax gives no gradient back once the net is saturated",
        {},
        {"loss": "double_softmax"},
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
        {},
    ),
    "H6": Hypothesis(
        "cohort averaged",
        "only the round's clients are averaged",
        {"average": "sampled"},
        {},
    ),
}


def why_liadmm_fails(scale: Scale) -> Recipe:
    cells = {
        f"{BASE}, non-iid": _cell(scale, "non-iid", ()),
        f"{CONTROL}, non-iid": _cell(scale, "non-iid", (), local="training"),
    }
    cells |= {f"{h} alone, non-iid": _cell(scale, "non-iid", (h,)) for h in HYPOTHESES}
    cells[f"{ALL}, non-iid"] = _cell(scale, "non-iid", tuple(HYPOTHESES))
    cells |= {
        f"{BASE}, iid": _cell(scale, "iid", ()),
        f"{CONTROL}, iid": _cell(scale, "iid", (), local="training"),
        f"{ALL}, iid": _cell(scale, "iid", tuple(HYPOTHESES)),
    }
    if scale.name != "small":
        for h in HYPOTHESES:
            cells[f"{h} alone, iid"] = _cell(scale, "iid", (h,))
            rest = tuple(other for other in HYPOTHESES if other != h)
            for split in SPLITS:
                cells[f"all but {h}, {split}"] = _cell(scale, split, rest)
    return recipe(scale, "why-liadmm-fails", cells=cells, blocks=blocks, ours=True)


def _cell(scale: Scale, split: Split, switched: tuple[str, ...], **liadmm: Any) -> Experiment:
    """LIADMM as printed (logits, no momentum, one pass where it trains), with hypotheses on."""
    options: dict[str, Any] = {"gamma": 0.05, **liadmm}
    setting: dict[str, Any] = {"loss": "cross_entropy", "momentum": 0.0, "epochs": 1}
    for h in switched:
        options |= HYPOTHESES[h].liadmm
        setting |= HYPOTHESES[h].setting
    return experiment(scale, split, Named("liadmm", options), **setting)


def blocks(results: Results) -> list[Block]:
    alone = [BASE, CONTROL, *(f"{h} alone" for h in HYPOTHESES), ALL]
    said = {h: one.says for h, one in HYPOTHESES.items()} | {CONTROL: "no momentum, dual once"}
    rows = []
    for name in alone:
        h = name.removesuffix(" alone")
        rows.append(
            [
                name,
                said.get(h, ""),
                outcome(results, f"{name}, iid"),
                outcome(results, f"{name}, non-iid"),
                outcome(results, f"all but {h}, iid"),
                outcome(results, f"all but {h}, non-iid"),
            ]
        )
    return [
        Table(
            title="Six hypotheses",
            name="hypotheses",
            caption="Test accuracy in %, the mean over the last quarter of the rounds, or what "
            "became of the runs. Each hypothesis alone is added to LIADMM as printed: plain "
            "logits, no momentum, one full-batch step a round (or one epoch of SGD, where the "
            "hypothesis is about training), all clients' last words averaged.",
            header=(
                *("switched on", "what it says", "iid", "non-iid"),
                *("iid, all six but it", "non-iid, all six but it"),
            ),
            rows=rows,
        ),
        curves(
            results,
            {f"{name}, non-iid": _in_legend(name) for name in alone},
            title="Test accuracy with two classes a client",
            caption="Each hypothesis switched on alone, the printed equations, the control, and "
            "all six.",
        ),
        Text(title="What these runs say", paragraphs=_verdict(results)),
        note(__name__, "How to read it"),
    ]


def _in_legend(name: str) -> str:
    """The name of a line in a legend; for a hypothesis, with its short description."""
    h = name.removesuffix(" alone")
    return f"{h} alone, {HYPOTHESES[h].short}" if h in HYPOTHESES else name


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
