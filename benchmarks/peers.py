"""How long is a round here, and how long in other simulators? One run, one table.

    python benchmarks/peers.py [--rounds 3] [--repeats 3] [--only pfl-cnn ...] [--cache DIR]

pip installs each peer by name into its own environment under the cache folder (about 3 GB in all,
once). Each runs the same rounds, in the setting that is fastest for it on a CPU: the same model,
images, clients, steps and batch sizes. Repeats are interleaved. It prints the median seconds of all
rounds except the first of each process; a row says so if the loss did not fall. Run it on an idle
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from origin import origin

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WORKLOADS = ("pfl-cnn", "hsu-cnn", "mcmahan-cnn")
TORCH = "torch==2.13.0"


class Peer(NamedTuple):
    script: str
    packages: tuple[str, ...] = ()  # if empty, it runs in this environment
    processes: int = 1  # more than 1 are started by torchrun
    threads: int | None = None  # None: one per core


PEERS = {
    "Fedlens": Peer("by_fedlens.py"),
    "loop by hand": Peer("by_hand.py"),
    "pfl, one process": Peer("by_pfl.py", ("pfl[pytorch]==0.6.*",)),
    "pfl, two processes": Peer("by_pfl.py", ("pfl[pytorch]==0.6.*",), processes=2, threads=1),
    "Flower simulation": Peer("by_flower.py", ("flwr[simulation]>=1.40,<1.50",), threads=1),
}


def environment(peer: Peer, cache: Path) -> Path:
    """The path of the peer's Python; its environment is made at the first call."""
    if not peer.packages:
        return Path(sys.executable)
    home = cache / peer.script.removeprefix("by_").removesuffix(".py")
    python, done = home / "bin/python", home / "installed"
    if not done.exists():
        print(f"installing {', '.join(peer.packages)} into {home} ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", TORCH, "numpy", *peer.packages]
        subprocess.run(install, check=True)
        done.touch()
    return python


def measure(peer: Peer, python: Path, workload: str, rounds: int) -> dict[str, Any]:
    """Run one process, or one group of them, and return the last JSON line that it printed."""
    paths = os.pathsep.join([str(ROOT / "src"), str(HERE / "simulators")])
    settings = {"PYTHONPATH": paths, "RAY_DEDUP_LOGS": "0", "FLWR_TELEMETRY_ENABLED": "0"}
    if peer.threads:
        settings["OMP_NUM_THREADS"] = str(peer.threads)
    command = [str(python)]
    if peer.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={peer.processes}"]
    command += [str(HERE / "simulators" / peer.script), workload, str(rounds)]
    unset = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(command, env=inherited | settings, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def rows(found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """One row for each workload and peer, with the ratio to Fedlens."""
    result = []
    for workload, peers in found.items():
        medians = {
            name: statistics.median(second for run in runs for second in run["seconds"])
            for name, runs in peers.items()
        }
        for name, runs in peers.items():
            seconds = [second for run in runs for second in run["seconds"]]
            losses = runs[-1]["losses"]
            result.append(
                {
                    "workload": workload,
                    "peer": name,
                    "seconds_per_round": medians[name],
                    "fastest": min(seconds),
                    "slowest": max(seconds),
                    "n": len(seconds),
                    "times_fedlens": medians[name] / medians["Fedlens"],
                    "loss_first": losses[0],
                    "loss_last": losses[-1],
                    "learns": all(run["losses"][-1] < run["losses"][0] for run in runs),
                    "settings": runs[-1]["settings"],
                    "versions": runs[-1]["versions"],
                }
            )
    return result


def table(found: list[dict[str, Any]]) -> str:
    head = "workload | simulator | seconds a round | range | n | times Fedlens | loss | settings"
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    for row in found:
        loss = f"{row['loss_first']:.3f} to {row['loss_last']:.3f}"
        loss += "" if row["learns"] else " (it does not fall)"
        versions = ", ".join(f"{k} {v}" for k, v in row["versions"].items())
        cells = [
            row["workload"],
            row["peer"],
            f"{row['seconds_per_round']:.2f}",
            f"{row['fastest']:.2f} to {row['slowest']:.2f}",
            str(row["n"]),
            f"{row['times_fedlens']:.2f}",
            loss,
            f"{row['settings']}; {versions}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=WORKLOADS)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedlens/peers"
    parser.add_argument("--cache", type=Path, default=cache)
    cores = len(os.sched_getaffinity(0))
    folder = ROOT / "results" / f"cpu-{cores}-cores-{date.today()}"
    parser.add_argument("--out", type=Path, default=folder)
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.repeats < 1:
        parser.error("--rounds and --repeats: choose 1 or more")
    pythons = {name: environment(peer, arguments.cache) for name, peer in PEERS.items()}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        workload: {name: [] for name in PEERS} for workload in arguments.only
    }
    calls = arguments.repeats * len(arguments.only) * len(PEERS)
    start, made = time.monotonic(), 0
    for repeat in range(arguments.repeats):
        for workload in arguments.only:
            for name, peer in PEERS.items():
                run = measure(peer, pythons[name], workload, arguments.rounds)
                found[workload][name].append(run)
                made += 1
                left = (time.monotonic() - start) / made * (calls - made)
                second = statistics.median(run["seconds"])
                print(
                    f"repeat {repeat + 1}: {workload:<12} {name:<20} {second:6.2f} s a round, "
                    f"{left / 60:.0f} minutes left",
                    file=sys.stderr,
                    flush=True,
                )
    measured = rows(found)
    about = {
        **origin(),
        "machine": f"{platform.machine()}, {cores} cores",
        "python": platform.python_version(),
        "date": str(date.today()),
        "repeats": arguments.repeats,
        "rounds": arguments.rounds,
        "rows": measured,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "peers.json").write_text(json.dumps(about, indent=1) + "\n")
    (arguments.out / "peers.md").write_text(table(measured) + "\n")
    print(table(measured))


if __name__ == "__main__":
    main()
