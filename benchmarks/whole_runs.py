"""How long is it from the command to the page, and what of that is what? Beside plain PyTorch.

    python benchmarks/whole_runs.py [--device cpu] [--only quickstart mcmahan] [--rounds N]
                                    [--repeats 3] [--pfl PYTHON [--processes N]] [--out DIR]

Every run is a separate process, timed from outside, imports included: `fedlens run` until its page
is written, a loop written by hand until its model is saved, and the same with pfl if `--pfl` names
a Python that has it. pfl runs in two processes on a CPU and in five on a GPU, its fastest in
peers.py, unless `--processes` sets another number. All train FedAvg on the same images and clients,
and evaluate after every round. A first start finds no compiled kernels and no fonts in its caches;
a second start finds both.

The parts of a Fedlens run's time come from further runs: from their records, and from the times at
which their files were written. These runs import torch before the command begins, to mark the end
of the imports, so they take a little longer than the command: take totals from the rows without
parts. Results are medians over repeats, which are interleaved. CPU seconds add up all cores and all
processes, and are meaningful even if other programs use the machine. Results are written after
every repeat, so an interrupted call keeps them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from fedlens.storage.files import write_atomically
from origin import origin

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclass(frozen=True)
class Whole:
    """The settings of a run that is short enough to wait for."""

    model: str
    dataset: str
    rounds: int
    clients: int
    cohort: int
    epochs: int
    batch: int
    lr: float = 0.05


RUNS = {
    "quickstart": Whole("lenet5", "fashion-mnist-mini", 20, 50, 10, 2, 20, lr=0.1),
    "mcmahan": Whole("mcmahan-cnn", "fashion-mnist", 40, 100, 10, 1, 10),
}
PAGE = "report.html"
NOTE = (
    '"Fedlens" is the command as a shell starts it. "Parts of" are further runs, whose imports '
    "come before all else, so that they take a little longer."
)
PARTS = ("imports", "data and setup", "first round", "other rounds", "evaluation", "page", "rest")
PR_SET_CHILD_SUBREAPER = 36  # Linux: makes this process the parent of orphaned descendants
CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "MPLCONFIGDIR")  # empty at a first start


def settings(caches: Path | None = None) -> dict[str, str]:
    """The environment of a process: our sources on its path, and its own caches."""
    paths = [str(ROOT / "src"), str(HERE / "simulators"), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if caches is not None:
        own |= {name: str(caches / name) for name in CACHES}
    return os.environ | own


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, dict[str, float]]:
    """Run a process; return its start (as `time.time`), and its wall-clock and CPU seconds."""
    began, start, used = time.time(), time.perf_counter(), cpu_of_children()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = {"total": time.perf_counter() - start}
    with contextlib.suppress(ChildProcessError):
        while True:  # processes that it left running are children of this one now
            os.waitpid(-1, 0)
    seconds["cpu"] = cpu_of_children() - used
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return began, seconds


def cpu_of_children() -> float:
    """CPU seconds of all child processes that this one has waited for, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


COMMAND = """
import sys, time

import fedlens.__main__, fedlens.runs.run, fedlens.runs.track
import torch

device, mark, *sys.argv = sys.argv[1:]
if device != "cpu":
    torch.zeros(1, device=device).item()
open(mark, "w").close()
fedlens.__main__.command()
"""
"""The command `fedlens`; it writes the file `mark` once its imports are done and the GPU is ready.

It starts the processes that draw only after that; the real command starts them before its imports.
"""


def by_fedlens(run: Whole, device: str, folder: Path, caches: Path) -> dict[str, float]:
    """Total and CPU seconds of `fedlens run` until its page is written, as a shell starts it."""
    command = [sys.executable, "-m", "fedlens", *words(run, device, folder)]
    return timed(command, settings(caches))[1]


def words(run: Whole, device: str, folder: Path) -> list[str]:
    """The arguments of `fedlens`, to run an experiment file that this function writes."""
    described = folder / "whole.toml"
    described.write_text(
        f'dataset = "{run.dataset}"\nmodel = "{run.model}"\nrounds = {run.rounds}\n'
        f"[clients]\ncount = {run.clients}\nper_round = {run.cohort}\n"
        f"[local]\nepochs = {run.epochs}\nbatch_size = {run.batch}\nlr = {run.lr}\n"
    )
    command = ["run", str(described), "--out", str(folder / "run")]
    return [*command, "--overwrite", "--quiet", "--device", device]


def in_parts(run: Whole, device: str, folder: Path, caches: Path) -> dict[str, float]:
    """Total seconds and seconds of each part, of the command whose imports come first."""
    place, mark = folder / "run", folder / "imported"
    command = [sys.executable, "-c", COMMAND, device, str(mark), "fedlens"]
    began, whole = timed(command + words(run, device, folder), settings(caches))
    records = [json.loads(line) for line in (place / "rounds.jsonl").read_text().splitlines()]
    rounds = [record["seconds"] for record in records]
    written = {
        path.name: path.stat().st_mtime - began
        for path in (mark, *(place / name for name in ("manifest.json", "summary.json", PAGE)))
    }
    parts = {
        "imports": written[mark.name],
        "data and setup": written["manifest.json"] - written[mark.name],
        "first round": rounds[0],
        "other rounds": sum(rounds[1:]),
        "evaluation": sum(record.get("evaluation_seconds", 0.0) for record in records),
        "page": written[PAGE] - written["summary.json"],
    }
    return {**whole, **parts, "rest": whole["total"] - sum(parts.values())}


class Other(NamedTuple):
    """A script that trains and evaluates the same run, and saves the model."""

    script: str
    python: str = sys.executable
    processes: int = 1  # more than 1 are started by torchrun


def by_others(other: Other, run: Whole, device: str, caches: Path) -> dict[str, float]:
    """Total and CPU seconds of the script."""
    command, own = [other.python], {"PFL_PYTORCH_DEVICE": device}
    if other.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={other.processes}"]
        own["OMP_NUM_THREADS"] = str(max(num_cores() // other.processes, 1))
    with tempfile.TemporaryDirectory() as place:
        asked = json.dumps({**asdict(run), "device": device, "out": str(Path(place) / "model.pt")})
        command += [str(HERE / "simulators" / other.script), asked]
        return timed(command, settings(caches) | own)[1]


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def measure(
    name: str, run: Whole, device: str, repeats: int, others: dict[str, Other]
) -> Iterator[dict[str, list[dict[str, float]]]]:
    """Yield after every repeat the seconds of all repeats so far, by simulator and start."""
    found: dict[str, list[dict[str, float]]] = {}
    for repeat in range(repeats):

        def note(who: str, seconds: dict[str, float], number: int = repeat + 1) -> None:
            found.setdefault(who, []).append(seconds)
            told = f"{name}, repeat {number}: {who} {seconds['total']:.1f} s"
            print(told, file=sys.stderr, flush=True)

        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            for start in ("first start", "second start"):
                caches = folder / "caches", folder / "caches of parts"
                note(f"Fedlens, {start}", by_fedlens(run, device, folder, caches[0]))
                note(f"parts of a {start}", in_parts(run, device, folder, caches[1]))
            for who, other in others.items():
                note(who, by_others(other, run, device, folder / "caches"))
        yield found


def about(device: str) -> dict[str, str]:
    """The machine and the versions; another process asks torch, so that this one uses no GPU."""
    asked = "import torch; print(torch.__version__)"
    asked += f"; print(torch.cuda.get_device_name({device!r}))" if device != "cpu" else ""
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    torch, *gpu = told.stdout.splitlines()
    return {
        **origin(),
        "machine": f"{platform.machine()}, {num_cores()} cores",
        "device": gpu[0] if gpu else "cpu",
        "python": platform.python_version(),
        "torch": torch,
        "date": str(date.today()),
    }


def row(name: str, who: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    medians = {part: statistics.median(run[part] for run in runs) for part in runs[0]}
    totals = [run["total"] for run in runs]
    spread = {"fastest": min(totals), "slowest": max(totals), "n": len(runs)}
    return {"run": name, "by": who, **medians, **spread}


def table(rows: list[dict[str, Any]]) -> str:
    head = ["run", "by", "seconds", "range", "n", "CPU seconds", *PARTS]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for one in rows:
        parts = [f"{one[part]:.2f}" if part in one else "" for part in PARTS]
        spread = f"{one['fastest']:.1f} to {one['slowest']:.1f}"
        seconds = f"{one['total']:.1f}", spread, str(one["n"]), f"{one['cpu']:.1f}"
        lines.append(f"| {' | '.join([one['run'], one['by'], *seconds, *parts])} |")
    return "\n".join([*lines, "", NOTE])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda ...")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--rounds", type=int, help="in place of each run's own number")
    parser.add_argument("--dataset", help="in place of each run's own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pfl", help="a Python that has pfl")
    parser.add_argument("--processes", type=int, help="of pfl [default: 2; on a GPU 5]")
    parser.add_argument("--out", type=Path, help="where whole_runs.json and whole_runs.md go")
    asked = parser.parse_args()
    if asked.repeats < 1 or (asked.rounds is not None and asked.rounds < 2):
        parser.error("--repeats: choose 1 or more; --rounds: 2 or more")
    others = {"loop by hand": Other("whole_loop.py")}
    if asked.pfl is not None:
        processes = asked.processes or (2 if asked.device == "cpu" else 5)
        others[f"pfl, processes: {processes}"] = Other("whole_pfl.py", asked.pfl, processes)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    of_runs: dict[str, list[dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    machine = about(asked.device)
    for name in asked.only:
        run = replace(
            RUNS[name],
            rounds=asked.rounds or RUNS[name].rounds,
            dataset=asked.dataset or RUNS[name].dataset,
        )
        label = f"{name}: {run.model}, {run.dataset}, {run.rounds} rounds"
        for found in measure(label, run, asked.device, asked.repeats, others):
            of_runs[label] = [row(label, who, runs) for who, runs in found.items()]
            rows = [one for some in of_runs.values() for one in some]
            if asked.out is not None:
                text = json.dumps({**machine, "rows": rows}, indent=1)
                write_atomically(asked.out / "whole_runs.json", f"{text}\n".encode())
                write_atomically(asked.out / "whole_runs.md", f"{table(rows)}\n".encode())
    print(table(rows))


if __name__ == "__main__":
    main()
