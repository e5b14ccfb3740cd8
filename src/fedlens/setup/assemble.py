"""All the parts of a run, made from its description."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm
from fedlens.algorithm.pieces import AmongSeen
from fedlens.attacks import hostile_key
from fedlens.config.experiment import Experiment
from fedlens.config.names import DEVICES, LOSSES
from fedlens.config.options import Named
from fedlens.config.protection import protects_examples
from fedlens.core import keys
from fedlens.core.federation import Dataset, Examples, Federation, Fixed, Holdings
from fedlens.data.places import FEATURES, Counted, cache
from fedlens.data.statistics import emd_of
from fedlens.engines import Engine
from fedlens.models.weights import Loaded
from fedlens.network.network import Network
from fedlens.network.ops import has_triton, loading_triton
from fedlens.privacy.examples import ExampleProtection
from fedlens.rounds import begin
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.devices import Devices
from fedlens.rounds.reports import Clock, Faults, Reporting
from fedlens.rounds.traffic import sent_besides, traffic
from fedlens.setup.algorithm import (
    attack_of,
    check_schedules,
    make_algorithm,
    warn_of_attack,
    warn_of_rate,
)
from fedlens.setup.data import (
    ClientTests,
    check_finite,
    dataset_of,
    divided,
    on_disk,
    own_tests,
    poisoned,
    split_examples,
    split_seed,
    with_validation,
)
from fedlens.setup.devices import demand_memory, devices_of, engine_of, own_threads, precision_of
from fedlens.setup.examples import protection_of_examples, with_noise_of_examples
from fedlens.setup.features import cut_for, featured
from fedlens.setup.network import Networks, shared_network
from fedlens.setup.tryouts import try_algorithm, try_loss

SUCCESS_ON = "backdoor"
"""The part of the test images by which the success of an attack on data is measured."""


@dataclass(frozen=True)
class Setup:
    """Everything that a run needs, made and checked."""

    experiment: Experiment
    dataset: Dataset
    device: torch.device
    network: Network
    weights: Loaded | None  # the file that the model starts from
    program: ClientProgram  # of the first round
    federation: Federation
    client_tests: ClientTests | None
    parts: dict[str, Examples]  # what the server's model is evaluated on, by name
    engine: Engine
    threads: int  # of this process, on the CPU
    clock: Clock | None = None  # with devices, faults and the rules for waiting
    on_features: bool = False  # of the layers that are frozen, computed once, in place of images
    knows_labels: bool = True  # whether the server knows which labels clients hold
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))  # for a ledger
    salt: int = field(default_factory=lambda: secrets.randbits(63))  # see `drawn_by`

    _latest: dict[tuple[float, ...], ClientProgram] = field(default_factory=dict, repr=False)

    @property
    def drawn_by(self) -> int:
        """The seed of what rounds draw.

        If a ledger keeps what they cost, nobody can guess it, and no other run has it: noise that
        two runs have in common is gone in the difference of their models.
        """
        given, seed = self.experiment.privacy, self.experiment.seed
        kept = given is not None and given.ledger is not None and self.salt
        return int(keys.root(seed, self.salt)) if kept else seed

    def program_of(self, round: int) -> ClientProgram:
        """The program with the numbers of a round, counted from 0; reused while they are equal."""
        numbers = tuple(self.experiment.scheduled(round).values())
        if not numbers:
            return self.program
        if numbers not in self._latest:
            self._latest.clear()
            algorithm = make_algorithm(self.experiment, round)
            self._latest[numbers] = replace(self.program, algorithm=algorithm)
        return self._latest[numbers]

    @cached_property
    def emd(self) -> float:
        """The EMD of clients from the overall class shares. Cached: it reads all clients."""
        federation = self.federation
        return emd_of(federation.described(), federation.labels, federation.num_classes)

    @cached_property
    def hostile(self) -> list[int] | None:
        """The clients that are hostile in all rounds, if the experiment has an attack."""
        attack = attack_of(self.experiment)
        if attack is None or attack.redraw:
            return None
        found = attack.hostile(self.federation.num_clients, hostile_key(self.experiment.seed))
        return [int(client) for client in found.nonzero().squeeze(1)]

    @cached_property
    def examples(self) -> ExampleProtection:
        """What clients do for the privacy of their examples, if [privacy] is for these."""
        return protection_of_examples(
            self.experiment,
            self.program.algorithm,
            self.federation,
            everyone=self.engine.reporting is not None,
        )

    @property
    def is_personal(self) -> bool:
        """Whether an algorithm gives clients models of their own."""
        return self.program.algorithm.personal is not None and self.experiment.norm != "local"

    @property
    def unseen(self) -> Tensor | None:
        """The clients that are set apart, and never train in the rounds."""
        select = self.program.algorithm.select
        if not isinstance(select, AmongSeen):
            return None
        return select.set_apart(self.federation.num_clients)

    @property
    def some_may_fail(self) -> bool:
        """Whether clients that are asked may fail to report."""
        return self.clock is not None or self.engine.reporting is not None

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices that clients train on: the server's, unless workers have their own."""
        return self.engine.worker_devices or (self.device,)


def build(
    experiment: Experiment,
    data: Path | None = None,
    beside: Setup | None = None,
    watch: Counted | None = None,
    networks: Networks | None = None,
) -> Setup:
    """Make the parts of a run; named data sets are first looked for in `data`.

    `beside` is a setup whose clients see the same examples: the two share them. `watch` is a
    callback with the number of image files that are decoded, and their total. `networks` are those
    made before for other experiments on the same data set; the one of this run is added to them.
    """
    if experiment.aggregation is not None and experiment.aggregation.secure is True:
        raise ValueError(
            "aggregation.secure is true, and a simulation hides nothing: set "
            'aggregation.secure = "simulated", or run it in a fleet'
        )
    device, workers = devices_of(experiment)
    if device.type == "cuda" and has_triton():
        loading_triton()
    dataset = dataset_of(experiment, data, watch)
    check_finite(dataset)
    train, validation = with_validation(dataset, experiment)
    train, split = split_examples(experiment, train, dataset.num_classes)
    # From here on the number of clients is known, and `replace` checks that per_round fits it.
    clients = replace(experiment.clients, count=split.num_clients)
    precision = precision_of(experiment, device, workers)
    experiment = replace(experiment, clients=clients, precision=precision)
    client_tests: ClientTests | None
    if clients.holdout:
        assert isinstance(split, Fixed), "see split_examples"
        everyone = torch.arange(split.num_clients)
        kept, tested = divided(
            split.everyone, clients.holdout, split_seed(experiment), everyone, train.patients
        )
        split, client_tests = Fixed(kept), ClientTests("train", tested)
    else:
        client_tests = own_tests(experiment, dataset.test, split)
    attack, wanted = attack_of(experiment), None
    if attack is not None:
        train = poisoned(attack, train, split, dataset.num_classes, experiment.seed)
        if attack.data is not None and "test" in experiment.evaluate.on:
            wanted = attack.data.tests(dataset.test, dataset.num_classes)

    experiment.augment.check(dataset.train.images)
    algorithm = make_algorithm(experiment)
    if protects_examples(experiment):
        federation = Federation(train, dataset.num_classes, split)
        experiment = with_noise_of_examples(experiment, algorithm, federation)
        algorithm = make_algorithm(experiment)
    check_schedules(experiment)
    warn_of_rate(experiment.local)
    algorithm.select.check(split.num_clients)
    warn_of_attack(experiment, algorithm)
    if device.type == "cpu" and not workers:
        demand_memory(experiment, dataset, algorithm, split)
    networks = Networks() if networks is None else networks
    network, weights = shared_network(experiment, dataset, networks)
    if not all(bool(p.isfinite().all()) for p in network.params.values()):
        raise ValueError("the model starts with numbers that are not finite: initialise it again")
    if experiment.loss.name not in LOSSES:
        loss, outputs = algorithm.objective.loss, experiment.outputs or dataset.num_classes
        try_loss(loss, experiment.loss.name, outputs, dataset.num_classes)
    algorithm.combine.check(network.layout)
    for step in algorithm.channel:
        step.check(network.layout, algorithm.weigh)
    if algorithm.personal is not None:
        algorithm.personal.names(network.layout)
    made = cut_for(experiment, network, dataset, networks.cuts)
    if made is not None and (beside is None or beside.on_features):
        network = made.head
    else:
        made = None
    clocked = _needs_clock(experiment, algorithm)
    program = ClientProgram(algorithm, network.layout, experiment.augment, measures_norm=clocked)
    if protects_examples(experiment):
        _ = network.private  # raises for a model that mixes the examples of a batch
    if any(step.covers for step in algorithm.channel):
        if algorithm.personal is not None:
            client_tests = None  # what clients keep has no noise, and neither has what it is worth
        start = begin(network, program, Federation(train, dataset.num_classes, split), device)
        if sent := sent_besides(program, start.params, start.buffers, start.told):
            raise ValueError(
                f"privacy does not cover this algorithm (clients send {', '.join(sent)} beside "
                "their update): choose another one"
            )
    if beside is None:
        parts = {"train": train, "test": dataset.test, "validation": validation}
        for name in experiment.evaluate.on:
            if not parts[name]:
                raise ValueError(
                    f"{dataset.name} has no {name} examples: leave it out of evaluate.on"
                )
        on = [*experiment.evaluate.on, *(() if wanted is None else (SUCCESS_ON,))]
        parts = {**parts, SUCCESS_ON: wanted}
        there = {n: p for n, p in parts.items() if p is not None and n in ("train", *on)}
        if made is not None:
            there = featured(there, made, device, watch, cache() / FEATURES)
        train, asked = _placed(there, on, device)
    else:
        train, asked = beside.federation.examples, beside.parts
    federation = Federation(train, dataset.num_classes, split)
    try_algorithm(experiment, network, program, federation, device)
    return Setup(
        experiment=experiment,
        dataset=dataset,
        device=device,
        network=network,
        weights=weights,
        program=program,
        federation=federation,
        client_tests=client_tests,
        parts=asked,
        engine=engine_of(
            experiment,
            network,
            train,
            device,
            workers,
            [*asked.values()],
            on_disk(dataset, experiment.dataset, data) if made is None else None,
        ),
        threads=own_threads() if beside is None else beside.threads,
        on_features=made is not None,
        clock=_make_clock(experiment, network, program, federation) if clocked else None,
    )


def partition(
    experiment: Experiment, data: Path | None = None, watch: Counted | None = None
) -> tuple[Dataset, Examples, Holdings]:
    """The data set, the training examples, and which client holds which (in the first round)."""
    dataset, federation = federate(experiment, data, watch)
    return dataset, federation.examples, federation.everyone(0)


def planned_for_examples(
    experiment: Experiment, data: Path | None = None
) -> tuple[ExampleProtection, ExampleProtection]:
    """What clients would do for the privacy of their examples; the same with ten times as many."""
    _, federation = federate(experiment, data)
    clients = replace(experiment.clients, count=federation.num_clients)
    experiment = replace(experiment, clients=clients)
    algorithm = make_algorithm(experiment)
    experiment = with_noise_of_examples(experiment, algorithm, federation)
    one, ten = (
        protection_of_examples(experiment, algorithm, federation, times) for times in (1, 10)
    )
    return one, ten


def federate(
    experiment: Experiment, data: Path | None = None, watch: Counted | None = None
) -> tuple[Dataset, Federation]:
    """The data set, and its training examples as they are divided among the clients."""
    dataset = dataset_of(experiment, data, watch)
    train, _ = with_validation(dataset, experiment)
    train, split = split_examples(experiment, train, dataset.num_classes)
    return dataset, Federation(train, dataset.num_classes, split)


def _placed(
    parts: Mapping[str, Examples], asked: Sequence[str], device: torch.device
) -> tuple[Examples, dict[str, Examples]]:
    """The training examples and the parts to evaluate, on the device; they share images."""
    there: dict[int, torch.Tensor] = {}
    placed: dict[str, Examples] = {}
    for name, part in parts.items():
        placed[name] = part.to(device, there.get(id(part.images)))
        there[id(part.images)] = placed[name].images
    return placed["train"], {name: placed[name] for name in parts if name in asked}


def _needs_clock(experiment: Experiment, algorithm: Algorithm) -> bool:
    """Whether rounds are asynchronous, or there are devices, faults or rules of reporting."""
    described = (experiment.clients.devices, experiment.faults, experiment.reporting)
    return algorithm.pace is not None or any(one is not None for one in described)


def _make_clock(
    experiment: Experiment, network: Network, program: ClientProgram, federation: Federation
) -> Clock:
    reporting = experiment.reporting or Reporting()
    waits = replace(reporting, deadline=None, largest=None) != Reporting()
    pace, count = program.algorithm.pace, federation.num_clients
    if pace is not None and waits:
        raise ValueError(
            "asynchronous rounds wait for no quorum: leave reporting.over_select, quorum and "
            "below_quorum out"
        )
    if pace is not None and pace.buffer > count and program.algorithm.remembers:
        raise ValueError(
            f"a round takes {pace.buffer} updates, but of clients that remember something each "
            f"sends one, and there are {count}: choose a smaller buffer"
        )
    named = experiment.clients.devices or Named("alike")
    key = keys.fold(keys.root(experiment.seed), keys.purpose("devices"))
    devices: Devices = DEVICES.make(named, count, key, of=Devices)
    start = begin(network, program, federation, torch.device("cpu"))
    up, down = traffic(program, start.params, start.buffers, start.told)
    return Clock(devices, experiment.faults or Faults(), reporting, up, down)
