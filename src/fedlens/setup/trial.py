"""Two small rounds of an algorithm of the user's own, so that what fails does so before a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.client import ClientProgram
from fedlens.engines import Sequential
from fedlens.experiment import Experiment
from fedlens.federation import Federation, Holdings, Split
from fedlens.network.network import Network
from fedlens.own_code import place_of_error
from fedlens.pieces import Uniformly
from fedlens.reading import reason
from fedlens.rounds import begin, run_round

CLIENTS, EXAMPLES, ROUNDS = 2, 2, 2  # the second round is the first that remembers another

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FirstFew(Split):
    """A split of which every client holds its first few examples."""

    whole: Split

    @property
    def num_clients(self) -> int:
        return self.whole.num_clients

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        held = self.whole.holdings(round, cohort)
        return Holdings.of([held.members(k)[:EXAMPLES] for k in range(len(held))])


def try_algorithm(
    experiment: Experiment,
    network: Network,
    program: ClientProgram,
    federation: Federation,
    device: torch.device,
) -> None:
    """Refuse an algorithm of the user's own that fails; say if it draws numbers no key reaches."""
    own = ", ".join(repr(one.name) for one in experiment.algorithm if ":" in one.name)
    if not own:
        return
    few = replace(federation, split=FirstFew(federation.split))
    select = program.algorithm.select
    if isinstance(select, Uniformly):  # one of their own is tried as it is
        select = Uniformly(min(CLIENTS, select.count))
    tried = replace(program, algorithm=replace(program.algorithm, select=select))
    before = torch.get_rng_state()
    try:
        state = begin(network, tried, few, device)
        for _ in range(ROUNDS):
            state, _ = run_round(tried, few, Sequential(network, few.examples), state, seed=0)
    except ValueError as error:
        raise ValueError(f"algorithm {own}: {error}") from error
    except Exception as error:  # it may raise anything, and give anything to what is ours
        where = place_of_error(error)
        what = f"{type(error).__name__}: {reason(error)}"
        remedy = (
            f"{where}: mend it there"
            if where
            else f"a round fails by what it returns ({what}): docs/extend.md says what each part "
            "is to return"
        )
        raise ValueError(f"algorithm {own}: {remedy}") from error
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        logger.warning(
            "algorithm %s draws random numbers by itself: no run of it can be repeated", own
        )
