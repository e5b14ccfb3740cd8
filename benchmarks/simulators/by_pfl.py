"""pfl-research's FederatedAveraging, in one process, or in several under torchrun.

Images are in channels-last order, as in pfl's own benchmarks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import absent  # noqa: F401  (before pfl, which may lack what it does not need here)
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from work import LR, Watch, arguments, data, members, model, num_clients


class Classifier(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:  # [B, H, W, channels]
        logits: Tensor = self.module(x.permute(0, 3, 1, 2))
        return logits

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        self.eval() if eval else self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Weighted]:
        self.eval() if eval else self.train()
        logits, num = self(x), len(y)
        return {
            "loss": Weighted(float(F.cross_entropy(logits, y)) * num, num),
            "accuracy": Weighted(float((logits.argmax(1) == y).sum()), num),
        }


class Timed(TrainingProcessCallback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.watch.round_is_over(model.pytorch_model.module)
        return False, Metrics()


def federated_averaging(
    module: Classifier,
    images: Tensor,  # [N, H, W, channels]
    labels: Tensor,  # [N]
    parts: Sequence[slice | Tensor],  # the examples of each client
    *,
    sampling: str,
    rounds: int,
    cohort: int,
    batch: int,
    lr: float,
    callback: TrainingProcessCallback,
    epochs: int = 1,
) -> None:
    """Train the module with pfl; the server applies the unweighted mean of the clients' updates."""

    def dataset(client: int) -> Dataset:
        mine = parts[client]
        return Dataset(raw_data=[images[mine], labels[mine]])

    clients = FederatedDataset(dataset, get_user_sampler(sampling, range(len(parts))))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**6,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=clients, val_data=clients),
        model=PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=epochs, local_learning_rate=lr, local_batch_size=batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=batch),
        callbacks=[callback],
        send_metrics_to_platform=False,  # else pfl prints them after every round
    )


def main() -> None:
    work, rounds = arguments()
    images, labels = data(sys.argv[1])
    watch = Watch(sys.argv[1])
    federated_averaging(
        Classifier(model(work)),
        images.permute(0, 2, 3, 1).contiguous(),
        labels,
        [members(work, client) for client in range(num_clients(work))],
        sampling="minimize_reuse",
        rounds=rounds + 1,
        cohort=work.clients,
        batch=work.batch,
        lr=LR,
        callback=Timed(watch),
    )
    if pytorch_ops.distributed.global_rank == 0:
        processes = pytorch_ops.distributed.world_size
        threads = torch.get_num_threads()
        watch.report("pfl", settings=f"processes: {processes}, threads each: {threads}")


if __name__ == "__main__":
    main()
