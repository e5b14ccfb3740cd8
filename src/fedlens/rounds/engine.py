"""The interface of all engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from fedlens.core import Memory, Tree
from fedlens.core.federation import Examples
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.reports import Reporting
from fedlens.rounds.work import Part, Shared, Work

T = TypeVar("T")

Which = slice | Tensor
"""The positions of some examples."""


OnStep = Callable[[Work, int, int], None]
"""Called after steps of local training, by engines that see them one by one: with the work of the
round, the row of the client that trains, and how many steps it has taken."""


class Unreported(Exception):
    """Some clients of a cohort sent nothing, or nothing valid. `rows` has a reason for each."""

    def __init__(self, rows: Mapping[int, str]) -> None:
        super().__init__(", ".join(f"{row}: {why}" for row, why in rows.items()))
        self.rows = rows


class Recorder(Protocol):
    """Speeds up calls that recur with the same shapes.

    Returns the result of `function(*inputs)`, or None if this shape did not occur often enough. The
    next call with the same key may overwrite the result. `function` may read only its inputs, and
    tensors that stay at the same address for as long as the key is used.
    """

    def __call__(self, key: object, function: Callable[..., T], *inputs: Any) -> T | None: ...

    def place(self, value: T) -> T:
        """Copy `value` to memory that is always the same; the next call of `place` overwrites it.

        Recordings read and write tensors there in place, without copies before or after a replay.
        """
        ...


class Engine(Protocol):
    """How to run the client program over a cohort.

    An engine holds the model and the examples from the start, on its own device. `map` yields the
    parts of the cohort in cohort order, as they finish, so memory use depends on the size of a
    part. Members that an engine does not define have the defaults below.
    """

    name: ClassVar[str]  # the value of `engine` in an experiment
    network: Network
    on_step: OnStep | None = None
    at_once: int = 1  # clients that one process trains side by side
    worker_devices: tuple[torch.device, ...] = ()  # if they differ from the server's device
    num_lost: int = 0  # workers, since the first round; others took over their tasks
    busy_seconds: float = 0.0  # that all workers together have computed since they were started

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]: ...

    def predict(
        self, model: Tree, examples: Examples, batches: Sequence[Which]
    ) -> Iterator[Tensor]:
        """Yield the logits [B, L] of each batch of examples."""
        for which in batches:
            images = examples.read(which)
            yield self.network.predict(model, {}, images, fast=self.predicts_fast)

    def predict_each(
        self,
        model_of: Callable[[int], Tree],
        examples: Examples,
        rows: Sequence[Tensor],
        at_once: int,
    ) -> Iterator[Tensor]:
        """Yield the logits of model k on the examples rows[k]; `at_once` are in memory together."""
        for number, which in enumerate(rows):
            batches = [some for some in torch.split(which, at_once) if len(some)]
            found = [*self.predict(model_of(number), examples, batches)] if batches else []
            yield torch.cat(found) if found else torch.zeros((0, 1))

    @property
    def predicts_fast(self) -> bool:
        """Whether `predict` uses the layers of `Network.fast`, whose logits round differently."""
        return False

    @property
    def evaluation_recorder(self) -> Recorder | None:
        """The recorder that speeds up repeated evaluations, if the engine has one."""
        return None

    @property
    def reporting(self) -> Reporting | None:
        """The rules for waiting for remote clients; None if the engine simulates its clients.

        Remote clients store their own memory, and `map` may raise `Unreported`. The caller then
        calls `map` again without the rows of that exception, or with others in their place.
        """
        return None

    def client_accuracy(self, model: Tree, memory: Mapping[int, Memory]) -> Tensor | None:  # [K]
        """The accuracies that remote clients report for a model, each on its held-out examples."""
        return None

    def close(self) -> None:
        """Release the resources of the engine. It can be used again afterwards."""
        return

    def device_name(self, device: torch.device) -> str:
        """The name of a GPU that clients train on."""
        return torch.cuda.get_device_name(device)

    @property
    def num_workers(self) -> int:
        """How many processes train."""
        return 1

    @property
    def worker_bytes(self) -> int:
        """The sum of the peak memory of all workers, in bytes; this process is not counted."""
        return 0

    @property
    def padding_share(self) -> float | None:
        """The share of computed examples that was padding; None: nothing computed or no padding."""
        return None
