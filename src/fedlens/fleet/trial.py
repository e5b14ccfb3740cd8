"""`fedlens fleet try`: run a whole fleet on this machine, and compare it with its simulation."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlens.config.experiment import Experiment
from fedlens.core.trees import bytes_of
from fedlens.fleet import CA, Notify
from fedlens.fleet.flower import end, free_port, start_node
from fedlens.fleet.keys import make_server_keys, make_site_key, texts
from fedlens.fleet.policy import FILE
from fedlens.fleet.serve import serve
from fedlens.fleet.server import Job
from fedlens.fleet.site import Site
from fedlens.fleet.site_data import write_site
from fedlens.fleet.terms import Terms, of_sites, peers
from fedlens.runs.folder import RunFolder
from fedlens.runs.progress import Watch, decoding
from fedlens.runs.run import run
from fedlens.setup import partition
from fedlens.setup.data import dataset_of
from fedlens.storage.files import write_atomically


def make_homes(
    experiment: Experiment, folder: Path, data: Path | None = None, watch: Watch | None = None
) -> list[Site]:
    """Make a home folder for each client, with its data and its approval of the experiment."""
    whole = replace(experiment, clients=replace(experiment.clients, holdout=0.0))
    dataset, train, holdings = partition(whole, data, decoding(watch))
    homes = [folder / f"site-{client:04d}" for client in range(len(holdings))]
    for home in homes:
        make_site_key(home, home.name)
    terms = Terms.of(experiment, dataset, peers(texts(one / f"{one.name}.pub" for one in homes)))
    made = []
    for client, home in enumerate(homes):
        write_site(home / "data.npz", train.take(holdings.members(client)), dataset.classes)
        write_atomically(home / FILE, b"label_counts = true\nleast_held_out = 1\n")
        site = Site(home, home / "data.npz")
        site.approvals.approve(site.offer(terms, client))
        made.append(site)
    return made


def part_of(path: Path, folder: Path, client: int, count: int) -> Site:
    """The site of a simulated node, which holds a part of the experiment's own data."""
    experiment = of_sites(Experiment.read(path), count)
    terms = Terms.of(experiment, dataset_of(experiment, None))
    place = folder / f"{terms.hash[:16]}-{count}"
    if not place.is_dir():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
        make_homes(experiment, made)
        try:
            made.replace(place)
        except OSError:  # another node was faster
            shutil.rmtree(made)
    home = place / f"site-{client:04d}"
    return Site(home, home / "data.npz")


def start_site(site: Site, server: str) -> Any:
    home = site.home
    return start_node(home, site.data, server, "cpu", home / "node.log")


def make_keys(sites: list[Site], keys: Path) -> None:
    """Make keys for a server on this machine and for the sites, and exchange them."""
    make_server_keys(keys, ["127.0.0.1"])
    for site in sites:
        shutil.copy(site.home / f"{site.home.name}.pub", keys)
        shutil.copy(keys / CA, site.home)


def run_sites(
    experiment: Experiment,
    folder: Path,
    out: Path,
    notify: Notify,
    data: Path | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Run an experiment on sites of this machine, with processes and sockets."""
    sites = make_homes(experiment, folder / "sites", data, watch)
    whom = "a site and its server" if len(sites) == 1 else f"{len(sites)} sites and their server"
    notify(f"starting {whom}: half a minute until the first round, more with many sites")
    make_keys(sites, folder / "keys")
    port, processes = free_port(), []
    begun = time.monotonic()
    try:
        for site in sites:
            processes.append(start_site(site, f"127.0.0.1:{port}"))
        job = Job(str(folder / "experiment.toml"), str(out), {}, data=str(data) if data else None)
        where = folder / "keys", folder / "server", "127.0.0.1", port
        status = serve(experiment, job, *where, notify, watch)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            end(process)
    return {"status": status, "sites": len(sites), "seconds": time.monotonic() - begun}


def simulated(
    experiment: Experiment,
    folder: Path,
    out: Path,
    data: Path | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Run the same simulated, and compare its model with the one in `out`, to the byte."""
    if experiment.aggregation is not None and experiment.aggregation.secure:
        sums = replace(experiment.aggregation, secure="simulated")
        experiment = replace(experiment, aggregation=sums)
    here = run(experiment, folder / "simulated", data=data, watch=watch, progress=False)
    a, b = (RunFolder(path).load_model() for path in (out, folder / "simulated"))
    same = a.keys() == b.keys() and all(bytes_of(a[name]) == bytes_of(b[name]) for name in a)
    apart = max((float((a[name].double() - b[name].double()).abs().max()) for name in a), default=0)
    return {"rounds": len(here.records), "identical": same, "largest_difference": apart}
