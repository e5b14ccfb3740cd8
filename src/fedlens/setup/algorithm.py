"""The algorithm of an experiment."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Literal

import torch

from fedlens.algorithm import Algorithm, Amendment, compose, is_paper
from fedlens.algorithm.distributed import with_noise_of_clients
from fedlens.algorithm.dp_sgd import check_protected, protect_examples
from fedlens.algorithm.pieces import (
    AmongSeen,
    ByEffectiveNumber,
    ClippedByNorm,
    ClippedByValue,
    Cyclic,
    Epochs,
    Objective,
    OwnNorms,
    Sgd,
    Steps,
    Uniformly,
)
from fedlens.algorithm.pieces.anneal import annealed
from fedlens.algorithm.pieces.losses import with_options
from fedlens.algorithm.private import with_privacy
from fedlens.algorithm.secure import with_secure_sums
from fedlens.algorithm.slots import Draw, Select, Solve
from fedlens.attacks import Attack, under_attack
from fedlens.config.consent import place_of
from fedlens.config.experiment import Between, Experiment, LocalTraining
from fedlens.config.names import ALGORITHMS, ANNEALS, ATTACKS, LOSSES, OPTIMIZERS
from fedlens.config.options import Named
from fedlens.config.protection import check_alone, protection_of, protects_examples
from fedlens.config.schedules import looked_at, value_at
from fedlens.storage.words import count_of

SMALLEST = 2.0**-126  # normal number of float32

logger = logging.getLogger(__name__)


def make_algorithm(experiment: Experiment, round: int = 0) -> Algorithm:
    """The algorithm of a round, counted from 0, with the values of schedules in that round."""
    # 0.0 would switch a term off, together with its memory for later rounds.
    now = {key: value or SMALLEST for key, value in experiment.scheduled(round).items()}

    def of(part: str) -> dict[str, Any]:
        """The values of schedules in this part of the experiment."""
        return {key.removeprefix(part): v for key, v in now.items() if key.startswith(part)}

    # `replace` checks the sections again, and so refuses invalid values of a schedule.
    local = replace(experiment.local, **of("local."))
    server = replace(experiment.server, **of("server."))
    base = Algorithm(
        select=_selection(experiment),
        draw=_draw(local),
        objective=_objective(experiment),
        solve=_solver(local),
        advance=Sgd(_number(server.lr)),
        reset=local.reset,
        personal=OwnNorms() if experiment.norm == "local" else None,
    )
    given, of_examples = experiment.privacy, protects_examples(experiment)
    if given is not None and of_examples:
        check_alone(experiment)
        # For an ε, `build` sets the noise: it knows what clients hold.
        noise = 1.0 if given.noise is None else given.noise
        base = protect_examples(base, _number(given.clip), noise, given.count_noise or 0.0)
        if given.sampling == "cyclic":
            assert experiment.clients.count is not None
            turns = Cyclic(experiment.clients.cohort, experiment.clients.count, experiment.seed)
            base = replace(base, select=turns)
    papers = []
    for named in experiment.algorithm:
        function = ALGORITHMS.find(named.name)
        if not is_paper(function):
            raise ValueError(
                f"algorithm {named.name!r}, {place_of(function)}, is not a paper: put @paper of "
                "fedlens on the line above it"
            )
        named = Named(named.name, {**named.options, **of(f"algorithm.{named.name}.")})
        papers.append(ALGORITHMS.make(named, of=Amendment))
    algorithm, sums = compose(base, *papers), experiment.aggregation
    chosen = isinstance(algorithm.select, AmongSeen) and algorithm.pace is None
    if experiment.clients.unseen and not chosen:
        raise ValueError(
            "clients.unseen sets clients apart where others are drawn uniformly, and here they are "
            "chosen in another way: leave it out"
        )
    if of_examples:
        check_protected(algorithm)
        if isinstance(base.select, Cyclic) and algorithm.select != base.select:
            raise ValueError(
                'privacy.sampling is "cyclic", and the algorithm has a way of its own to choose '
                "clients: leave sampling out"
            )
    if (attack := attack_of(experiment)) is not None:
        algorithm = under_attack(algorithm, attack, experiment.seed)
    secure = sums is not None and bool(sums.secure)
    if secure:
        _check_secure(experiment)
    if given is None or of_examples:
        if sums is None or not secure:
            return algorithm
        cohort = algorithm.select.cohort_size
        return with_secure_sums(algorithm, sums.clip, sums.bits, cohort, sums.threshold)
    protection = protection_of(experiment)
    if sums is None or not secure:
        return with_privacy(algorithm, protection)
    rules = sums.bits, sums.threshold, given.without, given.delta
    return with_noise_of_clients(algorithm, protection, *rules)


def _selection(experiment: Experiment) -> Select:
    clients = experiment.clients
    if not clients.unseen:
        return Uniformly(clients.cohort)
    return AmongSeen(clients.cohort, clients.num_unseen, experiment.seed)


def _check_secure(experiment: Experiment) -> None:
    given = experiment.privacy
    if given is not None and not protects_examples(experiment):
        for key, value, remedy in (
            ("epsilon", given.epsilon, "give noise, of which all clients know their part"),
            ("clip", isinstance(given.clip, Named) and given.clip.name, "choose a number"),
            ("mechanism", given.mechanism.name != "gaussian" and given.mechanism.name, "gaussian"),
            ("noise_cohort", given.noise_cohort, "the noise is that of those who take part"),
            ("sampling", given.sampling not in (None, "all") and given.sampling, "all"),
        ):
            if value:
                raise ValueError(
                    f"privacy.{key} is {value!r}, and with secure sums clients add the noise, and "
                    f"a server is not trusted: {remedy}"
                )
    if experiment.reporting is not None and experiment.reporting.over_select > 1:
        raise ValueError(
            "reporting.over_select and aggregation.secure exclude each other, for a sum has all "
            "that were asked: leave one out"
        )


def attack_of(experiment: Experiment) -> Attack | None:
    if experiment.attack is None:
        return None
    made: Attack = ATTACKS.make(experiment.attack, of=Attack)
    roots = [one.options.get("root", 0) for one in experiment.algorithm if one.name == "fltrust"]
    return replace(made, spared=roots[0]) if roots else made


def warn_of_attack(experiment: Experiment, algorithm: Algorithm) -> None:
    """Warn of more hostile clients than the defence withstands, and of none to attack."""
    attack, clients = attack_of(experiment), experiment.clients
    if attack is None or clients.count is None:
        return
    hostile, cohort = attack.count(clients.count), min(clients.cohort, clients.count)
    most, mean = algorithm.combine.withstands(cohort), hostile * cohort / clients.count
    if hostile == clients.count:
        whom = "the only client is" if hostile == 1 else f"all {hostile} clients are"
        logger.warning("attack: %s hostile, and nobody is attacked", whom)
    elif most is not None and mean > most:
        logger.warning(
            "attack: %.3g of the %s of a round %s hostile, and %s withstands %d",
            mean,
            count_of(cohort, "client"),
            "is" if mean == 1 else "are",
            " with ".join(named.name for named in experiment.algorithm),
            most,
        )


def _number(given: float | Named) -> float:
    assert not isinstance(given, Named), "the number of a round"
    return given


def _objective(experiment: Experiment) -> Objective:
    named = experiment.loss
    loss = with_options(LOSSES.find(named.name), named.options)
    if named.name in LOSSES:  # it refuses invalid options
        loss(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.int64))
    objective, beta = Objective(loss), experiment.local.class_balance
    return objective.times(ByEffectiveNumber(beta)) if beta else objective


def _solver(local: LocalTraining) -> Solve:
    """The named optimiser, annealed, on gradients that are clipped by value and then by norm."""
    solve: Solve = OPTIMIZERS.make(local.optimizer, local, of=Solve)
    if local.anneal is not None:
        solve = annealed(solve, ANNEALS.make(local.anneal))
    if local.clip is not None:
        solve = ClippedByNorm(solve, _number(local.clip))
    if local.clip_value is not None:
        solve = ClippedByValue(solve, _number(local.clip_value))
    return solve


def _draw(local: LocalTraining) -> Draw:
    amount = local.epochs if local.steps is None else local.steps
    if isinstance(amount, Between):
        low, high = amount.low, amount.high
    elif local.steps is None and local.max_steps is None and float(amount).is_integer():
        return Epochs(int(amount), local.batch_size)
    else:
        low = high = amount
    of: Literal["epochs", "steps"] = "epochs" if local.steps is None else "steps"
    return Steps(local.batch_size, low, high, of, local.max_steps)


LARGEST_OF_ADAM = 0.03  # of the usual learning rates of Adam


def warn_of_rate(local: LocalTraining) -> None:
    """Warn if Adam has a learning rate that suits SGD: its steps are about as long as that."""
    name, lr = local.optimizer.name, local.lr
    if name in ("adam", "adamw") and isinstance(lr, float) and lr > LARGEST_OF_ADAM:
        logger.warning(
            "local.lr is %g, which is SGD's: a step of %s is about that long in every weight, so "
            "try 0.001",
            lr,
            name,
            extra={"once": True},
        )


def check_schedules(experiment: Experiment) -> None:
    """Raise an error for a schedule with an invalid value in some round.

    The valid values of each number form an interval, so the least and the greatest are enough.
    """
    rounds = looked_at(experiment.rounds)
    for schedule in experiment.schedules.values():
        values = [value_at(schedule, round, experiment.rounds) for round in rounds]
        for extreme in (min(values), max(values)):
            place = rounds[values.index(extreme)]
            try:
                make_algorithm(experiment, place)
            except ValueError as error:
                raise ValueError(f"{error} (in round {place + 1}, by its schedule)") from error
