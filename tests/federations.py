"""Small federations and models that many tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.algorithm import Algorithm
from fedlens.core.federation import Examples, Federation, Fixed, Holdings
from fedlens.data.augment import Augment
from fedlens.engines import Engine, Processes, Sequential, Stacked
from fedlens.engines.graphs import Captures
from fedlens.network.network import Network
from fedlens.rounds import State, begin, run_round
from fedlens.rounds.client import ClientProgram
from tests.eager_capture import EagerCapture

CPU = torch.device("cpu")


def noisy_images(sizes: list[int], num_classes: int = 4, seed: int = 0) -> Federation:
    """Clients of these sizes, whose images are noisy prototypes: learnable, and without ties."""
    rng = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    labels = torch.randint(num_classes, (total,), generator=rng)
    prototypes = torch.randn(num_classes, 1, 8, 8, generator=rng, dtype=torch.float64)
    noise = torch.randn(total, 1, 8, 8, generator=rng, dtype=torch.float64)
    images = prototypes[labels] + 0.7 * noise
    members = torch.arange(total).split(sizes)
    return Federation(Examples(images, labels), num_classes, Fixed(Holdings.of(list(members))))


def in_bytes(federation: Federation) -> Federation:
    """The same with images of bytes."""
    examples = federation.examples
    images = (128 + 40 * examples.images).clamp(0, 255).byte()
    return replace(federation, examples=replace(examples, images=images))


RAGGED = [3, 6, 12, 19, 30, 20, 40, 50, 50, 70]  # for what needs to learn, or many steps
FEW = [3, 6, 12, 9, 5, 10, 2, 8, 11, 7]


def small_cnn(norm: str = "group", dropout: float = 0.0) -> nn.Module:
    torch.default_generator.manual_seed(0)
    batch, group = nn.BatchNorm2d(6), nn.GroupNorm(2, 6)
    norms: dict[str, list[nn.Module]] = {
        "group": [group],
        "batch": [batch],
        "batch and group": [batch, group],
        "none": [],
    }
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        *norms[norm],
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(384, 4),
    )


ENGINES: dict[str, Callable[[Network, Examples], Engine]] = {
    "sequential": lambda network, examples: Sequential(network, examples),
    "stacked": lambda network, examples: Stacked(network, examples),
    "stacked, two at a time": lambda network, examples: Stacked(network, examples, at_once=2),
    "stacked, recorded": lambda network, examples: Stacked(
        network, examples, make_recorder=lambda: Captures(EagerCapture)
    ),
    "processes": lambda network, examples: Processes(network, examples, workers=2),
    "processes, three workers": lambda network, examples: Processes(network, examples, workers=3),
    "processes, two devices": lambda network, examples: Processes(
        network, examples, devices=[CPU] * 2
    ),
    "processes, more devices than clients": lambda network, examples: Processes(
        network, examples, devices=[CPU] * 7
    ),
}


def train(
    algorithm: Algorithm,
    engine: str = "sequential",
    rounds: int = 2,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    augment: Augment | None = None,
) -> State:
    federation = federation or noisy_images(FEW)
    network = Network(module or small_cnn(), dtype=dtype)
    program = ClientProgram(algorithm, network.layout, augment)
    made = ENGINES[engine](network, federation.examples)
    try:
        state = begin(network, program, federation, CPU)
        for _ in range(rounds):
            state, _ = run_round(program, federation, made, state, seed)
    finally:
        made.close()
    return state


def forked(algorithm: Algorithm, **options: Any) -> tuple[Any, ClientProgram, Federation, State]:
    """An engine of workers, for tests that look inside it, and what a round by it takes."""
    federation = noisy_images(FEW)
    network = Network(small_cnn(), dtype=torch.float64)
    program = ClientProgram(algorithm, network.layout)
    engine = Processes(network, federation.examples, **options)
    return engine, program, federation, begin(network, program, federation, CPU)


def accuracy(module: nn.Module, state: State, federation: Federation) -> float:
    network = Network(module, dtype=torch.float64)
    logits = network.predict(state.params, state.buffers, federation.examples.images)
    return float((logits.argmax(1) == federation.examples.labels).double().mean())


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Byte for byte."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def wide(dropout: float) -> nn.Module:
    """A net with one matrix that is much larger than what a client sees."""
    torch.default_generator.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(144, 256),
        nn.ReLU(),
        nn.Linear(256, 5),
    )
