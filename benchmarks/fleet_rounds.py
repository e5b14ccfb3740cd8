"""What a round of a fleet takes: seconds, seconds of CPU, bytes, and memory at a site.

    python benchmarks/fleet_rounds.py [--sites 3] [--model linear] [--rounds 6] [--steps 1]

Server and sites are processes of this machine, with TLS and sockets, as `fedlens fleet try` starts
them. Seconds are those of whole rounds, on whatever else this machine does; seconds of CPU are
those of all processes together. The memory of a site is that of its processes (PSS, in which pages
that processes share count once), at its most, less what it was after PyTorch was imported and
before the first model came.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedlens.config.experiment import Clients, Experiment, LocalTraining
from fedlens.fleet.terms import of_sites
from fedlens.fleet.trial import run_sites
from fedlens.setup import build
from fedlens.storage.run_files import read_records
from origin import origin

TICKS = os.sysconf("SC_CLK_TCK")


def processes(folder: Path) -> Iterator[tuple[Path, str]]:
    """The processes that have to do with a folder, with their command lines."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line:
                yield place, line


def cpu_seconds(folder: Path) -> float:
    """Of all processes of a folder that run, and of their children that have ended."""
    total = 0
    for place, _ in processes(folder):
        with suppress(OSError):
            total += sum(map(int, (place / "stat").read_text().rpartition(")")[2].split()[11:15]))
    return total / TICKS


@dataclass
class Sampled(threading.Thread):
    """The memory of each site's processes, again and again."""

    folder: Path
    each: dict[str, list[tuple[bool, int]]] = field(default_factory=dict)  # whether it trains
    trains: bool = False
    over: bool = False

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        while not self.over:
            found = dict[str, int]()
            for place, line in processes(self.folder / "sites"):
                site = line.partition(f"{self.folder}/sites/")[2].partition("/")[0].split()[0]
                with suppress(OSError, IndexError):
                    rolled = (place / "smaps_rollup").read_text().partition("Pss:")[2]
                    found[site] = found.get(site, 0) + 1024 * int(rolled.split()[0])
            for site, size in found.items():
                self.each.setdefault(site, []).append((self.trains, size))
            time.sleep(0.02)

    def beyond(self) -> dict[str, int]:
        """What each site has at its most from then on, less what it had just before."""
        found = dict[str, int]()
        for site, sizes in self.each.items():
            before = [size for trains, size in sizes if not trains]
            found[site] = max(size for trains, size in sizes if trains) - before[-1]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--model", default="linear")
    parser.add_argument("--dataset", default="fashion-mnist-mini")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1)
    given = parser.parse_args()
    experiment = of_sites(
        Experiment(
            dataset=given.dataset,
            model=given.model,
            rounds=given.rounds,
            local=LocalTraining(batch_size=8, lr=0.01, steps=given.steps),
            clients=Clients(count=given.sites),
            evaluate={"on": []},
        ),
        given.sites,
    )
    network = build(experiment).network
    size = sum(t.nbytes for t in (*network.params.values(), *network.buffers.values()))
    with tempfile.TemporaryDirectory() as place:
        folder, spent = Path(place), list[float]()
        sampled = Sampled(folder)

        def watch(record: Any) -> None:
            if "round" in record:
                spent.append(cpu_seconds(folder))

        def notify(line: str) -> None:
            # All have said how much they hold: the next message has a model.
            heard.update({line.partition(":")[0]} if "examples" in line else ())
            sampled.trains = len(heard) == given.sites

        heard = set[str]()
        sampled.start()
        run_sites(experiment, folder, folder / "run", notify, watch=watch)
        sampled.over = True
        sampled.join()
        records = read_records(folder / "run")
    seconds = [record["seconds"] for record in records]
    found = {
        "seconds": seconds,
        "median seconds": statistics.median(seconds),
        "CPU seconds, all processes": [b - a for a, b in pairwise(spent)],
        "bytes of the model": size,
        "bytes up, bytes down": [[r["bytes_up"], r["bytes_down"]] for r in records[-1:]],
        "memory of a site beyond PyTorch, in models": {
            site: round(more / size, 2) for site, more in sorted(sampled.beyond().items())
        },
        "load": os.getloadavg(),
    }
    print(json.dumps({**origin(), "given": vars(given), **found}, indent=2))


if __name__ == "__main__":
    main()
