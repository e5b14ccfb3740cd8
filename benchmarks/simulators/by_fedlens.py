"""Fedlens, with the engine that `engine = "auto"` chooses on this machine."""

from __future__ import annotations

import sys
from dataclasses import replace

from work import LR, Watch, arguments, model

from fedlens.engines import Engine
from fedlens.rounds import begin, run_round
from fedlens.runs.bench import experiment
from fedlens.runs.loop import torch_settings
from fedlens.setup import build


def label(engine: Engine) -> str:
    return f"engine {engine.name}, workers: {engine.num_workers}"


def main() -> None:
    work, rounds = arguments()
    wanted = experiment(work, "auto", "cpu", "fp32")
    setup = build(replace(wanted, local=replace(wanted.local, lr=LR)))
    module, watch = model(work), Watch(sys.argv[1])
    with torch_settings(setup.experiment, setup.device, setup.threads):
        state = begin(setup.network, setup.program, setup.federation, setup.device)
        for _ in range(rounds + 1):
            state, _ = run_round(setup.program, setup.federation, setup.engine, state, seed=0)
            module.load_state_dict(state.params | state.buffers)
            watch.round_is_over(module)
    setup.engine.close()
    watch.report(settings=label(setup.engine))


if __name__ == "__main__":
    main()
