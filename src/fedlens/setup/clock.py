"""The virtual clock of an experiment, if it needs one."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedlens.algorithm import Algorithm
from fedlens.config.experiment import Experiment
from fedlens.config.names import DEVICES
from fedlens.config.options import Named, call, find
from fedlens.core import keys
from fedlens.core.federation import Federation
from fedlens.network.network import Network
from fedlens.rounds import begin
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.devices import Devices
from fedlens.rounds.reports import Clock, Faults, Reporting
from fedlens.rounds.traffic import traffic


def needs_clock(experiment: Experiment, algorithm: Algorithm) -> bool:
    """Whether rounds are asynchronous, or there are devices, faults or rules of reporting."""
    described = (experiment.clients.devices, experiment.faults, experiment.reporting)
    return algorithm.pace is not None or any(one is not None for one in described)


def make_clock(
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
    function = find(DEVICES, named.name, "devices")
    made = call(function, count, key, options=named.options)
    if not isinstance(made, Devices):
        raise ValueError(
            f"devices {named.name!r} gave {type(made).__name__}: it must return Devices"
        )
    start = begin(network, program, federation, torch.device("cpu"))
    up, down = traffic(program, start.params, start.buffers, start.told)
    return Clock(made, experiment.faults or Faults(), reporting, up, down)
