"""The FedAvg report on CIFAR-10: its figures, and what it names as next: networks, FedProx."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

from fedlens.config.experiment import Clients, Experiment, LocalTraining, Named
from fedlens.core.federation import Examples, Holdings, Pool
from fedlens.data.augment import Augment
from fedlens.data.partitions.dealing import proportions
from fedlens.recipes import page
from fedlens.recipes import samples as of
from fedlens.recipes.page import (
    at_the_end,
    bars,
    beside,
    curves,
    mean_of,
    note,
    published,
    sentences,
)
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale, volatility
from fedlens.report.blocks import Block, Curves, Line, Table, Text
from fedlens.report.numbers import NONE
from fedlens.report.pairs import points
from fedlens.runs.records import Run

LAMBDA = Named("lambda-sum", {"lambda": 0.1})
FEDAVG = Named("fedavg")
RULES = {"λ rule": LAMBDA, "FedAvg": FEDAVG}
"""The rule in the report's code, and the one in its text."""

PUBLISHED = published(__name__)
HEADLINE, FALLEN = PUBLISHED["figure16"].values()  # accuracies and losses
LAMBDA_NOTE = note(__name__, "The λ rule is not FedAvg")
MEASURES = {"test_accuracy": "accuracy", "test_loss": "loss"}

Sizes = Literal["homogeneous", "low", "high"]


def sizes(how: Sizes, mode: Literal["truncate", "renormalise"] = "renormalise") -> Named:
    """A partition in the report's proportions, taken in stored order as in its code."""
    return Named("proportions", {"sizes": how, "mode": mode, "order": "stored"})


def equal_part(pool: Pool, *, share: float) -> Holdings:
    """Equal clients that together hold only a share of the examples."""
    examples = pool.examples
    count = int(len(examples) * share)
    first = Examples(examples.images[:count], examples.labels[:count])
    return proportions(pool._replace(examples=first), order="stored")


EQUAL_PART = f"{__name__}:equal_part"


def experiment(
    scale: Scale,
    algorithm: Named = LAMBDA,
    *,
    count: int = 5,
    per_round: int = 3,
    partition: Named | None = None,
    rounds: int = 20,
    model: str = "",
    outputs: int | None = 1000,
    lr: float | None = None,
    scratch: bool = False,
) -> Experiment:
    """The report's setting; values that it omits are from the book whose code it uses."""
    model = model or scale.pick("linear", "simple-cnn", "resnet18")
    partition = partition or sizes("homogeneous")
    return scale.experiment(
        "cifar10",
        (model, model, model),
        (2, rounds // 2, rounds),
        augment=scale.pick(Augment(), Augment(), Augment(crop=4, flip=True)),
        outputs=outputs and scale.pick(20, outputs, outputs),
        weights=pretrained(scale) if model == "resnet18" and not scratch else None,
        clients=Clients(count=count, per_round=per_round, partition=partition),
        local=LocalTraining(
            epochs=scale.pick(1, 1, 3),
            batch_size=scale.pick(256, 32, 32),
            lr=lr or scale.pick(0.05, 0.05, 0.001),
            momentum=0.0001,
        ),
        algorithm=(algorithm,),
    )


def pretrained(scale: Scale) -> str | None:
    """torchvision's ImageNet weights of ResNet-18, if the file is in a folder of data sets."""
    return scale.weights("resnet18") if scale.name == "paper" else None


def recipe(
    scale: Scale, item: str, blocks: Callable[[Results], list[Block]], seeds: int = 3, **more: Any
) -> Recipe:
    """The recipe of an item, with this many seeds at the paper's scale."""
    small, also = sentences(__name__, "Small"), []
    if scale.name == "paper":
        weights = pretrained(scale)
        from_scratch = sentences(__name__, "Without weights")
        start = f"ResNet-18 starts from {weights}." if weights else from_scratch
        also = [sentences(__name__, "Augmentation"), start]
    more |= {"on": ["cifar10"], "seeds": (1, 1, seeds), "small": small, "also": also}
    return page.recipe(__name__, scale, item, blocks, **more)


def by_round(
    results: Results,
    cells: Mapping[str, str] | Sequence[str] = (),
    measure: str = "test_accuracy",
    title: str = "Test {} by round",
    **more: Any,
) -> Curves:
    return curves(results, cells, measure, title=title.format(MEASURES[measure]), **more)


def last_round(
    results: Results, theirs: Mapping[str, Sequence[float]], of: str = "run"
) -> list[Block]:
    """Final accuracy and loss of every cell, with the published ones."""

    accuracies, losses = (
        [(cell, theirs.get(cell, (None, None))[i], results.final(cell, m)) for cell in results.runs]
        for i, m in enumerate(MEASURES)
    )
    return [
        beside(accuracies, title="Test accuracy after the last round, %", of=of),
        beside(losses, title="Test loss after the last round", of=of, percent=False, digits=3),
    ]


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
        ends = last_round(results, {as_published: HEADLINE})
        return [*ends, by_round(results), LAMBDA_NOTE]

    return recipe(scale, "headline", blocks, cells=cells)


def figure12(scale: Scale) -> Recipe:
    """Figure 12: accuracy and loss of federated training, by rounds."""
    cells = {name: experiment(scale, rule) for name, rule in RULES.items()}

    def blocks(results: Results) -> list[Block]:
        most = max(run.num_rounds for run in results.all)
        book = {"the book, K = 10, C = 5": PUBLISHED["book"][:most]}
        return [
            by_round(results, published=book),
            by_round(results, measure="test_loss"),
            *last_round(results, {"λ rule": HEADLINE}),
            LAMBDA_NOTE,
        ]

    return recipe(scale, "figure12", blocks, cells=cells)


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

    def blocks(results: Results) -> list[Block]:
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

    return recipe(scale, "figure13", blocks, cells=cells)


def _what_it_takes(results: Results, cell: str) -> list[str]:
    """The round, and the images seen, at which runs first come near their best accuracy."""
    found: list[tuple[float, float]] = []
    for run in results.runs[cell]:
        near = _near_its_best(run)
        found.append((near, _seen(run)[near - 1]))
    rounds, images = map(Measured.of, zip(*found, strict=True))
    accuracy = mean_of(results.final(cell))
    return [cell, accuracy, mean_of(rounds, 1, times=1), mean_of(images, 0, times=1)]


def _near_its_best(run: Run) -> int:
    """The first round in which a run is near its best accuracy."""
    accuracies = [record["test_accuracy"] for record in run.rounds]
    return next(i for i, y in enumerate(accuracies, 1) if y >= NEAR * max(accuracies))


def _seen(run: Run) -> list[float]:
    """The cumulative number of training images at the end of each round."""
    return list(accumulate(record["examples"] for record in run.rounds))


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

    def blocks(results: Results) -> list[Block]:
        found = {name: [results.final(f"{name}, {c} a round") for c in COHORTS] for name in RULES}
        gains = [
            [name, *(points(f.mean - one.mean, "+") if f and one else NONE for f in more)]
            for name, (one, *more) in found.items()
        ]
        header = ("rule", *(f"{c} a round" for c in COHORTS[1:]))
        groups = ["1 client a round", *(f"{c} clients a round" for c in COHORTS[1:])]
        return [
            bars(groups, found, title="Client versus accuracy"),
            Table(title="What more clients a round are worth", header=header, rows=gains),
            LAMBDA_NOTE,
        ]

    return recipe(scale, "figure14", blocks, cells=cells, seeds=5)


SPLITS = {
    "homogeneous": sizes("homogeneous"),
    "low, truncated": sizes("low", "truncate"),
    "equal, a quarter of the images": Named(EQUAL_PART, {"share": 0.25}),
    "low, renormalised": sizes("low"),
    "high, truncated": sizes("high", "truncate"),
    "equal, a twentieth of the images": Named(EQUAL_PART, {"share": 0.05}),
}


def figure16(scale: Scale) -> Recipe:
    """Figures 15 and 16: homogeneous against heterogeneous clients, K = 5, C = 3."""
    keys = [("λ rule", name) for name in SPLITS]
    keys += [("FedAvg", "homogeneous"), ("FedAvg", "low, renormalised")]
    cells = {
        f"{rule}, {name}": experiment(scale, RULES[rule], partition=SPLITS[name], rounds=30)
        for rule, name in keys
    }

    def blocks(results: Results) -> list[Block]:
        lines, title = {f"λ rule, {name}": name for name in SPLITS}, "Test {} by round, λ rule"
        return [
            *last_round(results, PUBLISHED["figure16"], "rule, clients"),
            Text(title="Heterogeneity, or less data?", paragraphs=apart(results)),
            _smoother_and_slower(results),
            _over_rounds(results),
            *(by_round(results, lines, measure, title) for measure in MEASURES),
            note(__name__, "What the report calls heterogeneity is also a lack of data"),
            LAMBDA_NOTE,
        ]

    return recipe(scale, "figure16", blocks, cells=cells)


def _smoother_and_slower(results: Results) -> Table:
    """The report says both of the curve of equal clients, of which it has one run."""
    rows = []
    for cell, runs in results.runs.items():
        jumps = Measured.of([volatility(run.curve("test_accuracy")[1]) for run in runs])
        near = Measured.of([float(_near_its_best(run)) for run in runs])
        rows.append([cell, mean_of(jumps), mean_of(near, 1, times=1), str(len(runs))])
    header = ("rule, clients", "jumps, points", "rounds to 95% of its best", "n")
    return Table(title="Smoother and slower, as numbers", header=header, rows=rows)


def _over_rounds(results: Results) -> Table:
    """Test accuracy after some numbers of rounds: the report picks E = 20."""
    most = max(run.num_rounds for run in results.all)
    at = range(5, most + 1, 5)
    rows = []
    for cell, runs in results.runs.items():
        curves = [dict(zip(*run.curve("test_accuracy"), strict=True)) for run in runs]
        rows.append([cell, *(mean_of(Measured.of([one.get(r) for one in curves])) for r in at)])
    header = ("rule, clients", *(f"{r} rounds" for r in at))
    return Table(title="Accuracy over the number of rounds", header=header, rows=rows)


def apart(results: Results) -> list[str]:
    """The report's drop in accuracy, split into the effects of less data and of unequal clients."""
    names = ("homogeneous", "low, truncated", "equal, a quarter of the images", "low, renormalised")
    ends = [results.final(f"λ rule, {name}") for name in names]
    whole, low, quarter, rescaled = (end and end.mean for end in ends)
    if not (whole and low and quarter):
        return ["The runs that would take the fall apart are not all here."]
    said = (
        f"From equal clients with all images to the report's heterogeneous ones it is "
        f"{points(low - whole, '+')} points here (published: "
        f"{points(FALLEN[0] - HEADLINE[0], '+')}). Less data alone, equal clients with a quarter "
        f"of the images, makes {points(quarter - whole, '+')}; unequal sizes on top of that "
        f"{points(low - quarter, '+')}."
    )
    if rescaled:
        said += (
            " Unequal sizes alone, the same proportions over all images, make "
            f"{points(rescaled - whole, '+')}."
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

    def blocks(results: Results) -> list[Block]:
        shown: list[Block] = [last_round(results, {}, "rule, clients")[0]]
        for name in RULES:
            lines = {f"{name}, {how}": how for how in SIZES}
            shown += [by_round(results, lines, m, name + ": test {} by round") for m in MEASURES]
        return [*shown, note(__name__, "What to expect"), LAMBDA_NOTE]

    return recipe(scale, "figure17", blocks, cells=cells)


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

    def blocks(results: Results) -> list[Block]:
        rounds = max(run.num_rounds for run in results.all)
        groups, shown = [f"{c} a round" for c in COHORTS], list[Block]()
        for name in _rules_of_18(scale):
            ends: dict[str, list[Measured | None]] = {
                how: [results.final(f"{name}, {how}, {c} a round") for c in COHORTS]
                for how in SIZES
            }
            shown.append(bars(groups, ends, title=f"Client versus accuracy, {name}"))
        return [
            *shown,
            Table(
                title="Is the client with 91% of the images drawn?",
                caption="At the high level one client holds 91% of all images. With C of 10 "
                "clients a round it is drawn with probability C/10, so often in "
                f"{rounds} rounds.",
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

    return recipe(scale, "figure18", blocks, cells=cells, seeds=5, keeps=("clients",))


def _rules_of_18(scale: Scale) -> list[str]:
    return list(RULES)[: scale.pick(1, 1, 2)]


def drawn(results: Results) -> Table:
    """A table, by run, of when the client with 91% of the images took part."""
    rows: list[list[str]] = []
    for cell, runs in _high(results).items():
        for run in runs:
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
    for cell, runs in _high(results).items():
        found = [(_took_part(run), run.final("test_accuracy")) for run in runs]
        points = sorted((len(w), y) for w, y in found if w is not None and y is not None)
        lines.append(Line(cell, [x for x, _ in points], [y for _, y in points]))
    return Curves(
        title="Accuracy by how often it was drawn",
        lines=lines,
        x_label="rounds with the largest client",
        y_label="test accuracy",
        percent=True,
    )


def _high(results: Results) -> dict[str, Sequence[Run]]:
    """The runs in which one client has 91% of the images, by cell."""
    return {cell: runs for cell, runs in results.runs.items() if ", high, " in cell and runs}


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
        cell: experiment(scale, FEDAVG, model=models[name], outputs=None, lr=lr, scratch=True)
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

    return recipe(scale, "architectures", blocks, cells=cells, ours=True)


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

    return recipe(scale, "fedprox", blocks, cells=cells, ours=True)
