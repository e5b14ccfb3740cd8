"""Tables 2 to 5, and the figures of their runs: FedVC, FedIR, FedAvgM, and where training starts.

Each recipe runs a list of methods on some clients, from some start, or training some layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fedlens.config.experiment import Experiment, Named
from fedlens.recipes.hsu2020.setting import (
    BASES,
    BUDGETS,
    EMD,
    GOALS,
    NAMES,
    PUBLISHED,
    STEPS,
    Key,
    Method,
    Population,
    Which,
    at_budget,
    at_budgets,
    batches,
    centralised,
    experiment,
    goal,
    goals,
    is_other_data,
    partitionings,
    population,
    recipe,
    relative_curves,
    rounds,
)
from fedlens.recipes.page import ahead, bars, beside, curves, mean_of, note
from fedlens.recipes.recipe import EMBEDDED, FROM_CELL, Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Line, Series, Table, Text
from fedlens.report.numbers import NONE
from fedlens.runs.records import rounds_to

Cells = dict[str, Experiment]
PLACES: tuple[Which, ...] = ("geo", "user")
OF = ("clients", "method", "FedVC", "FedIR")  # columns of tables about several clients


def _cells(
    scale: Scale,
    clients: Population,
    methods: Iterable[Method],
    first: str = "",
    *,
    virtual: bool = False,
    **how: Any,
) -> Cells:
    """A run of each method; with `virtual`, all have FedVC, and their names do not say so."""
    return {
        method.cell(first): experiment(
            scale, clients, method._replace(vc=True) if virtual else method, **how
        )
        for method in methods
    }


def _bounds(scale: Scale) -> Cells:
    """Centralised training on the images of the places, and of the users."""
    return {
        f"{which}, centralised": centralised(scale, population(scale, which)) for which in PLACES
    }


def _centralised(
    results: Results,
    rows: Mapping[Any, tuple[str, float | None]],
    of: str,
    *clients: Population,
) -> Table:
    """Centralised training by the first word of its cells: what it is called, and published."""
    return beside(
        [
            (called, theirs, results.final(f"{first}, centralised".removeprefix(", ")))
            for first, (called, theirs) in rows.items()
        ],
        title="Centralised, %",
        of=of,
        compared=not is_other_data(*clients),
    )


TABLE2: list[tuple[Which, Method]] = [
    (which, Method(base, vc)) for which in PLACES for vc in (False, True) for base in BASES
]
CENTRALISED = PUBLISHED["centralised"]  # on iNaturalist


def _cells_of_table2(scale: Scale) -> Cells:
    """Both populations with four methods, each run until all round and batch budgets are spent."""
    found: Cells = {}
    for which in PLACES:
        clients = population(scale, which)
        # The largest of ten clients has 12 batches on imbalanced CIFAR-10 and 3.1 on FEMNIST; on
        # iNaturalist-User-120k about 10, judging by the published accuracies at rounds and batches.
        many = scale.pick(3, 80, 17_000 if clients.is_stand_in else 10_000)
        last = {
            False: many if which == "user" else rounds(scale)[-1],
            True: max(rounds(scale)[-1], batches(scale)[-1] // STEPS),
        }
        for base in BASES:
            for vc in last:
                found |= _cells(scale, clients, [Method(base, vc)], which, last=last[vc])
    return found


def table2(scale: Scale) -> Recipe:
    """Table 2: federated virtual clients on iNaturalist, by rounds and by batches."""
    cells = _cells_of_table2(scale) | _bounds(scale)
    return recipe(scale, PLACES, "table2", cells=cells, blocks=_table2)


def _table2(results: Results) -> list[Block]:
    clients = {which: population(results.scale, which) for which in PLACES}
    called = {which: one.called for which, one in clients.items()}
    budget = batches(results.scale)[-1]

    def reached(which: Which, base: str, vc: bool) -> str:
        found = at_budget(results, Method(base, vc).cell(which), budget, "batches")
        return mean_of(found, 1)

    gains = [
        f"{called[which]}, {base}: {reached(which, base, True)}% with, "
        f"{reached(which, base, False)}% without"
        for which, base in itertools.product(PLACES, BASES)
    ]
    bounds = {which: (called[which], CENTRALISED) for which in PLACES}
    return [
        *(
            at_budgets(results, TABLE2, theirs, of=OF[:3], by=by, called=called)
            for by, theirs in PUBLISHED["table2"].items()
        ),
        _centralised(results, bounds, "clients", *clients.values()),
        note(__name__, "Reading it", budget=f"{budget:,}", gains="; ".join(gains)),
    ]


def figure6(scale: Scale) -> Recipe:
    """Figure 6: learning with virtual clients, and accuracy against EMD over partitionings."""
    cells = _cells_of_table2(scale) | _bounds(scale)
    for name, clients in partitionings(scale).items():
        methods = [Method(base, vc=True) for base in BASES]
        cells |= _cells(scale, clients, methods, name, last=rounds(scale)[1])
    return recipe(scale, PLACES, "figure6", cells=cells, blocks=_figure6)


def _figure6(results: Results) -> list[Block]:
    # By partitioning: what its cells begin with, and its cell of centralised training.
    places = {name: (name, "geo, centralised") for name in partitionings(results.scale)}
    places[NAMES["user"]] = ("user", "user, centralised")
    budget = rounds(results.scale)[1]
    lines: list[Line] = []
    order: list[str] = []
    for base in BASES:
        points: list[tuple[float, float | None, str]] = []
        for place, (first, whole) in places.items():
            cell = Method(base, vc=True).cell(first)
            found, best = at_budget(results, cell, budget), results.final(whole)
            relative = found.mean / best.mean if found and best and best.mean else None
            if runs := results.runs[cell]:
                points.append((runs[0].summary["emd"], relative, place))
        points.sort(key=lambda point: point[0])
        order = [place for _, _, place in points] or order
        lines.append(Line(f"{base}, FedVC", [x for x, _, _ in points], [y for _, y, _ in points]))
    emds = {
        place: [run.summary["emd"] for run in results.runs[Method("FedAvg", True).cell(first)]]
        for place, (first, _) in places.items()
    }
    return [
        *(
            curves(
                results,
                {m.cell(which): m.cell() for of, m in TABLE2 if of == which},
                title=f"{population(results.scale, which).used}: test accuracy",
            )
            for which in PLACES
        ),
        relative_curves(
            lines,
            title="Relative accuracy against EMD",
            caption=f"Test accuracy at {budget:,} rounds, divided by that of centralised training "
            "on the same images, by the mean EMD of the partitioning: clients are less alike to "
            f"the right. From left to right: {', '.join(order)}.",
            x_label="mean EMD",
        ),
        beside(
            [(place, EMD.get(place), Measured.of(emd[:1])) for place, emd in emds.items()],
            title="Mean EMD",
            of="partitioning",
            percent=False,
            compared=not population(results.scale, "user").is_stand_in,
        ),
    ]


COMPOSED = [Method(base, vc, ir) for base in BASES for ir in (False, True) for vc in (False, True)]


def composed(scale: Scale) -> Recipe:
    """Beyond the paper: FedVC, FedIR and both, with FedAvg and FedAvgM, on both populations."""
    cells: Cells = {}
    for which in PLACES:
        cells |= each_alone(scale, which)
    cells |= _bounds(scale)
    return recipe(scale, PLACES, "composed", cells=cells, blocks=_composed, ours=True)


def each_alone(scale: Scale, which: Which) -> Cells:
    """The cells of `composed` on one population."""
    return _cells(scale, population(scale, which), COMPOSED, which)


def _composed(results: Results) -> list[Block]:
    names = {which: population(results.scale, which).used for which in PLACES}
    rows = [(which, method) for which in PLACES for method in COMPOSED]
    gains = [(m.cell(which), f"{which}, {m.base}") for which, m in rows if m.vc or m.ir]
    return [
        ahead(results, gains, title="What each brings, after the last round"),
        *(at_budgets(results, rows, of=OF, by=by, called=names) for by in BUDGETS),
        _centralised(results, {which: (names[which], None) for which in PLACES}, "clients"),
        *(
            curves(
                results,
                {method.cell(which): method.cell() for method in COMPOSED},
                title=f"{names[which]}: test accuracy by round",
            )
            for which in PLACES
        ),
    ]


TABLE3 = [Method(base, ir=ir, goal=k) for base in BASES for ir in (False, True) for k in (10, 100)]
"""All with FedVC; K is the paper's report goal."""


def table3(scale: Scale) -> Recipe:
    """Table 3: the iNaturalist-User-120k benchmark."""
    clients = population(scale, "user")
    cells = _cells(scale, clients, TABLE3, virtual=True)
    cells["centralised"] = centralised(scale, clients)
    return recipe(scale, ["user"], "table3", cells=cells, blocks=_table3)


def _by_goal(results: Results, item: str, rows: Iterable[Key], first: str = "") -> Table:
    about = f", {first}" if first else ""
    of = ("method", "FedIR", "K")
    return at_budgets(results, rows, PUBLISHED[item], of=of, about=about)


def _table3(results: Results) -> list[Block]:
    clients = population(results.scale, "user")
    return [
        _by_goal(results, "table3", [("", method) for method in TABLE3]),
        _centralised(results, {"": (clients.called, CENTRALISED)}, "clients", clients),
        curves(results, [method.cell() for method in TABLE3], title="Test accuracy by round"),
    ]


LAYERS = {"two layers": 2, "all layers": None}
TABLE4 = [Method(base, ir=ir, goal=k) for base in BASES for ir in (False, True) for k in GOALS]
"""With each number of layers."""


def _chosen(scale: Scale) -> list[Method]:
    """The methods of Table 4 that are run at this scale."""
    return [method for method in TABLE4 if method.goal in goals(scale, *GOALS)]


def _cells_of_table4(scale: Scale, *trained: str) -> Cells:
    clients, found = population(scale, "landmarks"), Cells()
    for layers in trained:
        found |= _cells(scale, clients, _chosen(scale), layers, layers=LAYERS[layers])
    return found


def table4(scale: Scale) -> Recipe:
    """Table 4: the Landmarks-User-160k benchmark, two layers and all layers."""
    clients, cells = population(scale, "landmarks"), _cells_of_table4(scale, *LAYERS)
    cells |= {f"{name}, centralised": centralised(scale, clients, n) for name, n in LAYERS.items()}
    return recipe(scale, ["landmarks"], "table4", cells=cells, blocks=_table4)


def _table4(results: Results) -> list[Block]:
    chosen, clients = _chosen(results.scale), population(results.scale, "landmarks")
    bounds = {
        layers: (layers, theirs) for layers, theirs in PUBLISHED["table4-centralised"].items()
    }
    return [
        *(
            _by_goal(results, "table4", [(layers, method) for method in chosen], layers)
            for layers in LAYERS
        ),
        _centralised(results, bounds, "trained", clients),
    ]


def figure5(scale: Scale) -> Recipe:
    """Figure 5: base methods with and without FedIR, at 2.5k rounds."""
    cells = _cells(scale, population(scale, "user"), TABLE3, "iNaturalist", virtual=True)
    landmarks = _cells_of_table4(scale, *LAYERS)
    cells |= {f"Landmarks, {cell}": one for cell, one in landmarks.items()}
    return recipe(scale, ("user", "landmarks"), "figure5", cells=cells, blocks=_figure5)


def _figure5(results: Results) -> list[Block]:
    middle = 1  # index of 2.5k in the three numbers of rounds of the tables
    budget = rounds(results.scale)[middle]
    charts = [("iNaturalist", "", "table3", TABLE3)]
    charts += [(f"Landmarks, {layers}", layers, "table4", TABLE4) for layers in LAYERS]
    blocks: list[Block] = []
    for first, layers, table, methods in charts:
        plain = [m for m in methods if not m.ir and results.runs[m.cell(first)]]
        both = {"without": plain, "with": [method._replace(ir=True) for method in plain]}
        theirs = {m: PUBLISHED[table][m.cell(layers)][middle] / 100 for m in methods}
        ours = {
            f"{how} FedIR": [at_budget(results, m.cell(first), budget) for m in of]
            for how, of in both.items()
        }
        published = [
            Series(f"published, {how}", [theirs[m] for m in of], hollow=True)
            for how, of in both.items()
        ]
        groups = [f"{m.base}, K {goal(results.scale, m.goal)}" for m in plain]
        virtual = "" if layers else ", virtual clients"
        title = f"{first}{virtual}, at {budget:,} rounds"
        blocks.append(bars(groups, ours, *published, title=title, digits=1))
    return blocks


def figure7(scale: Scale) -> Recipe:
    """Figure 7: Landmarks-User-160k learning curves, the last two layers."""
    cells = _cells_of_table4(scale, "two layers")
    return recipe(scale, ["landmarks"], "figure7", cells=cells, blocks=_figure7)


def _figure7(results: Results) -> list[Block]:
    return [
        curves(
            results,
            {m.cell("two layers"): m._replace(goal=0).cell() for m in TABLE4 if m.goal == k},
            title=f"K = {goal(results.scale, k)}: test accuracy",
        )
        for k in goals(results.scale, *GOALS)
    ]


STARTS = PUBLISHED["table5-centralised"]
SHARES = (10, 50, 90)
TABLE5 = [(start, Method(base, goal=k)) for start in STARTS for base in BASES for k in (10, 100)]


def _from_starts(scale: Scale, item: str, blocks: Callable[[Results], list[Block]]) -> Recipe:
    """Both bases and report goals from both starts, and centralised training from each."""
    clients, cells = population(scale, "geo"), Cells()
    starts, more = {"scratch": clients}, ""
    if not clients.is_stand_in:
        groups = Named("mobilenetv2", {"norm": "group"})
        plain = replace(clients.plain, model=groups, weights=None, norm="shared")
        starts = {"pretrained": clients} if clients.plain.weights else {}
        starts["scratch"] = replace(clients, plain=replace(plain, normalise="dataset"))
        if not clients.plain.weights:
            more = "There are no ImageNet weights here, so only the runs from scratch are made."
    else:
        images = scale.dataset("cifar100")
        if (images == EMBEDDED) != (clients.plain.dataset.name == EMBEDDED):  # of another kind
            more = "There is no CIFAR-100 to pretrain on, so only the runs from scratch are made."
        else:
            on = "CIFAR-100, whose head is thrown away"
            on = on if images == "cifar100" else "the same embedded images"
            more = f"Pretraining is centralised training on {on}; the paper's is on ImageNet."
            cells["pretraining"] = replace(centralised(scale, clients), dataset=Named(images))
            begun = replace(clients.plain, weights=f"{FROM_CELL}pretraining")
            starts = {"pretrained": replace(clients, plain=begun), "scratch": clients}
    for start, who in starts.items():
        cells[f"{start}, centralised"] = centralised(scale, who)
        for method in (method for of, method in TABLE5 if of == start):
            last = rounds(scale)[-1]
            if scale.name == "paper" and start == "scratch":
                last = 50_000 if method.goal == 10 else 20_000
            cells |= _cells(scale, who, [method], start, virtual=True, last=last)
    return recipe(scale, ["geo"], item, cells=cells, blocks=blocks, seeds=(1, 1, 1), more=more)


def _starts(results: Results) -> list[str]:
    """The starts whose centralised training was run."""
    return [start for start in STARTS if results.runs[f"{start}, centralised"]]


def _bounds_of_starts(results: Results) -> Table:
    rows = {start: (start, STARTS[start]) for start in _starts(results)}
    return _centralised(results, rows, "start", population(results.scale, "geo"))


def table5(scale: Scale) -> Recipe:
    """Table 5: rounds to reach a relative accuracy, pretrained and from scratch."""
    return _from_starts(scale, "table5", _table5)


def _table5(results: Results) -> list[Block]:
    header = ["method", "start", "K"]
    for share in SHARES:
        header += [f"published @{share}%", f"ours @{share}%"]
    rows: list[list[str]] = []
    for start, method in TABLE5:
        rows.append([method.base, start, method.says("K", results.scale)])
        for share, theirs in zip(SHARES, PUBLISHED["table5"][method.cell(start)], strict=True):
            rows[-1] += [theirs, _rounds_to(results, start, method, share)]
    words = []
    for base in BASES:
        method = Method(base, goal=10)
        told = [f"{_rounds_to(results, of, method, 90)} {of}" for of in _starts(results)]
        words.append(
            f"{base} with the smaller report goal reaches 90% in {' and '.join(told)} rounds"
        )
    return [
        Table(
            title="Rounds to reach a relative accuracy",
            header=header,
            rows=rows,
            published=frozenset(range(3, len(header), 2)),
        ),
        _bounds_of_starts(results),
        Text(title="In these runs", paragraphs=("; ".join(words) + ".",)),
    ]


def _rounds_to(results: Results, start: str, method: Method, share: int) -> str:
    """The rounds of the first seed, and their ratio to the rounds of the smallest share."""
    whole, runs = results.runs[f"{start}, centralised"], results.runs[method.cell(start)]
    if not whole or not runs:
        return NONE
    run, best = runs[0], whole[0].final("test_accuracy") or 0.0
    found, first = (rounds_to(run.rounds, s / 100 * best) for s in (share, SHARES[0]))
    if found is None or first is None:
        return f"> {run.num_rounds:,}"
    return f"{found:,} ({found / first:.1f}×)"


def figure9(scale: Scale) -> Recipe:
    """Figure 9: learning curves from pretraining and from scratch."""
    return _from_starts(scale, "figure9", _figure9)


def _figure9(results: Results) -> list[Block]:
    shown: list[Block] = [_bounds_of_starts(results)]
    for start in _starts(results):
        whole, lines = results.final(f"{start}, centralised"), []
        best = whole.mean if whole and whole.mean else 1.0
        for method in (method for of, method in TABLE5 if of == start):
            for run in results.runs[method.cell(start)][:1]:
                at, values = run.curve("test_accuracy")
                lines.append(Line(method.cell(), at, [value / best for value in values]))
        shown.append(relative_curves(lines, title=f"{start}: relative accuracy", log_x=True))
    return shown
