"""What an engine is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.core import Memory, Tree
from fedlens.engines.recording import Recorder
from fedlens.federation import Examples
from fedlens.network.network import Network
from fedlens.reporting.reports import Reporting
from fedlens.work import Part, Shared, Work

Which = slice | Tensor
"""Some of the examples, by their positions."""


OnStep = Callable[[Work, int, int], None]
"""Called after steps of local training, by engines that see them one by one: with the work of the
round, the row of the client that trains, and how many steps it has taken."""


class Unreported(Exception):
    """Some clients of a cohort did not answer, or with what cannot be taken: rows, with why."""

    def __init__(self, rows: Mapping[int, str]) -> None:
        super().__init__(", ".join(f"{row}: {why}" for row, why in rows.items()))
        self.rows = rows


class Engine(Protocol):
    """How to run the client program over a cohort.

    An engine has the model and the examples from the start, on its own device. `map` gives the
    parts of the cohort back in cohort order, as they are done, so memory follows the part. What an
    engine does not say of itself has the default that stands here.
    """

    name: ClassVar[str]  # as an experiment chooses it
    network: Network
    on_step: OnStep | None = None

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]: ...

    def predict(
        self, model: Tree, examples: Examples, batches: Sequence[Which]
    ) -> Iterator[Tensor]:
        """The logits [B, L] of one batch of examples after another."""
        for which in batches:
            images = examples.read(which)
            yield self.network.predict(model, {}, images, fast=self.predicts_fast)

    @property
    def predicts_fast(self) -> bool:
        """Whether logits may be rounded differently, as those of `Network.fast` are."""
        return False

    @property
    def evaluation_recorder(self) -> Recorder | None:
        """What makes whole evaluations fast that come again and again, if anything does."""
        return None

    @property
    def reporting(self) -> Reporting | None:
        """The rules by which it waits for clients that are elsewhere, if they are.

        Such clients keep what they remember themselves, and `map` may raise `Unreported`. It is
        called again without the rows that this names, or with others in their place.
        """
        return None

    def client_accuracy(self, model: Tree, memory: Mapping[int, Memory]) -> Tensor | None:  # [K]
        """What clients that are elsewhere say of a model, on what each holds out."""
        return None

    def close(self) -> None:
        """Give back what the engine holds. It can be used again afterwards."""
        return

    @property
    def worker_devices(self) -> tuple[torch.device, ...]:
        """Where workers train, if that is not where the server is."""
        return ()

    def device_name(self, device: torch.device) -> str:
        """What a GPU that clients train on is called."""
        return torch.cuda.get_device_name(device)

    @property
    def num_lost(self) -> int:
        """How many workers were lost since the first round; others did what they had to do."""
        return 0

    @property
    def clients_at_once(self) -> int:
        """How many clients one process trains side by side."""
        return 1

    @property
    def num_workers(self) -> int:
        """How many processes train."""
        return 1

    @property
    def busy_seconds(self) -> float:
        """What workers, all together, have been at work since they were started."""
        return 0.0

    @property
    def worker_bytes(self) -> int:
        """The most memory that all workers together have had, besides this process's."""
        return 0

    @property
    def padding_share(self) -> float | None:
        """How much of what was computed was padding; None: it has computed nothing, or none."""
        return None
