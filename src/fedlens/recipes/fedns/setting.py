"""What the tables and figures of FedNS share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.recipes.page import ahead, beside, curves, note, paired, published, recipe, sentences
from fedlens.recipes.recipe import NUM_CLASSES, Recipe, Results, Scale
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
    """One data set of the paper, with its network: that of Table and Figure 1, 2 or 3."""

    dataset: str
    model: Named
    per_class: int  # with iid clients; otherwise up to twice as many
    remark: str = ""  # the section of notes.md about what the paper does not say of it

    @property
    def published(self) -> Mapping[str, Sequence[float]]:
        """The numbers of its table: by measure, in the order of CELLS."""
        return PUBLISHED[self.dataset]


PUBLISHED: Mapping[str, Mapping[str, Sequence[float]]] = published(__name__)
FASHION = Study("fashion-mnist", Named("fedns-cnn"), 5)
CIFAR = Study("cifar10", Named("alexnet-32"), 50, "AlexNet")
TINY = Study("tiny-imagenet", Named("resnet18", {"stem": "tiny"}), 5, "The stem of ResNet-18")


def table1(scale: Scale) -> Recipe:
    """Table 1: Fashion-MNIST with a CNN of five layers."""
    return _recipe(FASHION, scale, "table")


def table2(scale: Scale) -> Recipe:
    """Table 2: CIFAR-10 with AlexNet."""
    return _recipe(CIFAR, scale, "table")


def table3(scale: Scale) -> Recipe:
    """Table 3: Tiny ImageNet with ResNet-18."""
    return _recipe(TINY, scale, "table")


def figure1(scale: Scale) -> Recipe:
    """Figure 1: Fashion-MNIST with a CNN of five layers."""
    return _recipe(FASHION, scale, "figure")


def figure2(scale: Scale) -> Recipe:
    """Figure 2: CIFAR-10 with AlexNet."""
    return _recipe(CIFAR, scale, "figure")


def figure3(scale: Scale) -> Recipe:
    """Figure 3: Tiny ImageNet with ResNet-18."""
    return _recipe(TINY, scale, "figure")


def _recipe(study: Study, scale: Scale, item: Literal["table", "figure"]) -> Recipe:
    return recipe(
        __name__,
        scale,
        item,
        partial(table_blocks if item == "table" else figure_blocks, study),
        cells={cell: _experiment(study, scale, *axes) for cell, axes in CELLS.items()},
        on=[study.dataset],
        seeds=(2, 3, 10),
        small=sentences(__name__, "Small"),
        values={"dataset": study.dataset},
    )


def _experiment(study: Study, scale: Scale, split: str, algorithm: str) -> Experiment:
    most = scale.pick(2, min(study.per_class, 10), study.per_class)
    drawn = {"per_class": most} if split == "iid" else {"low": 1, "high": 2 * most}
    light = "lenet5" if study.dataset == "fashion-mnist" else "simple-cnn"
    return scale.experiment(
        study.dataset,
        ("linear", light, study.model),
        (3, 15, 50),
        clients=Clients(count=10, per_round=10, partition=Named("fresh", drawn)),
        local=LocalTraining(epochs=scale.pick(1, 5, 5), batch_size=10, lr=0.01),
        evaluate=Evaluate(on=("test",)),
        algorithm=(ALGORITHMS[algorithm],),
    )


def table_blocks(study: Study, results: Results) -> list[Block]:
    has_its_data = results.scale.dataset(study.dataset) == study.dataset and all(
        len(run.manifest["classes"]) == NUM_CLASSES[study.dataset] for run in results.all
    )
    tables = [
        beside(
            [
                (cell, value, results.final(cell, MEASURES[name]))
                for cell, value in zip(CELLS, theirs, strict=True)
            ],
            title=f"{name[0].upper()}{name[1:]}, %",
            of="clients, algorithm",
            compared=has_its_data,
        )
        for name, theirs in study.published.items()
    ]
    lead = ahead(results, PAIRS, title="How far is one ahead of another?")
    bounds = [bound(study)] if F_SCORE in study.published else []
    return [lead, *tables, *_pairs(study, results), *bounds, remarks(study)]


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
    more = [sentences(__name__, study.remark)] if study.remark else []
    return replace(said, paragraphs=[*said.paragraphs, *more])
