"""The findings, each a question about a paper.

The statistics of all findings, fixed before anything is read.

A run counts by its read-out: the mean test accuracy of its last ten evaluations. Runs are paired by
seed. Intervals are Student's, and hold together for all comparisons of a table (Bonferroni);
p-values are corrected for the same number (Holm).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean
from typing import Any

from fedlens.config.experiment import Clients, Experiment, Named
from fedlens.evaluation.intervals import wilson
from fedlens.recipes.fedavg_cifar10 import setting as report
from fedlens.recipes.fedns.setting import table1
from fedlens.recipes.ghaemi.algorithms import (
    AS_PUBLISHED,
    FORMS,
    OURS,
    READINGS,
    SPLITS,
    dead_runs,
    experiment,
    is_dead,
    published,
)
from fedlens.recipes.hsu2020.cifar import experiment as unequal
from fedlens.recipes.hsu2020.setting import Method, Population, imbalanced
from fedlens.recipes.hsu2020.setting import experiment as of_hsu
from fedlens.recipes.hsu2020.tables import each_alone
from fedlens.recipes.page import curves, mean_of, note, recipe
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale, volatility, with_settings
from fedlens.report.blocks import Block, Curves, Intervals, Line, Table
from fedlens.report.numbers import NONE
from fedlens.report.pairs import CONFIDENCE, Estimate, corrected, estimate, picture_of
from fedlens.runs.records import Run, settings

Figure = Callable[[Results], list[Block]]


def finding(
    scale: Scale,
    item: str,
    cells: Mapping[str, Experiment],
    sums: Mapping[str, Sum],
    shown: Figure | None = None,
    *,
    dataset: str,
    seeds: int,
) -> Recipe:
    """A page with a figure, where runs end, how they differ, and what that does not say.

    Without one, the figure has the curves of all runs.
    """

    def blocks(results: Results) -> list[Block]:
        by_round = shown or (lambda _: [curves(results, title="Test accuracy by round")])
        figure, *more = by_round(results)
        found = [compared(results, sums), levels(results, cells)]
        notes = [note(__name__, "The statistics"), note(__name__, f"{item} / Limits")]
        return [figure, *found, *more, *notes]

    on, seeded = [dataset], (1, 1, seeds)
    return recipe(__name__, scale, item, blocks, cells=cells, on=on, seeds=seeded, ours=True)


def double_softmax(scale: Scale) -> Recipe:
    """Does it cost accuracy, and does it kill runs?"""
    fast = {**FORMS[OURS], "lr": 0.05}
    forms = {**FORMS, f"{OURS}, lr 0.05": fast}
    cells = {
        f"{s}, {name}": experiment(scale, s, **how) for s in SPLITS for name, how in forms.items()
    }
    saturated = [f"{split}, {AS_PUBLISHED}" for split in SPLITS]
    if scale.name == "paper":
        for precision in ("tf32", "fp32"):
            cell = f"{saturated[1]}, {precision}"
            cells[cell] = replace(cells[saturated[1]], precision=precision)
            saturated.append(cell)
    sums = {
        "iid: logits − double softmax, both at lr 0.05": ahead(
            f"iid, {OURS}, lr 0.05", saturated[0]
        ),
        "iid: logits at lr 0.01 − double softmax": ahead(f"iid, {OURS}", saturated[0]),
        "two classes: logits at lr 0.01 − double softmax, dead runs included": ahead(
            f"non-iid, {OURS}", saturated[1]
        ),
    }

    def shown(results: Results) -> list[Block]:
        each = [
            Line(f"seed {run.manifest['seed']}", *run.curve("test_accuracy"))
            for run in results.runs[saturated[1]]
        ]
        figure = Curves(
            title="Each run with two classes, double softmax",
            lines=each,
            y_label="test accuracy",
            percent=True,
        )
        return [figure, dead_runs(results, saturated), _dead_by_seed(results, saturated[1:])]

    return finding(scale, "double-softmax", cells, sums, shown, dataset="fashion-mnist", seeds=10)


def _dead_by_seed(results: Results, cells: list[str]) -> Table:
    """The share of dead runs: of each precision, and of all with a seed as one subject."""
    rows, by_seed = [], dict[int, list[float]]()
    for cell in cells:
        dead = {int(run.manifest["seed"]): float(is_dead(run)) for run in results.runs[cell]}
        for seed, value in dead.items():
            by_seed.setdefault(seed, []).append(value)
        if dead:
            share = fmean(dead.values())
            low, high = wilson(share, len(dead))
            rows.append(
                [cell, f"{100 * share:.0f}", f"{100 * low:.0f} to {100 * high:.0f}", f"{len(dead)}"]
            )
    if len(rows) > 1:
        one = estimate([fmean(values) for values in by_seed.values()])
        ends = NONE
        if one.low is not None and one.high is not None:
            ends = f"{100 * max(one.low, 0):.0f} to {100 * one.high:.0f}"
        rows.append(["all, a seed as one", f"{100 * one.mean:.0f}", ends, str(one.n)])
    return Table(
        title="The share of dead runs", header=("runs", "dead, %", "interval, %", "n"), rows=rows
    )


def step_size(scale: Scale) -> Recipe:
    """Is it more clients that help, or the longer step that λ then makes?"""
    cells = report.figure14(scale).cells
    few, many = report.COHORTS[0], report.COHORTS[-1]
    rise = {
        name: ahead(f"{name}, {many} a round", f"{name}, {few} a round") for name in report.RULES
    }
    sums: dict[str, Sum] = {f"{name}: {many} − {few} a round": sum for name, sum in rise.items()}
    lam, avg = rise.values()
    less = {cell: -factor for cell, factor in avg.items()}
    sums["the rise under the λ rule − the rise under FedAvg"] = {**lam, **less}
    sums[f"FedAvg with {few} − λ rule with {many} a round"] = ahead(
        f"FedAvg, {few} a round", f"λ rule, {many} a round"
    )
    return finding(scale, "step-size", cells, sums, dataset="cifar10", seeds=5)


def lost_data(scale: Scale) -> Recipe:
    """Do unequal clients cost accuracy, or the images that the printed code leaves out?"""
    cells, rule = report.figure16(scale).cells, {name: f"λ rule, {name}" for name in report.SPLITS}
    whole, quarter = rule["homogeneous"], rule["equal, a quarter of the images"]
    low = rule["low, truncated"]
    sums = {
        "low as printed − equal clients, all images": ahead(low, whole),
        "equal clients: a quarter − all images": ahead(quarter, whole),
        "at a quarter of the images: low as printed − equal": ahead(low, quarter),
        "all images: low − equal": ahead(rule["low, renormalised"], whole),
        "FedAvg, all images: low − equal": ahead(
            "FedAvg, low, renormalised", "FedAvg, homogeneous"
        ),
    }

    def shown(results: Results) -> list[Block]:
        lines = {cell: name for name, cell in rule.items()}
        return [curves(results, lines, title="Test accuracy by round, λ rule")]

    return finding(scale, "lost-data", cells, sums, shown, dataset="cifar10", seeds=3)


SENT = {"after": "dual once, sampled", "before": "sent before training, sampled"}


def liadmm(scale: Scale) -> Recipe:
    """Does the server average states from before the clients' training?"""
    cells = {
        f"{split}, {reading}": experiment(
            scale, split, Named("liadmm", {"gamma": FORMS[AS_PUBLISHED]["lr"], **READINGS[reading]})
        )
        for split in SPLITS
        for reading in SENT.values()
    }
    sums = {
        f"{split}: sent before − after training": ahead(
            *(f"{split}, {SENT[when]}" for when in ("before", "after"))
        )
        for split in SPLITS
    }

    def shown(results: Results) -> list[Block]:
        rounds = max(run.num_rounds for run in results.all)
        lines = {f"iid, {reading}": reading for reading in SENT.values()}
        theirs = {"the report": published("LIADMM", "iid")["test_acc"][:rounds]}
        figure = curves(results, lines, title="iid clients: test accuracy", published=theirs)
        return [figure, _distances(results)]

    return finding(scale, "liadmm", cells, sums, shown, dataset="fashion-mnist", seeds=10)


FROM = 20  # rounds after which curves are compared with those of the report


def _distances(results: Results) -> Table:
    """How far runs are from the report's curve, on average over rounds, in points."""
    rows: list[list[str]] = []
    for split in SPLITS:
        theirs = published("LIADMM", split)["test_acc"]
        for when, reading in SENT.items():
            apart = []
            for run in results.runs[f"{split}, {reading}"]:
                pairs = zip(run.curve("test_accuracy")[1], theirs, strict=False)
                late = [abs(y - t) for y, t in [*pairs][FROM:] if t is not None]
                apart.append(fmean(late) if late else None)
            found = Measured.of(apart)
            if found is not None:
                spread = NONE if found.std is None else f"{100 * found.std:.1f}"
                rows.append(
                    [
                        f"{split}, sent {when} training",
                        f"{100 * found.mean:.1f}",
                        spread,
                        str(found.seeds),
                    ]
                )
    return Table(
        title="Mean distance from the report's curve, points",
        header=("runs", "points", "deviation", "n"),
        rows=rows,
    )


MOMENTA = (0.0, 0.5, 0.7, 0.8, 0.9)


def fedns(scale: Scale) -> Recipe:
    """What does FedNS gain, at which momentum?"""
    table = table1(scale)
    forms = {
        f"momentum {m:g}": [f"local.momentum={m}"]
        for m in scale.pick(MOMENTA[::2], *2 * (MOMENTA,))
    }
    forms["lr 0.05"] = ["local.lr=0.05"]
    cells = {
        f"{cell}, {form}": one
        for form, settings in forms.items()
        for cell, one in with_settings(table, settings).cells.items()
    }
    pairs = [("iid", "FedNS"), ("non-iid", "FedNS"), ("non-iid", "FedAvg+lastFC")]
    sums = {
        f"{split}, {form}: {name} − FedAvg": ahead(
            f"{split}, {name}, {form}", f"{split}, FedAvg, {form}"
        )
        for split, name in pairs
        for form in forms
    }
    return _fedns(scale, "fedns", cells, sums, 10)


def virtual_clients(scale: Scale) -> Recipe:
    """What do FedVC, FedIR and momentum bring, and is FedVC less volatile?"""
    cells = each_alone(scale, "geo")
    bases = ("FedAvg", "FedAvgM")
    sums = {
        f"{base}: with {what} − without": ahead(f"geo, {base}, {what}", f"geo, {base}")
        for base in bases
        for what in ("FedVC", "FedIR")
    }
    sums["FedAvgM − FedAvg"] = ahead(*(f"geo, {base}" for base in reversed(bases)))
    calmer = {name: sum for name, sum in sums.items() if "FedVC" in name}

    def shown(results: Results) -> list[Block]:
        return [
            curves(results, title="Test accuracy by round"),
            compared(results, calmer, VOLATILITY, volatile),
        ]

    return finding(scale, "virtual-clients", cells, sums, shown, dataset="cifar10", seeds=3)


VOLATILITY = "How much less volatile"


def volatile(run: Run) -> float:
    return volatility(evaluated(run))


# Asked, and not run yet: FedNS's network and step, and what CEADMM saves.

TWO_MOMENTA = (0.0, 0.5)
NETWORKS = {
    "valid padding": ["model.padding=valid"],
    "images of 0 to 1": ["normalise=none"],
    "Glorot": ["initialise=glorot"],
    "He": ["initialise=he"],
    "ReLU on logits": ["model.relu_on_logits=true"],
}


def fedns_network(scale: Scale) -> Recipe:
    """Which network, or which start of it, has the level of paper 3's Table 1?"""
    table, cells = table1(scale).cells, dict[str, Experiment]()
    shown = [cell for cell in table if cell.endswith(("FedAvg", "FedNS"))]
    variants: dict[str, Mapping[str, Experiment]] = {
        "as in Table 1": table,
        **{name: _changed(scale, of) for name, of in NETWORKS.items()},
        "one epoch of 25 a class": {cell: _one_epoch(one) for cell, one in table.items()},
    }
    if scale.name == "smoke":  # its model is linear
        variants = {name: variants[name] for name in ("as in Table 1", "He")}
    for name, of in variants.items():
        for cell in shown:
            for momentum in TWO_MOMENTA:
                local = replace(of[cell].local, momentum=momentum)
                cells[f"{cell}, {name}, momentum {momentum:g}"] = replace(of[cell], local=local)
    base, *others = variants
    sums = {
        f"{cell}, momentum {m:g}: {name} − {base}": ahead(
            *(f"{cell}, {one}, momentum {m:g}" for one in (name, base))
        )
        for name in others
        for cell in shown
        if cell.endswith("FedAvg")
        for m in TWO_MOMENTA
    }
    return _fedns(scale, "fedns-network", cells, sums, 3)


def _changed(scale: Scale, settings: list[str]) -> Mapping[str, Experiment]:
    is_of_model = any(setting.startswith("model.") for setting in settings)
    if scale.name != "paper" and is_of_model:  # a light model takes the place of the paper's
        return table1(scale).cells
    return with_settings(table1(scale), settings).cells


def _one_epoch(one: Experiment) -> Experiment:
    """As many steps on images that are all different: one pass over five times as many."""
    given = one.clients.partition.options
    options = {name: 5 * given[name] for name in ("per_class", "high") if given.get(name)}
    options |= {"low": 1} if given.get("low") else {}
    clients = replace(one.clients, partition=Named(one.clients.partition.name, options))
    return replace(one, clients=clients, local=replace(one.local, epochs=1))


SERVER_STEPS = (1.05, 1.1, 1.2, 1.3)


def server_step(scale: Scale) -> Recipe:
    """Is FedNS a larger step of the server?"""
    table, cells, sums = table1(scale).cells, dict[str, Experiment](), dict[str, Sum]()
    for split in SPLITS:
        for momentum in (0.0, 0.9):
            plain, theirs = (table[f"{split}, {name}"] for name in ("FedAvg", "FedNS"))
            form = f"{split}, momentum {momentum:g}"
            found = {f"{form}, FedAvg": plain, f"{form}, FedNS": theirs}
            for step in scale.pick(SERVER_STEPS[:1], SERVER_STEPS, SERVER_STEPS):
                longer = replace(plain, server=replace(plain.server, lr=step))
                found[f"{form}, FedAvg, step {step:g}"] = longer
                sums[f"{form}: FedNS − FedAvg with step {step:g}"] = ahead(
                    f"{form}, FedNS", f"{form}, FedAvg, step {step:g}"
                )
            sums[f"{form}: FedNS − FedAvg"] = ahead(f"{form}, FedNS", f"{form}, FedAvg")
            for cell, one in found.items():
                cells[cell] = replace(one, local=replace(one.local, momentum=momentum))
    return _fedns(scale, "server-step", cells, sums, 10)


def _fedns(
    scale: Scale,
    item: str,
    cells: Mapping[str, Experiment],
    sums: Mapping[str, Sum],
    seeds: int,
) -> Recipe:
    def shown(results: Results) -> list[Block]:
        return [pictured(results, sums)]

    return finding(scale, item, cells, sums, shown, dataset="fashion-mnist", seeds=seeds)


ITERATIONS = (1, 5, 10)


def communication(scale: Scale) -> Recipe:
    """Do CEADMM and CELIADMM save communication?"""
    lr, cells, sums = FORMS[OURS]["lr"], dict[str, Experiment](), dict[str, Sum]()
    step: dict[str, Any] = {"momentum": 0.0, "epochs": 1}
    for split in SPLITS:
        for k0 in scale.pick(ITERATIONS[:2], ITERATIONS, ITERATIONS):
            passes: dict[str, Any] = {**FORMS[OURS], "epochs": k0}
            cells[f"{split}, FedAvg, {k0} epochs"] = experiment(scale, split, **passes)
            for name, how in (
                ("CEADMM", {**FORMS[OURS], "epochs": 1}),
                ("CELIADMM", {**FORMS[OURS], **step}),
            ):
                rule = {"gamma": lr} if name == "CELIADMM" else {}
                algorithm = Named(name.lower(), {"k0": k0, **rule})
                cells[f"{split}, {name}, k0 {k0}"] = experiment(scale, split, algorithm, **how)
            sums[f"{split}: CEADMM with k0 {k0} − FedAvg with {k0} epochs"] = ahead(
                f"{split}, CEADMM, k0 {k0}", f"{split}, FedAvg, {k0} epochs"
            )
        once = Named("liadmm", {"gamma": lr})
        cells[f"{split}, LIADMM"] = experiment(scale, split, once, **FORMS[OURS] | step)

    def shown(results: Results) -> list[Block]:
        found: list[Block] = []
        for split in SPLITS:
            of_split = f"{split}, "
            names = {n: n.removeprefix(of_split) for n in results.runs if n.startswith(of_split)}
            title = f"{split} clients: accuracy by what is sent"
            found.append(_by_bytes(results, names, title, ("bytes_up",), "sent by clients"))
        return found

    return finding(scale, "communication", cells, sums, shown, dataset="fashion-mnist", seeds=3)


def _by_bytes(
    results: Results, names: Mapping[str, str], title: str, ways: Sequence[str], what: str
) -> Curves:
    """Curves over bytes; all runs of a cell send as much in a round."""
    drawn = curves(results, names, title=title)
    sent = {
        name: [
            *accumulate(
                sum(map(one.__getitem__, ways)) / 1e6 for one in results.runs[cell][0].rounds
            )
        ]
        for cell, name in names.items()
    }
    by_bytes = [
        replace(line, x=[sent[line.name][int(round) - 1] for round in line.x])
        for line in drawn.lines
    ]
    return replace(drawn, lines=by_bytes, x_label=f"megabytes {what}")


STEPS: dict[str, tuple[Named, ...]] = {
    "plain": (),
    "quantize to 8": (Named("quantize", {"bits": 8}),),
    "quantize to 4": (Named("quantize", {"bits": 4}),),
    "eden to 4": (Named("eden", {"bits": 4}),),
    "eden to 1": (Named("eden", {"bits": 1}),),
    "top-k of 1%": (Named("top-k", {"share": 0.01}),),
    "sign": (Named("sign"),),
    "powersgd of rank 2": (Named("powersgd", {"rank": 2}),),
}
SILOS = 10


def traffic(scale: Scale) -> Recipe:
    """What accuracy do the steps between clients and server leave for a megabyte?"""
    down, cells = Named("download", {"bits": 8}), dict[str, Experiment]()
    for name in scale.pick(["plain", "sign"], [*STEPS], [*STEPS]):
        for way, algorithm in ((name, STEPS[name]), (f"{name}, down in 8", (*STEPS[name], down))):
            one = unequal(scale, "cifar10", 0.1, algorithm, lr=0.05)
            silos = replace(one.clients, count=SILOS, per_round=SILOS)
            every = replace(one.evaluate, every=scale.pick(1, 5, 10))
            cells[way] = replace(one, clients=silos, rounds=scale.pick(2, 40, 500), evaluate=every)
    sums = {f"{name} − plain": ahead(name, "plain") for name in cells if name != "plain"}

    def shown(results: Results) -> list[Block]:
        names = {name: name for name in results.runs}
        title, ways = "Accuracy by what goes both ways", ("bytes_up", "bytes_down")
        return [_by_bytes(results, names, title, ways, "both ways")]

    return finding(scale, "traffic", cells, sums, shown, dataset="cifar10", seeds=10)


POWERS = {"no FedIR": None, "FedIR, power 0.5": 0.5, "FedIR": 1.0}
ALPHA, USERS = 0.0145, 200  # a mean EMD of 1.85


def importance(scale: Scale) -> Recipe:
    """Does FedIR gain where clients are as unalike as the paper's users?"""
    count, goals = scale.pick((20, (10,)), (50, (10,)), (USERS, (10, 100)))
    plain = Experiment(
        Named(scale.dataset("cifar100")),
        scale.pick(Named("linear"), Named("simple-cnn"), Named("hsu-cnn")),
        rounds=1,
        clients=Clients(count=count, partition=imbalanced(ALPHA if scale.name == "paper" else 0.3)),
    )
    users = Population("iNaturalist-User-120k", "unalike CIFAR-100", plain)
    cells, sums = dict[str, Experiment](), dict[str, Sum]()
    for base, goal in itertools.product(("FedAvg", "FedAvgM"), goals):
        form = f"{base}, K {goal}"
        for name, power in POWERS.items():
            one = of_hsu(scale, users, Method(base, vc=True, ir=power is not None, goal=goal))
            weighed = Named("fedir", {"power": power or 1.0})
            algorithm = tuple(weighed if a.name == "fedir" else a for a in one.algorithm)
            cells[f"{form}, {name}"] = replace(one, algorithm=algorithm)
            if power is not None:
                sums[f"{form}: {name} − no FedIR"] = ahead(f"{form}, {name}", f"{form}, no FedIR")
    return finding(scale, "importance", cells, sums, dataset="cifar100", seeds=3)


LAST = 10  # evaluations
TITLE, ENDS = "What differs", "Where they end"

Sum = Mapping[str, float]
"""A sum of cells, each with its factor: {"a": 1, "b": -1} is how far a is ahead of b."""


def evaluated(run: Run) -> list[float]:
    """The test accuracies in every `evaluate.every`-th round: some runs have more in between."""
    every = int(settings(run.experiment)["evaluate.every"])
    return [y for round, y in zip(*run.curve("test_accuracy"), strict=True) if round % every == 0]


def read_out(run: Run) -> float:
    """NaN for a run that diverged: it has no end."""
    values = evaluated(run)[-LAST:]
    return math.nan if run.status == "diverged" or not values else fmean(values)


ReadOut = Callable[[Run], float]


def ahead(one: str, other: str) -> Sum:
    return {one: 1.0, other: -1.0}


def by_seed(results: Results, sum: Sum, read_out: ReadOut) -> dict[int, float]:
    """The sum for each seed that all of its cells were run with."""
    read = [
        {int(run.manifest["seed"]): factor * read_out(run) for run in results.runs[cell]}
        for cell, factor in sum.items()
    ]
    seeds = set.intersection(*map(set, read))
    return {seed: math.fsum(one[seed] for one in read) for seed in sorted(seeds)}


def compared(
    results: Results,
    sums: Mapping[str, Sum],
    title: str = TITLE,
    read_out: ReadOut = read_out,
) -> Table:
    """The table of comparisons, by their names."""
    rows = [
        [name, *(one.cells() if one else ["diverged", NONE, NONE, str(count)])]
        for name, (count, one) in estimates(results, sums, read_out).items()
    ]
    header = ("comparison", "points", "interval", "p (Holm)", "n")
    return Table(title=title, header=header, rows=rows)


def estimates(
    results: Results, sums: Mapping[str, Sum], read_out: ReadOut = read_out
) -> dict[str, tuple[int, Estimate | None]]:
    """Of each comparison that has runs: their number, and what differs if none diverged."""
    found = {name: [*by_seed(results, sum, read_out).values()] for name, sum in sums.items()}
    shown = {name: values for name, values in found.items() if values}
    sound = {name: values for name, values in shown.items() if all(map(math.isfinite, values))}
    told = corrected(sound, 1 - (1 - CONFIDENCE) / max(len(shown), 1))
    return {name: (len(values), told.get(name)) for name, values in shown.items()}


def levels(results: Results, cells: Iterable[str]) -> Table:
    """The read-outs of cells: mean and deviation over seeds."""
    rows = [
        [cell, mean_of(Measured.of([*map(read_out, runs)])), str(len(runs))]
        for cell in cells
        if (runs := results.runs[cell])
    ]
    return Table(title=ENDS, header=("runs", "accuracy, %", "n"), rows=rows)


def pictured(results: Results, sums: Mapping[str, Sum]) -> Intervals:
    """The comparisons as a picture."""
    nothing = Estimate(0, math.nan, None)
    told = estimates(results, sums)
    found = {name: one or nothing for name, (_, one) in told.items()}
    return picture_of(found, title="How far ahead")
