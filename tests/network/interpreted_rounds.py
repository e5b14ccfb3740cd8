"""Whole rounds by the kernels of a GPU, interpreted, come to what the plain forms come to.

    TRITON_INTERPRET=1 python -m tests.network.interpreted_rounds

What a GPU takes is taken here on the CPU, in float32: the kernels of every layer, factored weights,
the steps of solvers, images read some steps at once. Nothing but a GPU shows more than that.
"""

from dataclasses import replace
from functools import partial
from unittest import mock

import torch

from fedlens.config.experiment import Experiment, Named
from fedlens.core import Tree
from fedlens.network import ops
from fedlens.rounds import RoundInput, begin, client, run_rounds
from fedlens.rounds.client import ClientProgram
from fedlens.runs.bench import Workload, experiment
from fedlens.setup import build
from tests.network.interpreting import spare_repetition

ROUNDS = 2
CASES = {  # with dropout behind pooling; with momentum and spare channels; with a pull, one channel
    "pfl-cnn": (Workload("pfl-cnn", (3, 8, 8), 2, 2, 2), Named("fedavg"), 0.0),
    "hsu-cnn": (Workload("hsu-cnn", (3, 8, 8), 2, 2, 2, {"padding": "same"}), Named("fedavg"), 0.9),
    "mcmahan-cnn": (
        Workload("mcmahan-cnn", (1, 8, 8), 2, 3, 2),
        Named("fedprox", {"mu": 0.1}),
        0.0,
    ),
}


def main() -> None:
    spare_repetition()
    for name, (work, algorithm, momentum) in CASES.items():
        one = experiment(work, "stacked", "cpu", "fp32")
        local = replace(one.local, lr=0.05, momentum=momentum)
        described = replace(one, algorithm=(algorithm,), local=local)
        expected = trained(described)
        with (
            mock.patch.object(ops, "_takes_triton", lambda x: x.dtype is not torch.float64),
            mock.patch.object(ops, "_multiplies_in_triton", lambda x: x.dtype is torch.float32),
            mock.patch.object(client, "each_step", partial(client.each_step, at_once=2)),
        ):
            found = trained(described)
        for key, tensor in expected.items():
            apart = (found[key] - tensor).norm() / tensor.norm()
            assert apart < 1e-5, f"{name}: {key} is off by {apart:.1e}"
        print(f"rounds of {name} agree", flush=True)
    print("all agree")


def trained(described: Experiment) -> Tree:
    """The model after a few rounds."""
    setup = build(described)
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    joint = ClientProgram.joint([setup.program], next(iter(state.params.values())))
    for _ in range(ROUNDS):
        turn = RoundInput(setup.program, setup.federation, state, described.seed)
        ((state, _),) = run_rounds(joint, setup.engine, [turn])
    return state.params


if __name__ == "__main__":
    main()
