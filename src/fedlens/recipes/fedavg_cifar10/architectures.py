"""The introduction's comparison: LeNet, AlexNet, VGG and softmax regression, federated."""

from __future__ import annotations

from fedlens.config.experiment import Named
from fedlens.recipes.fedavg_cifar10.setting import FEDAVG, experiment, pretrained, stand_in
from fedlens.recipes.page import curves, mean_of
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Table, Text

NETWORKS = {
    "softmax regression": "linear",
    "LeNet-5": "lenet5",
    "AlexNet": "alexnet-32",
    "VGG-11": "vgg11",
    "ResNet-18": "resnet18",
}
SMALL = ("softmax regression", "LeNet-5")
SAYS = {
    "softmax regression": "direct linear models perform poorly on CIFAR-10",
    "LeNet-5": "robust and fast, but needs more parameters",
    "AlexNet": "oversaturates when data are too big or small",
    "VGG-11": "effective, but needs more memory",
}
PRETRAINED = "ResNet-18, ImageNet weights, lr 0.001"


def architectures(scale: Scale) -> Recipe:
    chosen = scale.pick(SMALL, SMALL, tuple(NETWORKS))
    models = {name: Named(NETWORKS[name]) for name in chosen}
    if scale.name == "small":
        models["small CNN"] = Named("simple-cnn")
    cells = {
        f"{name}, lr {lr:g}": experiment(
            scale, FEDAVG, model=model, outputs=None, lr=lr, scratch=True
        )
        for name, model in models.items()
        for lr in rates(scale)
    }
    if pretrained(scale):
        cells[PRETRAINED] = experiment(scale, FEDAVG, outputs=None)
    return Recipe(
        title="Networks compared",
        about="The report's introduction sets LeNet, AlexNet and VGG against federated learning, "
        "as if one had to choose. Federated learning trains any of them; here they are under the "
        "report's own setting, K = 5, C = 3, with FedAvg. All start from scratch, so that the "
        "networks differ and nothing else does, and at two learning rates: the report's 0.001 was "
        "meant for pretrained weights, and no single one suits all networks.",
        cells=cells,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        ours=True,
        stand_in=stand_in(scale),
    )


def rates(scale: Scale) -> tuple[float, ...]:
    return scale.pick((0.05,), (0.05,), (0.001, 0.01))


def blocks(results: Results) -> list[Block]:
    rows: list[list[str | float | None]] = []
    for cell, runs in results.runs.items():
        count = runs[0].manifest["parameters"]
        rounds = runs[0].num_rounds
        rows.append(
            [
                cell,
                SAYS.get(cell.split(", ")[0]),
                mean_of(results.final(cell), 2, times=100),
                f"{count:,}",
                f"{(runs[0].total('bytes_up') or 0) / rounds / 1e6:.2f}",
            ]
        )
    return [
        Table(
            title="Accuracy and cost",
            caption="Test accuracy after the last round, over seeds, and what clients send in a "
            "round.",
            header=(
                "network",
                "the report's word",
                "accuracy, %",
                "parameters",
                "MB up a round",
            ),
            rows=rows,
            published=frozenset({1}),
        ),
        curves(
            results,
            list(results.runs),
            title="Test accuracy by round",
            caption="Accuracy on the test images after each round.",
            y_label="test accuracy",
        ),
        Text(
            title="What the claim is worth",
            paragraphs=(
                "That linear models do poorly on CIFAR-10 is so. LeNet has the fewest parameters "
                "of the convolutional networks, not more; VGG has the most. AlexNet is its usual "
                "form for 32 × 32 images, since torchvision's needs 63 × 63.",
                "Learning rates are not tuned: a network that does better at the larger one may do "
                "better still at another. ResNet-18 with ImageNet weights, where it is run, has "
                "seen a million images more than the others, and stands apart.",
            ),
        ),
    ]
