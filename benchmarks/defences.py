"""How fast are defences?

    python benchmarks/defences.py byzfl [--json FILE]   # byzfl 0.0.11 must be installed
    python benchmarks/defences.py memory [--json FILE]

byzfl     25 clients of 1.2 million numbers: each defence and byzfl's, in turns in one process (the
          median of `--repeats`); byzfl gets NumPy arrays and tensors, and the faster counts.
          Beside seconds of the clock stand those that all threads computed: on a machine that does
          other work, too, only these tell
memory    100 clients of 11 million numbers: each defence by the time in which a sum reads all
          updates once, and by how often the algorithm must read them

Updates are float64, as at the server, and one tensor; a ratio is by the second side's time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, Amendment, compose
from fedlens.algorithm.pieces import Uniformly
from fedlens.algorithm.slots import Received
from fedlens.algorithms import (
    bulyan,
    caf,
    centred_clipping,
    dnc,
    geometric_median,
    krum,
    mda,
    meamed,
    median,
    nnm,
    norm_bound,
    sign_guard,
    trimmed_mean,
)
from fedlens.core import Cohort, keys
from fedlens.network.layout import Entry, Layout
from fedlens.runs.bench import time_of
from origin import origin

LAYOUT = Layout({"w": Entry("", "weight", 0)}, {}, None)
Work = Callable[[], object]


def ours(papers: tuple[Amendment, ...], updates: Tensor) -> Work:
    clients = len(updates)
    ones = torch.ones(clients, dtype=torch.int64)
    shares = torch.full((clients,), 1 / clients, dtype=torch.float64)
    cohort = Cohort(torch.arange(clients), ones, ones, shares, None, clients, clients)
    combine = compose(Algorithm(select=Uniformly(clients)), *papers).combine
    given = Received(
        updates={"w": updates},
        shares=shares.to(updates.device),
        cohort=cohort,
        layout=LAYOUT,
        memory=combine.init({"w": updates[0]}),
        key=keys.root(0),
    )
    return lambda: combine.update(given)


def both(f: int) -> dict[str, tuple[tuple[Amendment, ...], str, Mapping[str, Any]]]:
    """Ours, the name of byzfl's, and its options."""
    return {
        "median": ((median(),), "Median", {}),
        "trimmed-mean": ((trimmed_mean(share=f / 25),), "TrMean", {"f": f}),
        "meamed": ((meamed(f),), "Meamed", {"f": f}),
        "krum": ((krum(f),), "Krum", {"f": f}),
        "multi-krum": ((krum(f, keep=20),), "MultiKrum", {"f": f}),
        "geometric-median": (
            (geometric_median(iterations=8),),
            "GeometricMedian",
            {"nu": 1e-6, "T": 8},
        ),
        "centred-clipping": (
            (centred_clipping(radius=100.0, iterations=3),),
            "CenteredClipping",
            {"L": 3, "tau": 100.0},
        ),
        "mda": ((mda(2),), "MDA", {"f": 2}),
        "caf": ((caf(f),), "CAF", {"f": f}),
        "nnm, then mean": ((nnm(f),), "NNM", {"f": f}),
    }


def byzfl_part(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    byzfl: Any = importlib.import_module("byzfl")
    drawn = torch.Generator().manual_seed(0)
    updates = torch.randn(25, 1_200_000, generator=drawn, dtype=torch.float64)
    updates[:5] += 0.5
    array = updates.numpy()
    rows = []
    for name, (papers, theirs, options) in both(5).items():
        other = getattr(byzfl, theirs)(**options)
        sides: dict[str, Work] = {
            "ours": ours(papers, updates),
            "byzfl, NumPy": partial(other, array),
        }
        if theirs != "CenteredClipping":  # which 0.0.11 cannot do on tensors
            sides["byzfl, torch"] = partial(other, updates)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        computed: dict[str, list[float]] = {side: [] for side in sides}
        for repeat in range(-1, arguments.repeats):
            for side, work in sides.items():
                start = time.process_time()
                took = time_of(work, 1, torch.device("cpu"))
                if repeat >= 0:
                    seconds[side].append(took)
                    computed[side].append(time.process_time() - start)
        row: dict[str, Any] = {"defence": name}
        for clock, each in (("seconds", seconds), ("computed", computed)):
            found = {side: statistics.median(some) for side, some in each.items()}
            best = min(took for side, took in found.items() if side != "ours")
            row |= {clock: found, f"times as fast, {clock}": best / found["ours"]}
        rows.append(row)
        print(rows[-1], flush=True)
    return rows


PASSES: dict[str, tuple[tuple[Amendment, ...], int]] = {
    "median": ((median(),), 1),
    "trimmed-mean": ((trimmed_mean(share=0.2),), 1),
    "meamed": ((meamed(20),), 1),
    "krum": ((krum(20),), 1),  # and one row
    "geometric-median": ((geometric_median(),), 2),
    "centred-clipping": ((centred_clipping(radius=100.0, iterations=3),), 2),
    "caf": ((caf(20),), 2),
    "dnc": ((dnc(20),), 2),
    "norm-bound": ((norm_bound(),), 2),
    "sign-guard": ((sign_guard(),), 2),
    "bulyan": ((bulyan(20),), 2),
    "nnm, then median": ((median(), nnm(20)), 4),  # distances; read and written; read
}
"""How often each must read or write all updates."""


def memory_part(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device(arguments.device)
    updates = torch.randn(100, arguments.numbers, device=device, dtype=torch.float64)
    rows = []
    for name, (papers, passes) in PASSES.items():
        work, seconds = ours(papers, updates), {"defence": [0.0][:0], "read": [0.0][:0]}
        for repeat in range(-2, arguments.repeats):
            for side, one in (("defence", work), ("read", updates.sum)):
                took = time_of(one, 1, device)
                if repeat >= 0:
                    seconds[side].append(took)
        found = {side: statistics.median(each) for side, each in seconds.items()}
        by = found["defence"] / found["read"]
        rows.append({"defence": name, "seconds": found, "reads": by, "by its passes": by / passes})
        print(rows[-1], flush=True)
    return rows


PARTS = {"byzfl": byzfl_part, "memory": memory_part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--numbers", type=int, default=11_000_000, help="of a client (memory)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="a file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = PARTS[arguments.part](arguments)
    on_gpu = arguments.part == "memory" and arguments.device.startswith("cuda")
    machine = torch.cuda.get_device_name() if on_gpu else platform.machine()
    about = origin() | {"part": arguments.part, "machine": machine, "torch": torch.__version__}
    about |= {"threads": torch.get_num_threads(), "load": [*os.getloadavg()]}
    about |= {"repeats": arguments.repeats}
    if arguments.part == "byzfl":
        about["byzfl"] = importlib.import_module("importlib.metadata").version("byzfl")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
