"""On a GPU: `stacked`, with its recorded steps, agrees with `sequential` for every algorithm and
augmentation, and three experiments in one round agree with each alone.

    PYTHONPATH=src:. CUBLAS_WORKSPACE_CONFIG=:4096:8 python tests/gpu/engines_agree.py [DEVICE]

Plain Python, since a bare GPU machine has no test runner: float64, four rounds, so that steps are
recorded and replayed. It prints a line for each algorithm and ends with status 1 if one differs.
DEVICE is `cuda` unless another is named (`cpu`).
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fedlens.algorithm import Algorithm
from fedlens.algorithm.pieces import Uniformly
from fedlens.core.federation import Federation
from fedlens.data.augment import Augment
from fedlens.engines import Sequential, Stacked
from fedlens.network.network import Network
from fedlens.rounds import State, begin, run_round
from fedlens.rounds.client import ClientProgram
from tests import side_by_side
from tests.federations import RAGGED, in_bytes, noisy_images, small_cnn
from tests.gpu.parts import my_part
from tests.papers_under_test import ALGORITHMS, AUGMENTS, PRIVATE
from tests.side_by_side import points

DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
ROUNDS = 4


def train(
    algorithm: Algorithm,
    engine: type[Sequential] | type[Stacked],
    module: nn.Module,
    federation: Federation,
    augment: Augment | None = None,
) -> State:
    network = Network(module, dtype=torch.float64)
    program = ClientProgram(algorithm, network.layout, augment)
    made = engine(network, federation.examples)
    state = begin(network, program, federation, DEVICE)
    for _ in range(ROUNDS):
        state, _ = run_round(program, federation, made, state, seed=0)
    return state


def difference(found: State, expected: State) -> float:
    worst = 0.0
    for name, value in (expected.params | expected.buffers).items():
        other = (found.params | found.buffers)[name]
        scale = value.double().norm().clamp(min=1e-12)
        worst = max(worst, float((other.double() - value.double()).norm() / scale))
    return worst


def apart(algorithm: Algorithm) -> float:
    """How far experiments that train side by side end from where each ends alone."""
    turns = points(algorithm, "batch", DEVICE)
    together, _ = side_by_side.train("stacked", "batch", turns, ROUNDS)
    alone = [side_by_side.train("stacked", "batch", [turn], ROUNDS)[0][0] for turn in turns]
    return max(map(difference, together, alone))


def from_sequential(
    algorithm: Algorithm,
    norm: str,
    dropout: float,
    federation: Federation,
    augment: Augment | None = None,
) -> float:
    """How far `stacked` ends from `sequential`."""
    expected, found = (
        train(algorithm, engine, small_cnn(norm, dropout=dropout), federation, augment)
        for engine in (Sequential, Stacked)
    )
    return difference(found, expected)


def main() -> None:
    torch.use_deterministic_algorithms(True)
    ragged = noisy_images(RAGGED)
    federation = Federation(ragged.examples.to(DEVICE), ragged.num_classes, ragged.split)
    checks: dict[str, Callable[[], float]] = {}
    for name, algorithm in PRIVATE.items():
        checks[f"private  {name}"] = partial(from_sequential, algorithm, "group", 0.3, federation)
        if algorithm.pace is None:  # one client has kernels of its own
            alone = replace(algorithm, select=Uniformly(1))
            checks[f"private, one client  {name}"] = partial(
                from_sequential, alone, "group", 0.3, federation
            )
    for name, algorithm in ALGORITHMS.items():
        for norm, dropout in (("group", 0.0), ("batch", 0.3)):
            checks[f"{norm} norm  {name}"] = partial(
                from_sequential, algorithm, norm, dropout, federation
            )
        if algorithm.pace is None:  # asynchronous rounds are those of one experiment
            checks[f"side by side  {name}"] = partial(apart, algorithm)
    for name, augment in AUGMENTS.items():
        given = in_bytes(federation) if name == "bytes" else federation
        checks[f"augmented  {name}"] = partial(
            from_sequential, ALGORITHMS["fedir"], "group", 0.0, given, augment
        )
    mine, bad = my_part([*checks]), 0
    for name in mine:
        off = checks[name]()
        bad += not off < 1e-9
        print(f"{'agrees ' if off < 1e-9 else 'differs'} {off:.1e}  {name}", flush=True)
    print(f"{len(mine) - bad} passed, {bad} failed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
