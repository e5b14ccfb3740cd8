"""On a GPU: workers with devices of their own agree with `stacked`, and what their way costs.

    PYTHONPATH=src:. python tests/gpu/several.py

Plain Python, since a bare GPU machine has no test runner. One GPU is enough: where there is no
other, two workers share it. First float64, four rounds of algorithms of every kind; then a whole
run with evaluation, in fp32; then the seconds of a round and of an evaluation in bf16, with one
worker and with two, beside those of `stacked`. It ends with status 1 if something differs.

All that has workers comes first: they are forked from a process that has not used a GPU.
"""

import os
import statistics
import sys
import time
from dataclasses import replace

import torch

import fedlens as fl
from fedlens.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.engines import Engine, Processes, Stacked
from fedlens.engines.gpus import gpu_names
from fedlens.evaluation.evaluate import evaluate
from fedlens.evaluation.metrics import metrics
from fedlens.network.network import Network
from fedlens.rounds import State, begin, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.runs import bench
from fedlens.runs.loop import torch_settings
from fedlens.runs.records import Record
from fedlens.setup import Setup, build
from tests.federations import CPU, RAGGED, noisy_images, small_cnn
from tests.papers_under_test import ALGORITHMS

KINDS = ["fedavg", "fedprox", "fedir", "scaffold", "fedadmm", "fedbn", "median", "fedns"]
KINDS += ["momentum kept between rounds"]
ROUNDS, TIMED = 4, 5
WORKLOADS = ("pfl-cnn-1000", "hsu-cnn-100")


def two_devices() -> list[torch.device]:
    """Two GPUs, or one twice."""
    return [torch.device("cuda", number % len(gpu_names())) for number in range(2)]


def trained(algorithm: Algorithm, workers: bool) -> State:
    federation = noisy_images(RAGGED)
    network = Network(small_cnn("batch", dropout=0.3), dtype=torch.float64)
    program = ClientProgram(algorithm, network.layout)
    engine: Engine
    if workers:
        engine, device = Processes(network, federation.examples, devices=two_devices()), CPU
    else:
        device = torch.device("cuda")
        examples = federation.examples.to(device)
        federation = Federation(examples, federation.num_classes, federation.split)
        engine = Stacked(network, examples)
    try:
        state = begin(network, program, federation, device)
        for _ in range(ROUNDS):
            state, _ = run_round(program, federation, engine, state, seed=0)
    finally:
        engine.close()
    return state


def difference(found: State, expected: State) -> float:
    """Of models, of what the server tells, and of what clients remember."""
    worst = 0.0
    for mine, theirs in zip(trees(found), trees(expected), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            value, other = value.double().cpu(), mine[name].double().cpu()
            scale = value.norm().clamp(min=1e-3)
            worst = max(worst, float((other - value).norm() / scale))
    return worst


def trees(state: State) -> list[dict[str, torch.Tensor]]:
    kept = [tree for row in sorted(state.clients.rows.items()) for tree in row[1].values()]
    return [state.params, state.buffers, *state.told.values(), *kept]


def run(engine: str) -> list[Record]:
    """The records of a run as people run one, on all GPUs or on one."""
    images = bench.experiment(
        bench.Workload("pfl-cnn", (3, 32, 32), 20, 4, 10), engine, "cuda", "fp32"
    )
    experiment = replace(images, rounds=6, evaluate=fl.Evaluate(every=2))
    return fl.run(experiment).records


def timed(setup: Setup) -> tuple[float, float]:
    """Seconds of a round, and of an evaluation of 10,000 images."""
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    test, loss = setup.parts["test"], setup.program.algorithm.objective.loss
    rounds, evaluations = [], []
    try:
        with torch_settings(setup.experiment, setup.device, setup.threads):
            for _ in range(5 + TIMED):  # shapes are recorded when they come again
                start = time.perf_counter()
                state, outcome = run_round(
                    setup.program, setup.federation, setup.engine, state, seed=0
                )
                outcome.train_loss.item()
                trained = time.perf_counter()
                metrics(evaluate(setup.engine, state, test, bench.CLASSES, loss))
                rounds.append(trained - start)
                evaluations.append((time.perf_counter() - trained) / len(test) * 10_000)
    finally:
        setup.engine.close()
    return statistics.median(rounds[-TIMED:]), statistics.median(evaluations[-TIMED:])


def workers_of(name: str, number: int) -> Setup:
    setup = build(bench.experiment(bench.WORKLOADS[name], "processes", "cpu", "bf16"))
    engine = Processes(
        setup.network,
        setup.federation.examples,
        devices=two_devices()[:number],
        others=[*setup.parts.values()],
    )
    return replace(setup, engine=engine)


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products need it
    bad = 0

    def note(off: float, most: float, what: str) -> None:
        nonlocal bad
        bad += not off < most
        print(f"{'agrees ' if off < most else 'differs'} {off:.1e}  {what}", flush=True)

    print(f"{len(gpu_names())} GPUs, workers on {', '.join(map(str, two_devices()))}", flush=True)
    torch.use_deterministic_algorithms(True)
    found = {name: trained(ALGORITHMS[name], workers=True) for name in KINDS}
    torch.use_deterministic_algorithms(False)
    mine = run("processes")
    seconds = {(name, n): timed(workers_of(name, n)) for name in WORKLOADS for n in (1, 2)}

    torch.use_deterministic_algorithms(True)
    for name in KINDS:
        note(difference(found[name], trained(ALGORITHMS[name], workers=False)), 1e-9, name)
    torch.use_deterministic_algorithms(False)
    theirs = run("stacked")
    for key in ("train_loss", "test_accuracy", "test_loss"):
        pairs = [(a[key], b[key]) for a, b in zip(mine, theirs, strict=True) if key in a]
        note(max(abs(a - b) for a, b in pairs), 2e-2, f"{key} of a run in fp32")
    for name in WORKLOADS:
        setup = build(bench.experiment(bench.WORKLOADS[name], "stacked", "cuda", "bf16"))
        ways = {"stacked": timed(setup)}
        ways |= {f"workers: {n}": seconds[name, n] for n in (1, 2)}
        for way, (a_round, evaluation) in ways.items():
            print(f"{name}, {way}: {a_round:.4f} s a round, {evaluation:.4f} s to evaluate 10,000")
    print(f"{len(KINDS) + 3 - bad} passed, {bad} failed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
