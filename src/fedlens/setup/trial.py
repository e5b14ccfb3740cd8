"""Runs two small rounds of an algorithm of the user's own, to find errors before a run."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from fedlens.algorithm.pieces import Uniformly
from fedlens.config.experiment import Experiment
from fedlens.config.own_code import place_of_error
from fedlens.core.federation import Federation
from fedlens.engines import Sequential
from fedlens.network.network import Network
from fedlens.rounds import begin, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.storage.reading import reason

CLIENTS, EXAMPLES, ROUNDS = 2, 2, 2  # the second round is the first with memory of an earlier one

logger = logging.getLogger(__name__)


def try_algorithm(
    experiment: Experiment,
    network: Network,
    program: ClientProgram,
    federation: Federation,
    device: torch.device,
) -> None:
    """Raise an error if the user's own algorithm fails; warn if it draws without a key.

    It may need more clients or examples than a small round has, so it is also run in whole rounds
    before the error is raised.
    """
    own = ", ".join(repr(one.name) for one in experiment.algorithm if ":" in one.name)
    if not own:
        return
    before = torch.get_rng_state()
    try:
        _train(_of_few(program), network, federation.shortened(EXAMPLES), device)
    except Exception:  # it may raise anything, and return anything
        try:
            _train(program, network, federation, device)
        except Exception as error:
            raise ValueError(f"algorithm {own}: {_told(error)}") from error
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        logger.warning(
            "algorithm %s draws random numbers by itself, so no run of it can be repeated: draw by "
            "local.key or client_keys",
            own,
            extra={"once": True},
        )


def _of_few(program: ClientProgram) -> ClientProgram:
    select = program.algorithm.select
    if isinstance(select, Uniformly):  # a selection of the user's own is run as it is
        select = Uniformly(min(CLIENTS, select.count))
    return replace(program, algorithm=replace(program.algorithm, select=select))


def _train(
    program: ClientProgram, network: Network, federation: Federation, device: torch.device
) -> None:
    engine = Sequential(network, federation.examples)
    state = begin(network, program, federation, device)
    for _ in range(ROUNDS):
        state, _ = run_round(program, federation, engine, state, seed=0)


def _told(error: Exception) -> str:
    if isinstance(error, ValueError):
        return str(error)
    if where := place_of_error(error):
        return f"{where}: fix it there"
    what = f"{type(error).__name__}: {reason(error)}"
    return f"a round fails by what it returns ({what}): docs/extend.md says what each part returns"
