"""How long is it from the command to the page, and what of that is what? Beside plain PyTorch.

    python benchmarks/whole_runs.py [--device cpu] [--only quickstart mcmahan] [--rounds N]
                                    [--repeats 3] [--pfl PYTHON [--processes N]] [--out DIR]

Every run is a process of its own, timed from outside, imports included: `fedlens run` to its page,
a loop written by hand to its saved model, and the same by pfl if `--pfl` names a Python that has
it: in two processes on a CPU and in five on a GPU, its fastest in peers.py, unless `--processes`
says otherwise. All train FedAvg on the same images and clients, and evaluate after every round. A
first start finds no compiled kernels and no fonts in its caches; a second has them. Where a Fedlens
run's time goes is read from the records of further runs, and from when their files were written.
These import torch before the command begins, to mark when that is done, so they take a little
longer than the command: totals are those of the rows without parts. Medians over repeats, which are
interleaved. CPU seconds are those of all cores and all processes: they say something also where
others use the machine. What is measured is written after every repeat, so that a call that is cut
short leaves what it had.
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

from fedlens.files import write_atomically
from origin import origin

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclass(frozen=True)
class Whole:
    """A run that a person might wait for."""

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
PR_SET_CHILD_SUBREAPER = 36  # of Linux: who becomes the parent of orphans
CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "MPLCONFIGDIR")  # empty at a first start


def settings(caches: Path | None = None) -> dict[str, str]:
    """The environment of a process: our sources on its path, and its caches."""
    paths = [str(ROOT / "src"), str(HERE / "simulators"), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if caches is not None:
        own |= {name: str(caches / name) for name in CACHES}
    return os.environ | own


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, dict[str, float]]:
    """When a process began, on the clock of files; seconds to its end, and of all its cores."""
    began, start, used = time.time(), time.perf_counter(), cpu_of_children()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = {"total": time.perf_counter() - start}
    with contextlib.suppress(ChildProcessError):
        while True:  # those that it left behind are this process's children now
            os.waitpid(-1, 0)
    seconds["cpu"] = cpu_of_children() - used
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return began, seconds


def cpu_of_children() -> float:
    """The CPU seconds of all processes that this one has waited for, and of theirs."""
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
"""The command `fedlens`, whose imports and GPU are ready when it writes a file as a mark.

Its processes that draw start only then, where those of the command itself start before imports.
"""


def by_fedlens(run: Whole, device: str, folder: Path, caches: Path) -> dict[str, float]:
    """Seconds in all, of `fedlens run` to its page, as a shell starts it."""
    command = [sys.executable, "-m", "fedlens", *words(run, device, folder)]
    return timed(command, settings(caches))[1]


def words(run: Whole, device: str, folder: Path) -> list[str]:
    """What `fedlens` is asked: to run an experiment that is written here."""
    described = folder / "whole.toml"
    described.write_text(
        f'dataset = "{run.dataset}"\nmodel = "{run.model}"\nrounds = {run.rounds}\n'
        f"[clients]\ncount = {run.clients}\nper_round = {run.cohort}\n"
        f"[local]\nepochs = {run.epochs}\nbatch_size = {run.batch}\nlr = {run.lr}\n"
    )
    command = ["run", str(described), "--out", str(folder / "run")]
    return [*command, "--overwrite", "--quiet", "--device", device]


def in_parts(run: Whole, device: str, folder: Path, caches: Path) -> dict[str, float]:
    """Seconds in all and by part, of the command whose imports come first."""
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
    """A script that trains and evaluates the same, and saves the model."""

    script: str
    python: str = sys.executable
    processes: int = 1  # above 1, started by torchrun


def by_others(other: Other, run: Whole, device: str, caches: Path) -> dict[str, float]:
    """Seconds in all."""
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
    """By who ran it and at which start: the seconds of each repeat so far, after every repeat."""
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
    """The machine and its versions; a process of its own asks torch: ours must not use the GPU."""
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
