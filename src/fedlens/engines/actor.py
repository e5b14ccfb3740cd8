"""An actor of a Ray cluster: its initial data, and its methods."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens.core.federation import Examples
from fedlens.core.trees import map_tensors
from fedlens.engines.driver import Driver
from fedlens.engines.messages import Message, pack, unpack
from fedlens.engines.trainer import Trainer
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.work import Shared, exact_model


class OnDisk(NamedTuple):
    """Images that are not sent: a worker opens them itself, in the data folder of its machine."""

    images: Sequence[Tensor]  # in this process
    open: Callable[[], Sequence[Tensor]]  # opens the same images in a worker


class TorchSettings(NamedTuple):
    """The global torch settings of this process, to apply them in another one."""

    matmul: str
    tf32: bool
    deterministic: bool
    workspace: str | None

    @classmethod
    def here(cls) -> TorchSettings:
        return cls(
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        )

    def apply(self) -> None:
        torch.set_float32_matmul_precision(self.matmul)
        torch.backends.cudnn.allow_tf32 = self.tf32
        if self.workspace is not None:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = self.workspace
        if self.deterministic:
            torch.use_deterministic_algorithms(True)


class SentExamples(NamedTuple):
    """Examples as they are sent: with images, or with those of an earlier set or on disk."""

    images: Tensor | None
    labels: Tensor
    rows: Tensor | None
    shape: torch.Size
    like: int | None  # the number of the earlier set with these images
    on_disk: int | None  # their number in `OnDisk.images`


class ActorInit(NamedTuple):
    """What every actor is given before its first task."""

    network: Network
    examples: list[Message]
    open_images: Callable[[], Sequence[Tensor]] | None
    settings: TorchSettings

    @classmethod
    def of(
        cls, network: Network, examples: Sequence[Examples], on_disk: OnDisk | None
    ) -> ActorInit:
        """Pack the example sets; images that several sets share are packed once."""
        places = {id(images): n for n, images in enumerate(on_disk.images if on_disk else ())}
        first: dict[int, int] = {}
        messages = []
        for number, one in enumerate(examples):
            place = places.get(id(one.images))
            like = first.setdefault(id(one.images), number)
            sends = like == number and place is None
            sent = SentExamples(
                one.images if sends else None,
                one.labels,
                one.rows,
                one.images.shape,
                None if like == number else like,
                place,
            )
            messages.append(pack(sent))
        return cls(network, messages, on_disk.open if on_disk else None, TorchSettings.here())

    def open_examples(self) -> list[Examples]:
        """The example sets; sets that share images in the driver share them here, too."""
        on_disk = list(self.open_images()) if self.open_images is not None else []
        found: list[Examples] = []
        for message in self.examples:
            sent: SentExamples = unpack(message)
            images = sent.images
            if sent.like is not None:
                images = found[sent.like].images
            elif sent.on_disk is not None:
                images = on_disk[sent.on_disk]
                if images.shape != sent.shape:
                    raise ValueError(
                        f"its images on {platform.node()} are {tuple(images.shape)}, not "
                        f"{tuple(sent.shape)}: copy the data folder there"
                    )
            assert images is not None
            found.append(Examples(images, sent.labels, rows=sent.rows))
        return found


class Actor:
    """A `Trainer` that is called through Ray."""

    def __init__(self, device: torch.device, stacks: bool) -> None:
        self.device, self.stacks = device, stacks

    def set_up(self, driver: Driver) -> str:
        return driver.set_up_worker()

    def load(self, init: ActorInit) -> str:
        """Prepare to train; return one line that says what went wrong, or ""."""
        try:
            init.settings.apply()
            examples = init.open_examples()
            self.trainer = Trainer(init.network, examples, self.device, self.stacks)
            self.trainer.configure_process()
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def set_program(self, program: ClientProgram) -> None:
        self.trainer.program = program

    def begin(self, message: Message) -> None:
        """Set what the following tasks have in common."""
        given, work = unpack(message)
        if isinstance(given, Shared) and not given.exact:
            given = given._replace(exact=exact_model(given.params | given.buffers))
        self.trainer.begin(given, work)

    def do(self, message: Message) -> Message:
        return pack(self.trainer.do(unpack(message), _on_host))


def _on_host(value: Any) -> Any:
    return map_tensors(value, lambda t: t.cpu().contiguous())
