"""The server of a fleet: it asks sites how much they hold, and runs the experiment on them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedlens.config.experiment import Experiment
from fedlens.core import Tree
from fedlens.core.federation import Dataset, Examples, Federation, Fixed, Holdings, offsets_of
from fedlens.fleet import Notify, payload
from fedlens.fleet.account import released
from fedlens.fleet.engine import Fleet, Sites
from fedlens.fleet.log import Log, Logged
from fedlens.fleet.members import read_members
from fedlens.fleet.status import Standing, Status
from fedlens.fleet.terms import Peer, Terms, for_fleet, layers_sent_once
from fedlens.privacy.ledger import total
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.reports import Reporting
from fedlens.runs.folder import RunFolder
from fedlens.runs.loop import ActiveRun, run_to_end
from fedlens.runs.manifest import versions
from fedlens.runs.progress import Watch, all_of
from fedlens.runs.records import Record, settings
from fedlens.runs.result import Result
from fedlens.runs.run import reopen, start, write_partition
from fedlens.setup import Setup
from fedlens.setup.algorithm import check_schedules, make_algorithm
from fedlens.setup.data import ClientTests, dataset_of
from fedlens.setup.devices import own_threads
from fedlens.setup.network import make_network
from fedlens.storage import free_memory
from fedlens.storage.files import write_atomically
from fedlens.storage.reading import printable, shortened
from fedlens.storage.run_files import EXPERIMENT
from fedlens.storage.words import count_of

Connect = Callable[[Sequence[str]], Sites]
"""Connects to the sites of given names, whose client numbers are their places."""

Roster = Callable[[], Mapping[str, int]]
"""The numbers of the sites that are expected now, by name."""
Fails = Callable[[str, str], None]
"""Is told the name of a site, and what is wrong with its answer."""

REPORTS = ".reports"  # the ending of a file beside that of a job: what its process reports
TERMS = "terms.json"  # in the run folder, with secure sums: the terms, with the keys of all sites
SITES = "sites.json"  # in the run folder: what the sites hold, as they reported it
MOST_EXAMPLES = 10_000_000  # of a site: the server needs some tens of bytes for each
OF_SITES = ("names", "numbers", "sizes", "sites")  # the fields of an engine with a place for each
ASK_AGAIN = 5.0  # seconds until a site that refused is asked again: it may have approved by then


@dataclass(frozen=True)
class Held:
    """What a site holds, as it reported it.

    `number` is its place among all sites with a key, whether they came or not: what it holds out
    depends on it, and it was approved for this number.
    """

    name: str
    number: int
    size: int
    held_out: int
    label_counts: list[int] | None = None


class Hearing:
    """Asks sites what they hold, each until it says so.

    `roster` gives the sites that are expected now, by name, with their numbers.
    """

    def __init__(
        self,
        connect: Connect,
        roster: Roster,
        terms: Terms,
        notify: Notify,
        fails: Fails,
        layers: Tree,
    ) -> None:
        self.connect, self.roster, self.terms = connect, roster, terms
        self.notify, self.fails, self.layers = notify, fails, layers
        self.found = dict[str, Held]()
        self._numbers = dict[str, int]()
        self._sites: Sites | None = None
        self._asked, self._last_word = dict[int, float](), dict[str, str]()
        self._lacks = set[int]()  # who asked for the layers that come once

    @property
    def missing(self) -> list[str]:
        """Who is expected, and did not say what it holds."""
        return [name for name in self.roster() if name not in self.found]

    def step(self) -> None:
        """Ask who is due, and take in what arrived."""
        now, expected = time.monotonic(), self.roster()
        if self._sites is None or expected.keys() - self._numbers.keys():
            self._numbers |= expected  # a newer connection has the earlier sites at their places
            self._sites, self._asked = self.connect([*self._numbers]), {}
        names, sites, terms = [*self._numbers], self._sites, self.terms
        due = [
            client
            for client in sites.online()
            if names[client] not in self.found
            and now - self._asked.get(client, -ASK_AGAIN) >= ASK_AGAIN
        ]
        order = {"experiment": terms.hash, "terms": terms.text}
        orders = {client: {**order, "client": self._numbers[names[client]]} for client in due}
        for lacks in (False, True):
            some = {c: one for c, one in orders.items() if (c in self._lacks) == lacks}
            if some:
                sites.send("sizes", some, self.layers if lacks else {}, 600.0)
        self._asked |= dict.fromkeys(due, float("inf"))
        for client, arrived in sites.arrived():
            self._asked[client], name = time.monotonic(), names[client]
            if self.layers and "lacks" in arrived.facts and client not in self._lacks:
                self._lacks.add(client)
                del self._asked[client]
                continue
            held = _held(name, self._numbers[name], arrived.facts, terms)
            if held is not None:
                self.found[name] = held
                skew = _skew(arrived.facts.get("versions"))
                self.notify(f"{name}: {count_of(held.size, 'example')}{skew}")
                continue
            none = f"it gave no sizes from 1 to {MOST_EXAMPLES:,}"
            why = arrived.reason or arrived.facts.get("refused") or none
            word = f"{arrived.failed or 'refused'}: {why}"
            if self._last_word.get(name) != word:
                self._last_word[name] = word
                self.fails(name, word)


def hear(hearing: Hearing, wait: float, at_least: int | None = None) -> list[Held]:
    """What all expected sites hold; after `wait` seconds, at least `at_least` are enough."""
    begun = time.monotonic()
    while True:
        missing, here = hearing.missing, hearing.roster()
        there = [one for name, one in hearing.found.items() if name in here]
        if there and not missing:
            break
        if time.monotonic() - begun > wait:
            absent = ", ".join(missing)
            if at_least is not None and len(there) >= at_least:
                hearing.notify(f"without {absent}")
                break
            raise ValueError(
                f"after {wait:g} s these sites are missing: {absent}; start them, let them "
                "approve the experiment, or set --at-least"
            )
        hearing.step()
        time.sleep(0.2)
    return sorted(there, key=lambda one: one.number)


def _held(name: str, number: int, facts: Any, terms: Terms) -> Held | None:
    """What a site reported, or None if that is not valid."""
    size, apart, counts = (facts.get(key) for key in ("size", "held_out", "label_counts"))
    fit = all(type(number) is int and 0 <= number <= MOST_EXAMPLES for number in (size, apart))
    if not fit or not size:
        return None
    if "label_counts" not in terms.algorithm.discloses:
        return Held(name, number, size, apart)
    fits = isinstance(counts, list) and len(counts) == len(terms.classes)
    if not fits or not all(type(n) is int and n >= 0 for n in counts) or sum(counts) != size:
        return None
    return Held(name, number, size, apart, counts)


def _skew(theirs: Any) -> str:
    """A remark on the versions that a site has and the server has not."""
    told = theirs if isinstance(theirs, dict) else {}
    others = [
        f"{name} {shortened(str(told[name]), 40)}, not {mine}"
        for name, mine in versions().items()
        if name in told and told[name] != mine
    ]
    return (
        f"; it has {', '.join(others)}: its bytes may differ from a simulation's" if others else ""
    )


def check_room(experiment: Experiment, dataset: Dataset, num_sites: int) -> None:
    """Raise ValueError for a model whose updates do not fit here, before sites are waited for."""
    size = payload.num_bytes(make_network(experiment, dataset)[0])
    asked = experiment.clients.per_round
    cohort = min(asked, num_sites) if isinstance(asked, int) else num_sites
    parts = {
        f"updates of {cohort} sites": 2 * size * cohort,  # in float64
        "what is on its way": 2 * size * (cohort + 1),
        "the model": 3 * size,
    }
    free_memory.demand("a round", parts, "lower clients.per_round, or take a smaller model")


def make_setup(
    experiment: Experiment,
    terms: Terms,
    dataset: Dataset,
    held: Sequence[Held],
    sites: Sites,
    fails: Fails,
) -> Setup:
    """The parts of a run whose clients are sites."""
    clients = replace(experiment.clients, count=len(held))
    if terms.sums is not None and clients.cohort != terms.cohort:
        raise ValueError(
            f"{terms.cohort} sites a round were approved for secure sums, and with {len(held)} "
            f"sites there are {clients.cohort}: give clients.per_round as a number, or wait for all"
        )
    experiment = replace(experiment, clients=clients)
    network, weights = make_network(experiment, dataset)
    algorithm = make_algorithm(experiment)
    check_schedules(experiment)
    algorithm.combine.check(network.layout)
    program = ClientProgram(algorithm, network.layout, experiment.augment)
    if program.is_private:
        _ = network.private  # raises for a model that mixes the examples of a batch
    engine = Fleet(
        network,
        sites,
        terms.hash,
        [one.name for one in held],
        [one.number for one in held],
        [one.size for one in held],
        experiment.reporting or Reporting(),
        fails,
        public={one.number: one.key for one in terms.content.sites},
    )
    tested = None
    if clients.holdout:
        tested = _holdings([one.held_out for one in held], held)
    return Setup(
        experiment=experiment,
        dataset=dataset,
        device=torch.device("cpu"),
        network=network,
        weights=weights,
        program=program,
        federation=_federation(dataset, held),
        client_tests=None if tested is None else ClientTests("train", tested),
        parts={"test": dataset.test} if "test" in experiment.evaluate.on else {},
        threads=own_threads(),
        engine=engine,
        knows_labels=held[0].label_counts is not None,
    )


def _federation(dataset: Dataset, held: Sequence[Held]) -> Federation:
    """How many examples each site holds; the server does not have the examples themselves.

    The labels match the sites' label counts if they reported them, and are zeros otherwise.
    """
    labels = [
        torch.zeros(one.size, dtype=torch.int64)
        if one.label_counts is None
        else torch.arange(dataset.num_classes).repeat_interleave(torch.tensor(one.label_counts))
        for one in held
    ]
    joined = torch.cat(labels)
    nothing = torch.zeros((1, *dataset.shape), dtype=torch.uint8)
    examples = Examples(nothing, joined, rows=torch.zeros_like(joined))
    return Federation(
        examples, dataset.num_classes, Fixed(_holdings([one.size for one in held], held))
    )


def _holdings(sizes: Sequence[int], held: Sequence[Held]) -> Holdings:
    offsets = offsets_of(torch.tensor(sizes, dtype=torch.int64))
    names = tuple(one.name for one in held)
    return Holdings(torch.arange(int(offsets[-1])), offsets, names)


@dataclass(frozen=True)
class Job:
    """What the ServerApp has to run, and with which sites."""

    experiment: str  # a TOML file
    out: str
    sites: dict[str, int]  # Flower's node id of each, by name, unless its folder has members
    data: str | None = None
    overwrite: bool = False
    resume: bool = False
    wait: float = 600.0
    at_least: int | None = None
    home: str | None = None  # the server's own folder, which has its log
    keys: dict[str, str] = field(default_factory=dict)  # with secure sums: of all sites, by name
    served_by: int | None = None  # the process id with whose end the job ends

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)).encode())


def expected(job: Job, terms: Terms | None = None) -> dict[str, int]:
    """The sites that are expected now, with their numbers: those that have keys, or invitations.

    With secure sums they are no others than those whose keys all have approved.
    """
    known = {} if job.home is None else read_members(Path(job.home))
    found = {name: number for number, name in enumerate(sorted(job.sites))}
    if known:
        found = {name: one.number for name, one in known.items() if one.expected}
    peers = () if terms is None else terms.content.sites
    return {one.name: one.number for one in peers if one.name in found} if peers else found


def _terms(job: Job, experiment: Experiment, dataset: Dataset) -> Terms:
    """The terms of a run; with secure sums a run that is resumed has the same sites as before."""
    path, sums = Path(job.out) / TERMS, experiment.aggregation
    if sums is None or not sums.secure:
        return Terms.of(experiment, dataset)
    if job.resume and path.is_file():
        return Terms.of(experiment, dataset, Terms(path.read_text()).content.sites)
    sites = expected(job)
    if absent := [name for name in sites if name not in job.keys]:
        raise ValueError(
            f"secure sums need the keys of all sites before they are approved, and {absent[0]} has "
            "sent none yet: let it come while the server runs another experiment, or withdraw it"
        )
    return Terms.of(experiment, dataset, [Peer(n, sites[n], job.keys[n]) for n in sites])


def run_job(job: Job, connect: Connect, tell: Notify, watch: Watch | None = None) -> Result:
    """Run or resume an experiment on sites; `connect` connects to the sites of given names.

    `tell` gets lines for the operator. They may quote what a site sent, so they are cut and their
    control characters are escaped: none can pass for another line, or write to a terminal.
    """

    def notify(line: str) -> None:
        tell(printable(shortened(line)))

    out, experiment = Path(job.out), for_fleet(Experiment.read(Path(job.experiment)))
    resumes = job.resume and (out / SITES).is_file()
    if resumes:
        wanted, experiment = experiment, for_fleet(Experiment.read(out / EXPERIMENT))
        before, after = settings(experiment.plain()), settings(wanted.plain())
        changed = sorted(key for key in before | after if before.get(key) != after.get(key))
        if changed:
            raise ValueError(
                f"{out} was started with another {changed[0]}: leave the change out, or choose "
                "another --out for a run of its own"
            )
    dataset = dataset_of(experiment, Path(job.data) if job.data else None)
    terms = _terms(job, experiment, dataset)
    roster = partial(expected, job, terms)
    status = Status(Path(job.home or out), terms.hash, str(out), experiment.rounds)
    log = None if job.home is None else Log(status.home)
    if log is not None:
        if resumes:
            status.go_on()
        status.write()

    def logged(names: Sequence[str]) -> Sites:
        for name in names:
            status.sites.setdefault(name, Standing())
        return connect(names) if log is None else Logged(connect(names), log, status, names)

    def fails(name: str, why: str) -> None:
        notify(f"{name}: {why}")
        if log is not None:
            status.fails(name, why)

    check_room(experiment, dataset, len(roster()))
    notify(f"experiment {terms.hash}{', from where it was' if resumes else ''}")
    layers = layers_sent_once(experiment, dataset)
    hearing = Hearing(logged, roster, terms, notify, fails, layers)
    if resumes:
        known = [Held(**one) for one in json.loads((out / SITES).read_text())]
        unknown = [one.name for one in known if one.name not in roster()]
        if unknown:
            notify(f"{out} was started with {unknown[0]}, which has no key: it goes on without")
        hearing.found = {one.name: one for one in known}
    else:
        known = hear(hearing, job.wait, job.at_least)
    names = [one.name for one in known]
    if log is not None:
        watch = all_of(watch, partial(_write_down, log, status, partial(_epsilon, terms), known))
        log.add("run", experiment=terms.hash, sites=names, resumed=resumes)
    setup = make_setup(experiment, terms, dataset, known, logged(names), fails)

    def take_in(record: Record) -> None:
        """Between two rounds: hear sites that came since; they take part from then on."""
        if "round" not in record or not hearing.missing:
            return
        hearing.step()
        if new := [one for name, one in hearing.found.items() if one not in known]:
            known.extend(new)  # after the others, whose places stay
            sites = logged([one.name for one in known])
            _grow(active, make_setup(experiment, terms, dataset, known, sites, fails))
            _write_sites(out, active.setup, known)
            for one in new:
                notify(f"{one.name}: takes part from round {record['round'] + 1} on")
                if log is not None:
                    log.add("joined", experiment=terms.hash, site=one.name)

    # With secure sums all have approved who takes part.
    watch = watch if terms.sums is not None else all_of(watch, take_in)
    with ExitStack() as stack:
        if resumes:
            folder = stack.enter_context(closing(RunFolder.open(out)))
            _write_sites(out, setup, known)  # it may have been killed while some came
            active = reopen(folder, setup, watch)
        else:
            overwrite = job.overwrite or job.resume
            active = start(experiment, setup, out, overwrite=overwrite, watch=watch)
            _write_sites(out, setup, known)
            if terms.sums is not None:
                write_atomically(out / TERMS, terms.text.encode())
        if log is not None:
            status.begun = True
            status.write()
        (result,) = run_to_end([active])
        if result.status == "finished":
            state, engine = active.newest_state, active.setup.engine
            assert isinstance(engine, Fleet)
            found = active.details.get("calibration")
            engine.leave(state.params | state.buffers, state.clients.rows, found)
    if log is not None:
        log.add("ended", experiment=terms.hash, status=result.status)
        status.ended = result.status
        status.write()
    return result


def _grow(active: ActiveRun, grown: Setup) -> None:
    """Go on with more sites: on the same engine, which the loop has."""
    before, now = active.setup, grown.engine
    assert isinstance(before.engine, Fleet) and isinstance(now, Fleet)
    vars(before.engine).update({key: getattr(now, key) for key in OF_SITES})
    active.setup = replace(
        grown, engine=before.engine, threads=before.threads, run_id=before.run_id
    )


def _write_sites(out: Path, setup: Setup, known: Sequence[Held]) -> None:
    """Write down who takes part; by this file a run goes on."""
    write_atomically(out / SITES, json.dumps([asdict(one) for one in known]).encode())
    write_partition(out, setup)


def _epsilon(terms: Terms, size: int, updates: int) -> float | None:
    """What so many updates of a site have cost each of its examples, if noise protects them."""
    if terms.privacy is None or not updates:
        return None
    return total([released(terms.algorithm, size, updates)], terms.privacy.delta)


def _write_down(
    log: Log,
    status: Status,
    costs: Callable[[int, int], float | None],
    known: Sequence[Held],
    record: Record,
) -> None:
    """Add the line of a round: whose updates are in the model, and what became of the others."""
    if "clients" in record:
        failed, names = record.get("failed", {}), [one.name for one in known]
        out = {names[k]: why for why, clients in failed.items() for k in clients}
        used = [names[client] for client in record["clients"]]
        log.add("round", round=record["round"], used=used, failed=out)
        for held in known:
            one = status.sites[held.name]
            one.epsilon = costs(held.size, one.trained)
        status.ends(record["round"], used, out)
