"""Is the noise what the run claims? Measured by clients whose updates are known (canaries).

Some clients send, in place of an update, a random direction of their own that is longer than any
clip, or zeros: a fair coin of each decides. Whoever has the first and the last model compares the
move between them with each direction (Andrew et al., ICLR 2024, arXiv:2302.03098): a high product
says that the direction was sent. The guesses give a lower bound of ε (`privacy/one_run.py`), which
must not be above the ε that the run claims.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedlens.algorithm.private import ClipAndNoise
from fedlens.algorithm.slots import Uploading
from fedlens.core import Local, Tree, Upload, keys
from fedlens.privacy.accountant import epsilon
from fedlens.privacy.one_run import best_bound
from fedlens.privacy.protection import Protection
from fedlens.rounds import begin
from fedlens.runs.active import ActiveRun
from fedlens.runs.folder import Checkpoint
from fedlens.runs.loop import run_to_end
from fedlens.runs.watching import Watch
from fedlens.setup import Setup

CANARIES = keys.purpose("audit canaries")
MOST = 500  # canaries; at most every second client is one
LENGTH = 1e6  # of what a canary sends, before it is clipped


@dataclass(frozen=True)
class Measured:
    """The ε that a run claims, and the least that it has, with 95% confidence."""

    claimed: float
    at_least: float
    canaries: int
    guesses: int
    right: int

    @property
    def holds(self) -> bool:
        """Whether the measurement does not contradict the claim."""
        return self.at_least <= self.claimed


@dataclass(frozen=True)
class SendCanary:
    """What the first clients send: their own direction, or zeros; all others send `inner`."""

    inner: Uploading
    member: tuple[bool, ...]
    key: int

    def __call__(self, local: Local) -> Upload:
        upload = self.inner(local)
        assert local.clients is not None
        update = {name: t.clone() for name, t in upload.update.items()}
        for row, client in enumerate(local.clients.tolist()):
            if client < len(self.member):
                sent = LENGTH * direction(self.key, client, update) * self.member[client]
                sizes = [t[row].numel() for t in update.values()]
                for t, part in zip(update.values(), torch.split(sent, sizes), strict=True):
                    t[row] = part.view_as(t[row]).to(t)
        return replace(upload, update=update)


def direction(key: int, client: int, update: Tree) -> Tensor:  # [n] float64, of norm 1
    """The direction of a canary, in the space of all parameters [C, ...]."""
    size = sum(t[0].numel() for t in update.values())
    drawn = keys.normals(keys.fold(torch.tensor(key), client), size)
    found: Tensor = drawn / torch.linalg.vector_norm(drawn)
    return found


def measure(setup: Setup, watch: Watch | None = None) -> Measured:
    """Run a private experiment with canaries in place of its first clients."""
    experiment, algorithm = setup.experiment, setup.program.algorithm
    protection = protection_in(setup)
    if protection is None or experiment.privacy is None:
        raise ValueError("it claims no privacy of clients: give it [privacy]")
    if protection.noise_cohort != protection.cohort:
        raise ValueError("its noise is for a larger federation: leave privacy.noise_cohort out")
    if experiment.scheduled(0):
        raise ValueError("its numbers change over rounds: audit it without schedules")
    count = min(setup.federation.num_clients // 2, MOST)
    key = keys.root(experiment.seed, CANARIES)
    member = np.random.default_rng(int(key) % 2**63).random(count) < 0.5
    sends = SendCanary(algorithm.upload, tuple(member.tolist()), int(key))
    program = replace(setup.program, algorithm=replace(algorithm, upload=sends))
    own = replace(setup, program=program, parts={}, client_tests=None)
    state = begin(own.network, program, own.federation, own.device)
    (result,) = run_to_end([ActiveRun(own, Checkpoint(state), watch=watch)], keep_states=False)
    moved = {n: (result.model[n].double() - t.double())[None] for n, t in state.params.items()}
    flat = torch.cat([t.flatten() for t in moved.values()]).cpu()
    scores = np.array([float(direction(int(key), one, moved) @ flat) for one in range(count)])
    delta = experiment.privacy.delta
    at_least, guesses, right = best_bound(scores, member, delta)
    claimed = epsilon(protection.released(experiment.rounds), delta)
    return Measured(claimed, at_least, count, guesses, right)


def protection_in(setup: Setup) -> Protection | None:
    """What a run does for the privacy of its clients, if anything."""
    steps = setup.program.algorithm.channel
    return next((step.privacy for step in steps if isinstance(step, ClipAndNoise)), None)
