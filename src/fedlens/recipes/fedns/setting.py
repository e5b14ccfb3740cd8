"""What the tables and figures of FedNS share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.recipes.page import ahead, beside, curves, note, paired, told
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Table, Text

ALGORITHMS = {"FedAvg": Named("fedavg"), "FedAvg+lastFC": Named("lastfc"), "FedNS": Named("fedns")}
SPLITS = {"iid": ("FedAvg", "FedNS"), "non-iid": tuple(ALGORITHMS)}
CELLS = {f"{split}, {name}": (split, name) for split, names in SPLITS.items() for name in names}
"""With iid clients, FedAvg+lastFC equals FedAvg, so it has no cell."""

F_SCORE = "macro F-score"
MEASURES = {
    "accuracy": "test_accuracy",
    "macro precision": "test_precision",
    F_SCORE: "test_f1",
    "top-1 accuracy": "test_accuracy",
    "top-5 accuracy": "test_top5",
}


@dataclass(frozen=True)
class Study:
    """One data set of the paper, with its network and the numbers of Table 1, 2 or 3."""

    dataset: str
    model: Named
    per_class: int  # with iid clients; otherwise up to twice as many
    num_classes: int
    published: Mapping[str, tuple[float, ...]]  # by measure, in the order of CELLS
    remark: str = ""  # about what the paper does not say


FASHION = Study(
    "fashion-mnist",
    Named("fedns-cnn"),
    5,
    10,
    {
        "accuracy": (0.8353, 0.8379, 0.8296, 0.8350, 0.8356),
        "macro precision": (0.834, 0.838, 0.830, 0.837, 0.838),
        F_SCORE: (0.931, 0.936, 0.926, 0.933, 0.929),
    },
)
CIFAR = Study(
    "cifar10",
    Named("alexnet-32"),
    50,
    10,
    {
        "accuracy": (0.6609, 0.6707, 0.6586, 0.6557, 0.6755),
        "macro precision": (0.658, 0.668, 0.660, 0.658, 0.671),
        F_SCORE: (0.740, 0.745, 0.737, 0.737, 0.745),
    },
    "The paper names AlexNet, which cannot take images of 32 × 32; its usual form for them is "
    "ours.",
)
TINY = Study(
    "tiny-imagenet",
    Named("resnet18", {"stem": "tiny"}),
    5,
    200,
    {
        "top-1 accuracy": (0.1899, 0.1911, 0.1864, 0.1889, 0.1891),
        "top-5 accuracy": (0.4114, 0.4139, 0.4080, 0.4086, 0.4105),
    },
    "The paper names ResNet-18 and not how its stem takes images of 64 × 64. Ours has a 3 × 3 "
    "convolution of stride 1 in the place of the 7 × 7 of stride 2, which leaves a last map of "
    "4 × 4.",
)


def table1(scale: Scale) -> Recipe:
    """Table 1: Fashion-MNIST with a CNN of five layers."""
    return _recipe(FASHION, scale, "table", table_blocks)


def table2(scale: Scale) -> Recipe:
    """Table 2: CIFAR-10 with AlexNet."""
    return _recipe(CIFAR, scale, "table", table_blocks)


def table3(scale: Scale) -> Recipe:
    """Table 3: Tiny ImageNet with ResNet-18."""
    return _recipe(TINY, scale, "table", table_blocks)


def figure1(scale: Scale) -> Recipe:
    """Figure 1: Fashion-MNIST with a CNN of five layers."""
    return _recipe(FASHION, scale, "figure", figure_blocks)


def figure2(scale: Scale) -> Recipe:
    """Figure 2: CIFAR-10 with AlexNet."""
    return _recipe(CIFAR, scale, "figure", figure_blocks)


def figure3(scale: Scale) -> Recipe:
    """Figure 3: Tiny ImageNet with ResNet-18."""
    return _recipe(TINY, scale, "figure", figure_blocks)


def _recipe(
    study: Study, scale: Scale, item: str, blocks: Callable[[Study, Results], list[Block]]
) -> Recipe:
    return Recipe(
        *told(__name__, item, dataset=study.dataset),
        cells={cell: _experiment(study, scale, *axes) for cell, axes in CELLS.items()},
        seeds=range(scale.pick(2, 3, 10)),
        blocks=partial(blocks, study),
        stand_in=_stand_in(study, scale),
        num_classes={study.dataset: study.num_classes},
    )


def _experiment(study: Study, scale: Scale, split: str, algorithm: str) -> Experiment:
    most = scale.pick(2, min(study.per_class, 10), study.per_class)
    drawn = {"per_class": most} if split == "iid" else {"low": 1, "high": 2 * most}
    gray = study.dataset == "fashion-mnist"
    light = Named("lenet5") if gray else Named("simple-cnn")
    return Experiment(
        dataset=Named(scale.dataset(study.dataset)),
        model=scale.pick(Named("linear"), light, study.model),
        rounds=scale.pick(3, 15, 50),
        engine=scale.engine,
        clients=Clients(count=10, per_round=10, partition=Named("fresh", drawn)),
        local=LocalTraining(epochs=scale.pick(1, 5, 5), batch_size=10, lr=0.01),
        evaluate=Evaluate(on=("test",)),
        algorithm=(ALGORITHMS[algorithm],),
    )


def _stand_in(study: Study, scale: Scale) -> str:
    if scale.name != "small":
        return scale.instead(study.dataset)
    words = "A light CNN takes the place of the paper's network, 15 rounds that of 50, three seeds "
    words += "that of ten; a client has at most ten images of a class where CIFAR-10's have 50."
    return f"{words} {scale.instead(study.dataset)}".strip()


def table_blocks(study: Study, results: Results) -> list[Block]:
    tables = [
        beside(
            [
                (cell, value, results.final(cell, MEASURES[name]))
                for cell, value in zip(CELLS, theirs, strict=True)
            ],
            title=f"{name[0].upper()}{name[1:]}, %",
            of="clients, algorithm",
            compared=_is_on_its_data(study, results),
        )
        for name, theirs in study.published.items()
    ]
    lead = ahead(results, PAIRS, title="How far is one ahead of another?")
    bounds = [bound(study)] if F_SCORE in study.published else []
    return [lead, *tables, *_pairs(study, results), *bounds, remarks(study)]


def _is_on_its_data(study: Study, results: Results) -> bool:
    """Whether runs use the paper's data with all classes."""
    return results.scale.dataset(study.dataset) == study.dataset and all(
        len(run.manifest["classes"]) == study.num_classes for run in results.all
    )


def figure_blocks(study: Study, results: Results) -> list[Block]:
    shown = [
        curves(
            results,
            {f"{split}, {name}": name for name in names if name != "FedAvg"},
            MEASURES[measure],
            against=f"{split}, FedAvg",
            title=f"{split}: {measure} above FedAvg's",
            y_label=f"{measure} − FedAvg's",
        )
        for measure in study.published
        for split, names in SPLITS.items()
    ]
    return [*shown, *_pairs(study, results), remarks(study)]


PAIRS = [
    ("iid, FedNS", "iid, FedAvg"),
    ("non-iid, FedAvg+lastFC", "non-iid, FedAvg"),
    ("non-iid, FedNS", "non-iid, FedAvg"),
    ("non-iid, FedNS", "non-iid, FedAvg+lastFC"),
]


def _pairs(study: Study, results: Results) -> list[Table]:
    measures = [name for name in study.published if name != F_SCORE]
    return [
        paired(results, PAIRS, MEASURES[name], title=f"Differences in {name}, points")
        for name in measures
    ]


def bound(study: Study) -> Table:
    """The published F-scores compared with the bound from precision and recall."""
    columns = (study.published[n] for n in ("accuracy", "macro precision", F_SCORE))
    return Table(
        title="The published F-scores are impossible",
        header=("clients, algorithm", "published F-score", "the most it can be"),
        rows=[
            [cell, f"{f:.3f}", f"{(precision + recall) / 2:.3f}"]
            for cell, recall, precision, f in zip(CELLS, *columns, strict=True)
        ],
        published=frozenset({1, 2}),
    )


def remarks(study: Study) -> Text:
    said = note(__name__, "What is not in the paper")
    return replace(said, paragraphs=[*said.paragraphs, *filter(None, [study.remark])])
