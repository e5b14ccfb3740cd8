"""Long runs: what they hold of the machine does not grow with the rounds."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch

import fedlens as fl
from fedlens.rounds import begin
from fedlens.runs.folder import Checkpoint
from fedlens.runs.loop import ActiveRun
from fedlens.storage.run_files import CHECKPOINT
from tests.checkpoints import new_run

NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="it asks /proc")


class Held(NamedTuple):
    """What a run holds of the machine after a round."""

    seconds: float  # of the processor so far, its workers' included
    bytes: int  # of memory, resident
    handles: int
    processes: int


def held() -> Held:
    times = os.times()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    spent = [Path(f"/proc/{child}/stat").read_text(encoding="ascii") for child in children]
    ticks = sum(sum(map(int, one.rpartition(")")[2].split()[11:13])) for one in spent)
    return Held(
        times.user + times.system + ticks / os.sysconf("SC_CLK_TCK"),
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(list(Path("/proc/self/fd").iterdir())),
        len(children),
    )


def small_experiment(rounds: int, engine: Any) -> fl.Experiment:
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(256, (64, 1, 6, 6), generator=drawn, dtype=torch.uint8)
    part = fl.Examples(images, torch.arange(64) % 2)
    return fl.Experiment(
        dataset=fl.Dataset("toy", part, part, ("a", "b")),
        model="linear",
        rounds=rounds,
        engine=engine,
        local={"lr": 0.001},
        clients={"count": 8, "per_round": 4},
        evaluate={"every": 10},
    )


def soak(rounds: int, engine: str, folder: Path) -> list[Held]:
    """What is held at the end of each tenth of a run."""
    found: list[Held] = []

    def watch(record: dict[str, Any]) -> None:
        if record["round"] % (rounds // 10) == 0:
            found.append(held())

    result = fl.run(small_experiment(rounds, engine), folder / "run", watch=watch)
    assert len(result.records) == rounds
    return found


@NEEDS_PROC
@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_a_run_opens_no_more_files_and_starts_no_more_processes_as_it_goes_on(engine, tmp_path):
    found = soak(60, engine, tmp_path)
    assert len({one.handles for one in found[1:]}) == 1
    assert len({one.processes for one in found}) == 1


@NEEDS_PROC
@pytest.mark.long
@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_twenty_thousand_rounds_take_no_more_of_anything_at_the_end(engine, tmp_path):
    rounds = int(os.environ.get("FEDLENS_SOAK_ROUNDS", "20000"))
    started = time.monotonic()
    found = soak(rounds, engine, tmp_path)
    tenths = [later.seconds - one.seconds for one, later in pairwise(found)]
    grown = found[-1].bytes - found[0].bytes
    print(f"\n{engine}: {rounds} rounds in {time.monotonic() - started:.0f} s")
    print("CPU seconds a tenth:", [round(seconds, 2) for seconds in tenths])
    print(
        f"memory {found[0].bytes / 1e6:.0f} -> {found[-1].bytes / 1e6:.0f} MB, handles and ", end=""
    )
    print(f"processes {found[0][2:]} -> {found[-1][2:]}")
    assert found[-1].handles == found[1].handles
    assert found[-1].processes == found[0].processes
    assert grown < 5000 * rounds  # its records: a kilobyte or two each
    assert median(tenths[-3:]) < 1.5 * median(tenths[:3])


def test_a_checkpoint_costs_the_same_however_many_rounds_were_recorded(tmp_path):
    from fedlens.setup import build

    experiment = small_experiment(3, "sequential")
    setup = build(experiment)
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    sizes = []
    for num_records in (0, 5_000):
        folder = new_run(tmp_path / str(num_records))
        told = {"seconds": 0.1, "train_loss": 0.5, "bytes_up": 1, "bytes_down": 1}
        records = [{"round": i, **told} for i in range(num_records)]
        content = "".join(f"{json.dumps(record)}\n" for record in records[:100]).encode()
        ActiveRun(setup, Checkpoint(state, records, content), folder).save()
        saved = folder.path / CHECKPOINT
        sizes.append(sum(file.stat().st_size for file in saved.iterdir()))
    assert abs(sizes[0] - sizes[1]) < 20  # digits of how many records it rests on
