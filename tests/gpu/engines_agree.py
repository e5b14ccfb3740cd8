"""On a GPU: `stacked`, with its recorded steps, agrees with `sequential` for every algorithm and
augmentation, and three experiments in one round agree with each alone.

    PYTHONPATH=src:. python tests/gpu/engines_agree.py

Plain Python, since a bare GPU machine has no test runner: float64, four rounds, so that steps are
recorded and replayed. It prints a line for each algorithm and ends with status 1 if one differs.
"""

import sys

import torch
from torch import nn

from fedlens.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.data.augment import Augment
from fedlens.engines import Sequential, Stacked
from fedlens.network.network import Network
from fedlens.rounds import State, begin, run_round
from fedlens.rounds.client import ClientProgram
from tests import side_by_side
from tests.federations import RAGGED, in_bytes, noisy_images, small_cnn
from tests.papers_under_test import ALGORITHMS, AUGMENTS, PRIVATE
from tests.side_by_side import points

GPU = torch.device("cuda")
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
    state = begin(network, program, federation, GPU)
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
    turns = points(algorithm, "batch", GPU)
    together, _ = side_by_side.train("stacked", "batch", turns, ROUNDS)
    alone = [side_by_side.train("stacked", "batch", [turn], ROUNDS)[0][0] for turn in turns]
    return max(map(difference, together, alone))


def main() -> None:
    torch.use_deterministic_algorithms(True)
    ragged = noisy_images(RAGGED)
    federation = Federation(ragged.examples.to(GPU), ragged.num_classes, ragged.split)
    bad = total = 0

    def note(off: float, what: str) -> None:
        nonlocal bad, total
        bad, total = bad + (not off < 1e-9), total + 1
        print(f"{'agrees ' if off < 1e-9 else 'differs'} {off:.1e}  {what}", flush=True)

    for name, algorithm in PRIVATE.items():
        module = small_cnn("group", dropout=0.3)
        expected = train(algorithm, Sequential, module, federation)
        note(
            difference(train(algorithm, Stacked, module, federation), expected), f"private  {name}"
        )
    for name, algorithm in ALGORITHMS.items():
        for kind in ("group", "batch"):
            module = small_cnn(kind, dropout=0.3 if kind == "batch" else 0.0)
            expected = train(algorithm, Sequential, module, federation)
            found = train(algorithm, Stacked, module, federation)
            note(difference(found, expected), f"{kind} norm  {name}")
        if algorithm.pace is None:  # asynchronous rounds are those of one experiment
            note(apart(algorithm), f"side by side  {name}")
    for name, augment in AUGMENTS.items():
        given = in_bytes(federation) if name == "bytes" else federation
        expected, found = (
            train(ALGORITHMS["fedir"], engine, small_cnn(), given, augment)
            for engine in (Sequential, Stacked)
        )
        note(difference(found, expected), f"augmented  {name}")
    print(f"{total - bad} passed, {bad} failed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
