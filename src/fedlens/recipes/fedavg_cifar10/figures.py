"""The report's figures, and what it names as next: networks compared, FedProx."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from fedlens.config.experiment import Named
from fedlens.recipes import samples as of
from fedlens.recipes.fedavg_cifar10.setting import (
    FEDAVG,
    LAMBDA,
    LAMBDA_NOTE,
    MEASURES,
    RULES,
    Sizes,
    by_round,
    experiment,
    last_round,
    part,
    pretrained,
    recipe,
    sizes,
)
from fedlens.recipes.page import at_the_end, bars, mean_of, note
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Line, Table, Text
from fedlens.report.numbers import NONE, signed_points
from fedlens.runs.records import Run

ACCURACY, LOSS = 0.7151, 0.828486  # of the headline run
COHORTS = (1, 3, 5)
SIZES: tuple[Sizes, ...] = ("homogeneous", "low", "high")


def samples(scale: Scale) -> Recipe:
    """Figure 1: samples of CIFAR-10."""
    held = {"training images": 50_000, "test images": 10_000, "classes": 10}
    return of.samples(__name__, scale, "cifar10", 10, held)


def headline(scale: Scale) -> Recipe:
    """The headline run, section 3.1 and Figure 11: five clients, three a round, 20 rounds."""
    as_published = "λ rule, 1000 outputs"
    cells = {
        as_published: experiment(scale, LAMBDA),
        "FedAvg, 1000 outputs": experiment(scale, FEDAVG),
        "FedAvg, 10 outputs": experiment(scale, FEDAVG, outputs=None),
    }

    def blocks(results: Results) -> list[Block]:
        ends = last_round(results, {as_published: (ACCURACY, LOSS)})
        return [*ends, by_round(results), LAMBDA_NOTE]

    return recipe(scale, "headline", cells=cells, blocks=blocks)


BOOK = (
    0.03, 0.26, 0.44, 0.50, 0.54, 0.57, 0.59, 0.60, 0.61, 0.625,
    0.63, 0.64, 0.65, 0.655, 0.665, 0.67, 0.675, 0.68, 0.683, 0.687,
)  # fmt: skip
"""The curve in the book whose code the report uses: ten clients, five per round (read off it)."""


def figure12(scale: Scale) -> Recipe:
    """Figure 12: accuracy and loss of federated training, by rounds."""
    cells = {name: experiment(scale, rule) for name, rule in RULES.items()}

    def blocks(results: Results) -> list[Block]:
        book = {"the book, K = 10, C = 5": BOOK[: _most_rounds(results)]}
        return [
            by_round(results, published=book),
            by_round(results, measure="test_loss"),
            *last_round(results, {"λ rule": (ACCURACY, LOSS)}),
            LAMBDA_NOTE,
        ]

    return recipe(scale, "figure12", cells=cells, blocks=blocks)


def _most_rounds(results: Results) -> int:
    return max(run.num_rounds for run in results.all)


NEAR = 0.95  # of the best accuracy: from there a run counts as converged; notes.md says so


def figure13(scale: Scale) -> Recipe:
    """Figure 13: centralised training, K = C = 1, and the claim that it takes longer."""
    alone, proper = (
        experiment(scale, rule, count=1, per_round=1, rounds=30) for rule in (LAMBDA, FEDAVG)
    )
    cells = {
        "federated, λ rule": experiment(scale, LAMBDA),
        "K = C = 1, λ rule": alone,
        "centralised": replace(proper, local=replace(proper.local, reset=False)),
    }
    return recipe(scale, "figure13", cells=cells, blocks=_figure13)


def _figure13(results: Results) -> list[Block]:
    return [
        Table(
            title="What it takes",
            header=("run", "final accuracy, %", "rounds", "images seen"),
            rows=[_what_it_takes(results, cell) for cell in results.runs],
        ),
        by_round(results),
        by_round(results, measure="test_loss"),
        _by_images(results),
        note(__name__, "Why “centralised” looked slow"),
    ]


def _what_it_takes(results: Results, cell: str) -> list[str]:
    """The round, and the images seen, at which runs first come near their best accuracy."""
    found: list[tuple[float, float]] = []
    for run in results.runs[cell]:
        accuracies = [record["test_accuracy"] for record in run.rounds]
        near = next(i for i, y in enumerate(accuracies) if y >= NEAR * max(accuracies))
        found.append((near + 1, _seen(run)[near]))
    rounds, images = map(Measured.of, zip(*found, strict=True))
    accuracy = mean_of(results.final(cell))
    return [cell, accuracy, mean_of(rounds, 1, times=1), mean_of(images, 0, times=1)]


def _seen(run: Run) -> list[float]:
    """The cumulative number of training images at the end of each round."""
    return list(itertools.accumulate(record["examples"] for record in run.rounds))


def _by_images(results: Results) -> Curves:
    """Curves by images seen. Clients hold equally many, so all seeds share the same x values."""
    shown = by_round(results, title="Test accuracy by images seen", x_label="images seen, millions")
    seen = {cell: _seen(runs[0]) for cell, runs in results.runs.items()}
    lines = [
        replace(line, x=[seen[line.name][int(r) - 1] / 1e6 for r in line.x]) for line in shown.lines
    ]
    return replace(shown, lines=lines)


def figure14(scale: Scale) -> Recipe:
    """Figure 14: clients a round against accuracy, homogeneous clients."""
    cells = {
        f"{name}, {c} a round": experiment(scale, rule, count=10, per_round=c)
        for name, rule in RULES.items()
        for c in COHORTS
    }
    return recipe(scale, "figure14", cells=cells, blocks=_figure14, seeds=5)


def _figure14(results: Results) -> list[Block]:
    found = {name: [results.final(f"{name}, {c} a round") for c in COHORTS] for name in RULES}
    gains = [
        [name, *(signed_points(f.mean - one.mean) if f and one else NONE for f in more)]
        for name, (one, *more) in found.items()
    ]
    return [
        bars(
            ["1 client a round", *(f"{c} clients a round" for c in COHORTS[1:])],
            found,
            title="Client versus accuracy",
        ),
        Table(
            title="What more clients a round are worth",
            header=("rule", *(f"{c} a round" for c in COHORTS[1:])),
            rows=gains,
        ),
        LAMBDA_NOTE,
    ]


SPLITS = {
    "homogeneous": sizes("homogeneous"),
    "low, truncated": sizes("low", "truncate"),
    "equal, a quarter of the images": part(0.25),
    "low, renormalised": sizes("low"),
    "high, truncated": sizes("high", "truncate"),
    "equal, a twentieth of the images": part(0.05),
}
HETEROGENEOUS = "λ rule, low, truncated"
PUBLISHED = {  # accuracy and loss, from Figures 11 and 15
    "λ rule, homogeneous": (ACCURACY, LOSS),
    HETEROGENEOUS: (0.6076, 1.144015),
}


def figure16(scale: Scale) -> Recipe:
    """Figures 15 and 16: homogeneous against heterogeneous clients, K = 5, C = 3."""
    keys = [("λ rule", name) for name in SPLITS]
    keys += [("FedAvg", "homogeneous"), ("FedAvg", "low, renormalised")]
    cells = {
        f"{rule}, {name}": experiment(scale, RULES[rule], partition=SPLITS[name], rounds=30)
        for rule, name in keys
    }
    return recipe(scale, "figure16", cells=cells, blocks=_figure16)


def _figure16(results: Results) -> list[Block]:
    lines = {f"λ rule, {name}": name for name in SPLITS}
    return [
        *last_round(results, PUBLISHED, "rule, clients"),
        Text(title="Heterogeneity, or less data?", paragraphs=apart(results)),
        *(by_round(results, lines, measure, "Test {} by round, λ rule") for measure in MEASURES),
        note(__name__, "What the report calls heterogeneity is also a lack of data"),
        LAMBDA_NOTE,
    ]


def apart(results: Results) -> list[str]:
    """The report's drop in accuracy, split into the effects of less data and of unequal clients."""
    names = ("homogeneous", "low, truncated", "equal, a quarter of the images", "low, renormalised")
    whole, low, quarter, rescaled = (results.final(f"λ rule, {name}") for name in names)
    if not (whole and low and quarter):
        return ["The runs that would take the fall apart are not all here."]

    def points(one: Measured, other: Measured) -> str:
        return signed_points(one.mean - other.mean)

    said = (
        f"From equal clients with all images to the report's heterogeneous ones it is "
        f"{points(low, whole)} points here (published: {signed_points(0.6076 - 0.7151)}). Less "
        f"data alone, equal clients with a quarter of the images, makes "
        f"{points(quarter, whole)}; unequal sizes on top of that {points(low, quarter)}."
    )
    if rescaled:
        said += (
            f" Unequal sizes alone, the same proportions over all images, make "
            f"{points(rescaled, whole)}."
        )
    return [said]


def figure17(scale: Scale) -> Recipe:
    """Figure 17: homogeneous against heterogeneous clients, K = 10, C = 5."""
    ten: dict[str, Any] = {"count": 10, "per_round": 5, "rounds": 30}
    cells = {
        f"{name}, {how}": experiment(scale, rule, partition=sizes(how), **ten)
        for name, rule in RULES.items()
        for how in SIZES
    }
    return recipe(scale, "figure17", cells=cells, blocks=_figure17)


def _figure17(results: Results) -> list[Block]:
    return [
        last_round(results, {}, "rule, clients")[0],
        *(
            by_round(
                results,
                {f"{name}, {how}": how for how in SIZES},
                measure,
                name + ": test {} by round",
            )
            for name in RULES
            for measure in MEASURES
        ),
        note(__name__, "What to expect"),
        LAMBDA_NOTE,
    ]


def figure18(scale: Scale) -> Recipe:
    """Figure 18: clients a round, heterogeneity and accuracy."""
    cells = {
        f"{name}, {how}, {c} a round": experiment(
            scale, RULES[name], count=10, per_round=c, partition=sizes(how)
        )
        for name in _rules_of_18(scale)
        for how in SIZES
        for c in COHORTS
    }
    return recipe(scale, "figure18", cells=cells, blocks=_figure18, seeds=5, keeps=("clients",))


def _rules_of_18(scale: Scale) -> list[str]:
    return list(RULES)[: scale.pick(1, 1, 2)]


def _figure18(results: Results) -> list[Block]:
    rounds, rules = _most_rounds(results), _rules_of_18(results.scale)

    def ends(name: str) -> dict[str, list[Measured | None]]:
        cells = {how: [f"{name}, {how}, {c} a round" for c in COHORTS] for how in SIZES}
        return {how: [results.final(cell) for cell in of_size] for how, of_size in cells.items()}

    groups = [f"{c} a round" for c in COHORTS]
    return [
        *(bars(groups, ends(name), title=f"Client versus accuracy, {name}") for name in rules),
        Table(
            title="Is the client with 91% of the images drawn?",
            caption=f"At the high level one client holds 91% of all images. With C of 10 clients a "
            f"round it is drawn with probability C/10, so often in {rounds} rounds.",
            header=("clients a round", "probability", "expected rounds", "standard deviation"),
            rows=[
                [c, f"{p:.1f}", f"{rounds * p:.1f}", f"{(rounds * p * (1 - p)) ** 0.5:.1f}"]
                for c in COHORTS
                for p in [c / 10]
            ],
        ),
        drawn(results),
        how_often(results),
        note(__name__, "One run says little here"),
        LAMBDA_NOTE,
    ]


def drawn(results: Results) -> Table:
    """A table, by run, of when the client with 91% of the images took part."""
    rows: list[list[str]] = []
    for cell in _high(results):
        for run in results.runs[cell]:
            when, final = _took_part(run), run.final("test_accuracy")
            told = (NONE, NONE)
            if when is not None:
                told = f"{len(when)} of {run.num_rounds}", ", ".join(map(str, when))
            accuracy = NONE if final is None else f"{100 * final:.2f}"
            rows.append([cell, str(run.manifest["seed"]), *told, accuracy])
    return Table(
        title="When it was drawn", header=("run", "seed", "rounds", "which", "accuracy"), rows=rows
    )


def how_often(results: Results) -> Curves:
    """The accuracy of every run against the rounds with the client that has 91% of the images."""
    lines = []
    for cell in _high(results):
        found = [(_took_part(run), run.final("test_accuracy")) for run in results.runs[cell]]
        points = sorted((len(w), y) for w, y in found if w is not None and y is not None)
        lines.append(Line(cell, [x for x, _ in points], [y for _, y in points]))
    return Curves(
        title="Accuracy by how often it was drawn",
        lines=lines,
        x_label="rounds with the largest client",
        y_label="test accuracy",
        percent=True,
    )


def _high(results: Results) -> list[str]:
    """The cells in which one client has 91% of the images, as far as they were run."""
    cells = [f"{name}, high, {c} a round" for name in _rules_of_18(results.scale) for c in COHORTS]
    return [cell for cell in cells if results.runs[cell]]


def _took_part(run: Run) -> list[int] | None:
    """The rounds in which the largest client trained; None if records do not list clients."""
    assert run.partition is not None
    largest = run.partition["sizes"].index(max(run.partition["sizes"]))
    if not all("clients" in record for record in run.rounds):
        return None
    return [record["round"] for record in run.rounds if largest in record["clients"]]


NETWORKS = {
    "softmax regression": "linear",
    "LeNet-5": "lenet5",
    "AlexNet": "alexnet-32",
    "VGG-11": "vgg11",
    "ResNet-18": "resnet18",
}
SAYS = {
    "softmax regression": "direct linear models perform poorly on CIFAR-10",
    "LeNet-5": "robust and fast, but needs more parameters",
    "AlexNet": "oversaturates when data are too big or small",
    "VGG-11": "effective, but needs more memory",
}
PRETRAINED = "ResNet-18, ImageNet weights, lr 0.001"


def architectures(scale: Scale) -> Recipe:
    """The introduction's comparison: LeNet, AlexNet, VGG and softmax regression, federated."""
    models = dict(list(NETWORKS.items())[: scale.pick(2, 2, None)])
    if scale.name == "small":
        models["small CNN"] = "simple-cnn"
    rates = scale.pick((0.05,), (0.05,), (0.001, 0.01))
    networks = {f"{name}, lr {lr:g}": (name, lr) for name in models for lr in rates}
    cells = {
        cell: experiment(
            scale, FEDAVG, model=Named(models[name]), outputs=None, lr=lr, scratch=True
        )
        for cell, (name, lr) in networks.items()
    }
    if pretrained(scale):
        cells[PRETRAINED] = experiment(scale, FEDAVG, outputs=None)

    def blocks(results: Results) -> list[Block]:
        rows: list[list[str | float | None]] = [
            [
                cell,
                SAYS.get(networks[cell][0]) if cell in networks else None,
                mean_of(results.final(cell)),
                f"{one.manifest['parameters']:,}",
                f"{(one.total('bytes_up') or 0) / one.num_rounds / 1e6:.2f}",
            ]
            for cell, (one, *_) in results.runs.items()
        ]
        words = ("network", "the report's word", "accuracy, %", "parameters", "MB up a round")
        table = Table(title="Accuracy and cost", header=words, rows=rows, published=frozenset({1}))
        return [table, by_round(results), note(__name__, "What the claim is worth")]

    return recipe(scale, "architectures", cells=cells, blocks=blocks, ours=True)


LEVELS = SIZES[1:]
ALIKE = 5 / 10 * 45_500 / (45_500 + 4 * 500)
"""The mean weight of the largest `high` client with uniform draws: it is in half of the cohorts."""


def fedprox(scale: Scale) -> Recipe:
    """FedProx, the report's next step (section 5 and Figure 19)."""
    mus = scale.pick((0.0, 0.1), (0.0, 0.1, 1.0), (0.0, 0.01, 0.1, 1.0))
    # As in Figure 19: a client is drawn with probability n_k / n, and the mean is unweighted. So
    # the largest client is drawn several times per round, which takes that much longer.
    printed = scale.pick((0.1,), (0.1,), (0.0, 0.1))
    rules = {f"mu {mu:g}": Named("fedprox", {"mu": mu}) for mu in mus} | {
        f"mu {mu:g}, drawn by size": Named("fedprox", {"mu": mu, "sampling": "by-size"})
        for mu in printed
    }
    cells = {
        f"{how}, {name}": experiment(scale, rule, count=10, per_round=5, partition=sizes(how))
        for how in LEVELS
        for name, rule in rules.items()
    }

    def blocks(results: Results) -> list[Block]:
        run = [name for name in rules if any(results.runs[f"{how}, {name}"] for how in LEVELS)]
        of = {how: {name: f"{how}, {name}" for name in run} for how in LEVELS}
        return [
            bars(
                run,
                {how: [results.final(of[how][name]) for name in run] for how in LEVELS},
                title="Accuracy by mu",
            ),
            Table(
                title="Accuracy after the last round, %",
                header=("", *LEVELS),
                rows=[
                    [name, *(at_the_end(results, of[how][name]) for how in LEVELS)] for name in run
                ],
            ),
            *(
                by_round(
                    results,
                    {cell: name for name, cell in of[how].items()},
                    title=f"{how} heterogeneity: test {{}} by round",
                )
                for how in LEVELS
            ),
            note(__name__, "fedprox / What to expect", alike=f"{ALIKE:.0%}"),
        ]

    return recipe(scale, "fedprox", cells=cells, blocks=blocks, ours=True)
