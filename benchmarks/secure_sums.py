"""What secure sums cost a site and the server: seconds of CPU, and bytes beside the plain sum.

    python benchmarks/secure_sums.py [--sites 10] [--lost 0] [--processes 2]

A fleet without a network: all sites are real ones, in folders of their own, which answer real
orders in worker processes; their messages are counted as they would travel. `--lost` sites are lost
while they train. Beside it the same fleet without secure sums, and the simulation, whose bytes the
model must have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fedlens.config.experiment import Aggregation, Clients, Experiment, LocalTraining
from fedlens.core import Tree
from fedlens.fleet import STAGES
from fedlens.fleet.keys import texts
from fedlens.fleet.payload import Reply, read, written
from fedlens.fleet.server import Job, run_job
from fedlens.fleet.site import Site
from fedlens.fleet.terms import of_sites
from fedlens.fleet.trial import make_homes, simulated
from origin import origin

SET_UP_AND_UNMASKING = STAGES  # all but the training, and the masks of its numbers


def answer(site: Site, what: str, facts: str, content: bytes) -> tuple[str, bytes, float]:
    """What a site answers, and the seconds of CPU that this took."""
    torch.set_num_threads(1)
    order, begun = read(facts, content), time.process_time()
    reply = site.answer(what, order.facts, order.tensors)
    return *written(reply.facts, reply.tensors), time.process_time() - begun


@dataclass
class Counted:
    """Sites in worker processes, and what their answers took."""

    sites: Sequence[Site]
    pool: ProcessPoolExecutor
    lost: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    up: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    down: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    waiting: list[tuple[int, str, Any]] = field(default_factory=list)

    def online(self) -> set[int]:
        return {*range(len(self.sites))}

    def gone(self) -> set[int]:
        return set()

    def send(
        self, what: str, orders: Mapping[int, Mapping[str, Any]], tensors: Tree, seconds: float
    ) -> None:
        for client, order in orders.items():
            sent = written(order, tensors)
            self.down[what].append(sum(map(len, sent)))
            asked = self.pool.submit(answer, self.sites[client], what, *sent)
            self.waiting.append((client, what, asked))

    def arrived(self) -> list[tuple[int, Reply]]:
        found = []
        for one in [one for one in self.waiting if one[2].done()]:
            self.waiting.remove(one)
            client, what, asked = one
            facts, content, seconds = asked.result()
            self.seconds[what].append(seconds)
            self.up[what].append(len(facts) + len(content))
            gone = what == "train" and client < self.lost
            found.append((client, Reply({}, {}, "dropped") if gone else read(facts, content)))
        return found

    def forget(self) -> None:
        self.waiting = []


def fleet(given: argparse.Namespace, secure: bool, folder: Path) -> tuple[Counted, float]:
    """A run of the sites, and the server's own seconds of CPU."""
    sums = Aggregation(secure=True, bits=given.bits) if secure else None
    experiment = of_sites(described(given, sums), given.sites)
    made = make_homes(experiment, folder / "sites")
    path = folder / "experiment.toml"
    path.write_text(experiment.toml())
    keys = texts(site.home / f"{site.home.name}.pub" for site in made)
    context = get_context("spawn")
    with ProcessPoolExecutor(given.processes, context) as pool:
        counted = Counted(made, pool, given.lost)
        names = {site.home.name: number for number, site in enumerate(made)}
        job = Job(str(path), str(folder / "run"), names, keys=keys, wait=3600.0)
        begun = time.process_time()
        run_job(job, lambda _: counted, lambda _: None)
        spent = time.process_time() - begun
    return counted, spent


def described(given: argparse.Namespace, sums: Aggregation | None) -> Experiment:
    return Experiment(
        dataset="fashion-mnist-mini",
        model=given.model,
        rounds=1,
        local=LocalTraining(batch_size=10, lr=0.05, steps=1),
        clients=Clients(count=given.sites),
        aggregation=sums,
        evaluate={"on": []},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--model", default="mcmahan-cnn")
    parser.add_argument("--bits", type=int, default=32)
    parser.add_argument("--lost", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in ("secure", "plain"):
            (folder / name).mkdir()
        secure, server = fleet(given, True, folder / "secure")
        plain, plain_server = fleet(replace_lost(given), False, folder / "plain")
        same = None
        if not given.lost:
            sums = Aggregation(secure=True, bits=given.bits)
            experiment = of_sites(described(given, sums), given.sites)
            same = simulated(experiment, folder, folder / "secure" / "run")["identical"]
    by_stage = {what: each for what, each in secure.seconds.items() if what != "sizes"}
    others = [sum(each) for each in zip(*(by_stage[what] for what in STAGES[:2]), strict=True)]
    later = [sum(each) for each in zip(*(by_stage[what] for what in STAGES[2:]), strict=True)]

    def bytes_of(counts: Mapping[str, Sequence[int]]) -> float:
        return sum(statistics.mean(each) for what, each in counts.items() if what != "sizes")

    up, down = ({"secure": bytes_of(getattr(secure, way)), "plain": bytes_of(getattr(plain, way))}
                for way in ("up", "down"))  # fmt: skip
    found = {
        "seconds a site": {what: statistics.mean(each) for what, each in by_stage.items()},
        "set-up and unmasking a site": statistics.mean(others) + statistics.mean(later),
        "the most of a site": max(others) + max(later),
        "training a site, plain": statistics.mean(plain.seconds["train"]),
        "server": {"secure": server, "plain": plain_server},
        "bytes up a site": up,
        "bytes down a site": down,
        "times the plain sum": {"up": up["secure"] / up["plain"],
                                "both ways": sum(x["secure"] for x in (up, down))
                                / sum(x["plain"] for x in (up, down))},
        "identical with the simulation": same,
    }  # fmt: skip
    print(json.dumps({**origin(), "given": vars(given), **found}, indent=2))


def replace_lost(given: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(given), "lost": 0})


if __name__ == "__main__":
    main()
