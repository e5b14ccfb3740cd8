"""A small experiment with sites, and sites that are asked within this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlens.config.experiment import Experiment
from fedlens.core import Tree
from fedlens.core.trees import map_tensors
from fedlens.fleet.keys import make_site_key, texts
from fedlens.fleet.payload import Reply
from fedlens.fleet.policy import FILE
from fedlens.fleet.server import Job, run_job
from fedlens.fleet.site import Site
from fedlens.fleet.site_data import write_site
from fedlens.fleet.terms import Terms, for_fleet, peers
from fedlens.runs.result import Result
from fedlens.setup import partition
from fedlens.setup.data import load_dataset

NAMES = ("ann", "bob", "cat", "dan")
MORE = (*NAMES, "eve", "fay")
CLASSES = ("cat", "dog", "owl", "yak")
TESTED = "label_counts = true\nleast_held_out = 1\n"  # a policy that allows tests
EXPERIMENT = """\
model = "{model}"
rounds = {rounds}
norm = "{norm}"
dataset = {{ name = "npz", path = "data.npz" }}
local = {{ batch_size = 8, lr = 0.1 }}
clients = {{ count = {count}, per_round = {per_round}, holdout = {holdout}, \
partition = {{ name = "dirichlet", alpha = 1.0 }} }}
algorithm = [{algorithm}]
"""


def write_experiment(
    folder: Path,
    algorithm: str = '{ name = "fedavg" }',
    more: str = "",
    rounds: int = 2,
    per_round: float = 3,
    holdout: float = 0.0,
    model: str = "linear",
    norm: str = "shared",
    count: int = 4,
) -> Path:
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=160)
    prototypes = rng.integers(60, 200, size=(4, 8, 8, 3))
    pixels = (prototypes[labels] + rng.integers(-50, 50, size=(160, 8, 8, 3))).astype(np.uint8)
    np.savez(
        folder / "data.npz",
        x_train=pixels[:120],
        y_train=labels[:120],
        x_test=pixels[120:],
        y_test=labels[120:],
        classes=np.array(CLASSES),
    )
    path = folder / "experiment.toml"
    text = EXPERIMENT.format(
        algorithm=algorithm,
        rounds=rounds,
        per_round=per_round,
        holdout=holdout,
        model=model,
        norm=norm,
        count=count,
    )
    path.write_text(text + more)
    return path


def make_sites(path: Path, folder: Path, approved: bool = True) -> list[Site]:
    """A site for each client of an experiment, with the examples that it holds."""
    experiment = for_fleet(Experiment.read(path))
    whole = replace(experiment, clients=replace(experiment.clients, holdout=0.0))
    dataset, train, holdings = partition(whole)
    homes = [folder / name for name in MORE[: len(holdings)]]
    for home in homes:
        make_site_key(home, home.name)
    terms = terms_of(experiment, homes)
    sites = []
    for client, home in enumerate(homes):
        write_site(home / "data.npz", train.take(holdings.members(client)), dataset.classes)
        site = Site(home, home / "data.npz")
        if experiment.clients.holdout:
            (home / FILE).write_text(TESTED)
        if approved:
            site.approvals.approve(site.offer(terms, client))
        sites.append(site)
    return sites


def public(homes: Sequence[Path]) -> dict[str, str]:
    """The public keys of sites, by name."""
    return texts(home / f"{home.name}.pub" for home in homes)


def terms_of(experiment: Experiment, homes: Sequence[Path]) -> Terms:
    return Terms.of(experiment, load_dataset(experiment.dataset, None), peers(public(homes)))


Change = Callable[[str, str, Reply], Reply | None]
"""(site, what it was asked, what it answers) -> what arrives; None: nothing does."""


class Nearby:
    """Sites in this process."""

    def __init__(self, sites: Sequence[Site], change: Change | None = None) -> None:
        self.sites, self.change = list(sites), change
        self.waiting: list[tuple[int, Reply]] = []
        self.orders: list[tuple[str, str, Mapping[str, Any]]] = []
        self.replies: list[tuple[str, str, Reply]] = []
        self.sent: list[tuple[str, str, Tree]] = []
        self.away: set[str] = set()
        self.withdrawn: set[str] = set()

    def online(self) -> set[int]:
        return {k for k, site in enumerate(self.sites) if site.home.name not in self.away}

    def send(
        self, what: str, orders: Mapping[int, Mapping[str, Any]], tensors: Tree, seconds: float
    ) -> None:
        for client, order in orders.items():
            site = self.sites[client]
            name = site.home.name
            self.orders.append((name, what, order))
            self.sent.append((name, what, tensors))
            copies = map_tensors(tensors, torch.clone)
            arrived = site.answer(what, order, copies)
            self.replies.append((name, what, arrived))
            changed = self.change(name, what, arrived) if self.change else arrived
            if changed is not None:
                self.waiting.append((client, changed))

    def arrived(self) -> list[tuple[int, Reply]]:
        found, self.waiting = self.waiting, []
        return found

    def gone(self) -> set[int]:
        return {k for k, site in enumerate(self.sites) if site.home.name in self.withdrawn}

    def forget(self) -> None:
        self.waiting = []


def run_nearby(
    path: Path,
    out: Path,
    sites: Sequence[Site],
    change: Change | None = None,
    told: list[str] | None = None,
    nearby: list[Nearby] | None = None,
    **job: Any,
) -> Result:
    by_name = {site.home.name: site for site in sites}

    def connect(names: Sequence[str]) -> Nearby:
        made = Nearby([by_name[name] for name in names], change)
        if nearby is not None:
            nearby.append(made)
        return made

    numbers = {name: number for number, name in enumerate(by_name)}
    notify = (told if told is not None else []).append
    keys = public([site.home for site in sites])
    return run_job(Job(str(path), str(out), numbers, keys=keys, **job), connect, notify)


def model_bytes(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()
