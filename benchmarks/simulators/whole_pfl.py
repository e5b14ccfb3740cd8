"""A whole run by pfl-research's FederatedAveraging, in one process, or in several under torchrun.

PFL_PYTORCH_DEVICE must name the device too: without it pfl wants a separate GPU for each process.
"""

from __future__ import annotations

from typing import Any

import absent  # noqa: F401  (before pfl, which may lack what it does not need here)
import numpy as np
import torch
from by_pfl import Classifier, federated_averaging
from pfl.callback.base import TrainingProcessCallback
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics
from torch import Tensor
from whole_work import asked, device, evaluate, images_and_labels, members, model


class Evaluated(TrainingProcessCallback):
    """Each process evaluates its share of the images, as in pfl's own callback."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        everyone = pytorch_ops.distributed
        mine = slice(everyone.global_rank, None, everyone.world_size)
        self.images, self.labels, self.num = images[mine], labels[mine], len(labels)

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        means = evaluate(model.pytorch_model.module, self.images, self.labels)
        sums = torch.tensor(means, device=device) * len(self.labels)
        (sums,) = pytorch_ops.distributed.all_reduce([sums])
        if is_first_process():
            print(central_iteration + 1, *(sums / self.num).tolist(), flush=True)
        return False, Metrics()


def is_first_process() -> bool:
    return bool(pytorch_ops.distributed.global_rank == 0)


def main() -> None:
    images, labels, test_images, test_labels = images_and_labels()
    parts, module = members(len(labels)), model(images)
    np.random.seed(0)  # all processes draw the same clients; each trains a part
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
    if is_first_process():
        torch.save(module.state_dict(), asked.out)
    if torch.distributed.is_initialized():  # threads of the group must not outlive the process
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
