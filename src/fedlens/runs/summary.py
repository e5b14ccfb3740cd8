"""What a run came to: its summary."""

from __future__ import annotations

from typing import Any

import torch

from fedlens.engines.trainer import largest_yet
from fedlens.names import OF_ROUND, OUTCOMES, REPORTED
from fedlens.reporting.cohorts import Reports
from fedlens.rounds import State
from fedlens.runs.bootstrap import bootstrap_mean
from fedlens.runs.budgets import at_round_numbers, clock_at, rounds_to
from fedlens.runs.evaluate import ByClient, Twin, primary_part
from fedlens.runs.measures import OF_MODEL, best, measure_name
from fedlens.runs.records import is_number
from fedlens.setup import Setup

Record = dict[str, Any]
"""One line of rounds.jsonl: what a round did and, if it was evaluated, how good the model is."""

TENTHS = range(10, 100, 10)  # percent of accuracy, for which the clock is read
SHARES = (80, 90, 95, 99)  # percent of the twin's accuracy, for which rounds are counted


def scheduled(setup: Setup, round: int) -> Record:
    """The numbers of a round that others may have had otherwise; that of `local.lr` as `lr`."""
    numbers = setup.experiment.scheduled(round)
    return {"lr" if key == "local.lr" else key: value for key, value in numbers.items()}


def summary(
    setup: Setup,
    status: str,
    records: list[Record],
    elapsed: float,
    twin: Twin | None,
    stopped: Record | None = None,
) -> dict[str, Any]:
    """Of whole rounds and, if too few clients reported in the next one, of what became of them."""
    evaluated = [record for record in records if OF_MODEL.keys() & record.keys()]
    measured, best_values = _measured(records), dict[str, Any]()
    for key in measured:
        found = best(key, [(r[key], r["round"]) for r in evaluated if is_number(r.get(key))])
        if found is not None:
            best_values[key] = {"value": found[0], "round": found[1]}
    training, evaluation = (
        sum(record.get(key, 0.0) for record in records) for key in ("seconds", "evaluation_seconds")
    )
    padding = setup.engine.padding_share
    against: dict[str, Any] = {}
    if twin is not None:
        reached = {str(s): rounds_to(records, s / 100, "relative_accuracy") for s in SHARES}
        known = {"accuracy": twin.accuracy, "cached": twin.cached}
        against = {"twin": known, "rounds_to": reached}
    at_budgets = {}
    if setup.experiment.evaluate.on:
        at_budgets = at_round_numbers(
            records, measure_name(primary_part(setup.experiment), "accuracy")
        )
    return {
        "status": status,
        "rounds": len(records),
        "collapsed": _is_constant(measured),
        "final": final(records),
        "best": best_values,
        **at_budgets,
        **against,
        **({"emd": setup.emd} if setup.knows_labels else {}),
        "seconds": {"training": training, "evaluation": evaluation, "total": elapsed},
        **{
            key: sum(record[key] for record in records)
            for key in ("batches", "examples", "bytes_up", "bytes_down")
        },
        **(_outcomes(records, stopped) if setup.some_may_fail else {}),
        **(_on_clock(setup, records) if setup.clock is not None else {}),
        "peak_memory_bytes": peak_memory(setup),
        **({} if padding is None else {"padding_share": padding}),
    }


def final(records: list[Record]) -> Record:
    """The last evaluation, and the last training loss."""
    return _measured(records) | ({"train_loss": records[-1]["train_loss"]} if records else {})


def _measured(records: list[Record]) -> Record:
    """What the last evaluation measured of the model."""
    last = next((one for one in reversed(records) if OF_MODEL.keys() & one.keys()), {})
    return {key: last[key] for key in last if key not in OF_ROUND and "." not in key}


def gains(found: ByClient, seed: int) -> dict[str, Any]:
    """What the federated model is worth to clients, against each of their own: for whom is it?

    That is the part `against` of a summary, if they have models of their own.
    """
    against: dict[str, Any] = {}
    for name, own in (("fine_tuned", found.fine_tuned), ("local_only", found.local_only)):
        if own is None:
            continue
        known = ~(own.isnan() | found.federated.isnan())
        gain = (found.federated - own)[known]
        against[name] = {
            "clients": len(gain),
            "federated_mean": float(found.federated[known].mean()),
            "own_mean": float(own[known].mean()),
            "gain": float(gain.mean()),
            "gain_interval": bootstrap_mean(gain, seed),
            "federated_better": int((gain > 0).sum()),
            "own_better": int((gain < 0).sum()),
        }
    return {"against": against} if against else {}


def who_failed(setup: Setup, state: State, reports: Reports) -> Record:
    """When a round was over on a virtual clock, and what became of clients that were asked."""
    record: Record = {} if setup.clock is None else {"clock": state.time}
    record["failed"] = {name: list(clients) for name, clients in reports.failed.items()}
    if reports.landed:
        record["staleness"] = [state.round - 1 - flight.version for flight in reports.landed]
    else:
        record["attempts"] = reports.attempts
    return record


def stopped_round(round: int, reports: Reports) -> Record:
    """What became of clients in a round that did not count, since too few reported."""
    failed = {name: list(clients) for name, clients in reports.failed.items()}
    return {"round": round, "failed": failed, "attempts": reports.attempts}


def _outcomes(records: list[Record], stopped: Record | None) -> dict[str, Any]:
    """What became of all that were asked."""
    outcomes = {REPORTED: sum(len(record["clients"]) for record in records)}
    for record in [*records, *([stopped] if stopped else [])]:
        for name, clients in record["failed"].items():
            outcomes[name] = outcomes.get(name, 0) + len(clients)
    return {"outcomes": {name: outcomes[name] for name in OUTCOMES if name in outcomes}}


def _on_clock(setup: Setup, records: list[Record]) -> dict[str, Any]:
    """When on the virtual clock accuracies were reached."""
    found: dict[str, Any] = {"clock": records[-1]["clock"] if records else 0.0}
    if setup.experiment.evaluate.on:
        accuracy = measure_name(primary_part(setup.experiment), "accuracy")
        reached = {percent: clock_at(records, percent / 100, accuracy) for percent in TENTHS}
        found["clock_to"] = {str(p): time for p, time in reached.items() if time is not None}
    return found


def _is_constant(record: Record) -> bool:
    """Whether the model gave one and the same class to everything it was evaluated on."""
    found = [record.get(f"{part}_classes_predicted") for part in ("test", "validation")]
    return {count for count in found if count is not None} == {1}


def peak_memory(setup: Setup) -> int:
    """The most that was in use: of the GPUs, else by this process and its workers."""
    if setup.device.type == "cuda":
        return torch.cuda.max_memory_allocated(setup.device)
    by_workers = setup.engine.worker_bytes
    return by_workers if setup.devices[0].type == "cuda" else largest_yet() + by_workers
