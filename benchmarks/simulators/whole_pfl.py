"""A whole run by pfl-research's FederatedAveraging, in one process."""

from __future__ import annotations

from typing import Any

import absent  # noqa: F401  (before pfl, which may lack what it does not need here)
import torch
from by_pfl import Classifier, federated_averaging
from pfl.callback.base import TrainingProcessCallback
from pfl.metrics import Metrics
from torch import Tensor
from whole_work import asked, evaluate, images_and_labels, members, model


class Evaluated(TrainingProcessCallback):
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        module = model.pytorch_model.module
        print(central_iteration + 1, *evaluate(module, self.images, self.labels), flush=True)
        return False, Metrics()


def main() -> None:
    images, labels, test_images, test_labels = images_and_labels()
    parts, module = members(len(labels)), model(images)
    federated_averaging(
        Classifier(module),
        images.permute(0, 2, 3, 1).contiguous(),
        labels,
        parts,
        sampling="random",
        rounds=asked.rounds,
        cohort=asked.cohort,
        batch=asked.batch,
        lr=asked.lr,
        callback=Evaluated(test_images, test_labels),
        epochs=asked.epochs,
    )
    torch.save(module.state_dict(), asked.out)


if __name__ == "__main__":
    main()
