"""Three experiments that a round can take together, for tests on any device."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from fedlens.algorithm import Algorithm
from fedlens.core import Memory, Number
from fedlens.core.federation import Federation, Fixed, Holdings
from fedlens.network.network import Network
from fedlens.rounds import RoundInput, State, begin, run_rounds
from fedlens.rounds.client import ClientProgram
from tests.federations import CPU, ENGINES, FEW, noisy_images, small_cnn

SIZES = [FEW, [7, 4, 9, 12, 4, 10, 5, 11, 8, 3]]  # by seed


def other(filling: Any) -> Any:
    """The same filling with other numbers."""
    if isinstance(filling, tuple):
        return tuple(map(other, filling))
    if not is_dataclass(filling) or isinstance(filling, type):
        return filling
    changes = {}
    for f in fields(filling):
        value = getattr(filling, f.name)
        changes[f.name] = 0.9 * value if f.type in (Number, "Number") else other(value)
    return replace(filling, **changes)


def net(norm: str) -> Network:
    return Network(small_cnn(norm, dropout=0.2), dtype=torch.float64)


def points(algorithm: Algorithm, norm: str, device: torch.device = CPU) -> list[RoundInput]:
    """Two seeds and other numbers: they differ in clients, initial models, draws and numbers."""
    images = noisy_images(FEW)
    examples = images.examples.to(device)
    turns = []
    for seed, chosen in ((0, algorithm), (0, other(algorithm)), (1, algorithm)):
        order = torch.randperm(sum(FEW), generator=torch.Generator().manual_seed(seed))
        holdings = Holdings.of(order.split(SIZES[seed]))
        federation = Federation(examples, images.num_classes, Fixed(holdings))
        network = net(norm)
        program = ClientProgram(chosen, network.layout)
        state = begin(network, program, federation, device)
        moved = {name: p * (1 + seed / 10) for name, p in state.params.items()}
        turns.append(RoundInput(program, federation, replace(state, params=moved), seed))
    return turns


def train(
    engine: str, norm: str, turns: list[RoundInput], rounds: int = 2
) -> tuple[list[State], list[dict[str, torch.Tensor]]]:
    """The states after some rounds, and what was recorded in them."""
    made = ENGINES[engine](net(norm), turns[0].federation.examples)
    like = next(iter(turns[0].state.params.values()))
    together = ClientProgram.joint([turn.program for turn in turns], like)
    records: list[dict[str, torch.Tensor]] = [{} for _ in turns]
    for number in range(rounds):
        after = run_rounds(together, made, turns)
        turns = [replace(turn, state=s) for turn, (s, _) in zip(turns, after, strict=True)]
        for record, (_, outcome) in zip(records, after, strict=True):
            record |= {f"{name} {number}": value for name, value in outcome.scalars.items()}
            record[f"loss {number}"] = outcome.train_loss
            counts = outcome.batches, outcome.examples, outcome.bytes_up, outcome.bytes_down
            record[f"counts {number}"] = torch.tensor(counts)
    return [turn.state for turn in turns], records


def everything(state: State) -> dict[str, torch.Tensor]:
    """All that a state holds, by name."""
    found = {**state.params, **state.buffers}
    memories: list[tuple[object, Memory]] = [("server", state.server), ("told", state.told)]
    for whose, memory in (*memories, *state.clients.rows.items()):
        for kind, tree in memory.items():
            found |= {f"{whose} {kind} {name}": t for name, t in tree.items()}
    return found
