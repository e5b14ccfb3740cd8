"""The summary of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedlens.config.names import OUTCOMES, RECORD_FIELDS, REPORTED
from fedlens.engines.trainer import largest_yet
from fedlens.evaluation.evaluate import ClientAccuracies, Twin, primary_part
from fedlens.evaluation.intervals import bootstrap_mean, holm, p_value
from fedlens.evaluation.measures import OF_MODEL, best, measure_name
from fedlens.evaluation.metrics import spread
from fedlens.rounds import State
from fedlens.rounds.cohorts import Reports
from fedlens.runs.records import (
    CHOSEN_BY,
    Record,
    at_round_numbers,
    first_with,
    is_number,
    merit,
    rounds_to,
)
from fedlens.setup import Setup

TENTHS = range(10, 100, 10)  # accuracies in percent whose time on the virtual clock is given
SHARES = (80, 90, 95, 99)  # percent of the twin's accuracy whose first round is given


def scheduled(setup: Setup, round: int) -> Record:
    """The values of all schedules in a round, by key; `local.lr` is named `lr`."""
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
    """The summary of complete rounds and, if too few clients reported, of the `stopped` round."""
    evaluated = [record for record in records if OF_MODEL.keys() & record.keys()]
    measured, best_values = _measured(records), dict[str, Any]()
    for key in measured:
        those = [r for r in evaluated if is_number(r.get(key))]
        if key == CHOSEN_BY:  # of equals, the one whose model is kept
            those.sort(key=lambda r: merit(r) or (), reverse=True)
        found = best(key, [(r[key], r["round"]) for r in those])
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
        "collapsed": _is_constant(measured) and not setup.dataset.multi_label,
        "final": final(records),
        "best": best_values,
        **at_budgets,
        **against,
        **({"emd": setup.emd} if setup.knows_labels else {}),
        **({} if setup.hostile is None else {"hostile": setup.hostile}),
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
    last = records[-1] if records else {}
    return _measured(records) | {key: last[key] for key in ("train_loss",) if key in last}


def _measured(records: list[Record]) -> Record:
    """The measures of the last evaluation."""
    last = next((one for one in reversed(records) if OF_MODEL.keys() & one.keys()), {})
    return {key: last[key] for key in last if key not in RECORD_FIELDS and "." not in key}


def gains(found: ClientAccuracies, seed: int) -> dict[str, Any]:
    """The models of the run compared with others, client by client: which clients gain?

    This is the entry `against` of a summary. p-values are of paired differences over clients
    (Student), corrected for the number of comparisons (Holm).
    """
    against: dict[str, Any] = {}
    names = ["fine_tuned", "local_only", "fedavg", "fedavg_fine_tuned"]
    for name in [*names, *["centralised"] * (found.fedavg is not None)]:
        own = getattr(found, name)
        if own is None:
            continue
        known = _compared(found, own)
        gain = (found.federated - own)[known]
        error = float(gain.std()) / max(len(gain), 1) ** 0.5 if len(gain) > 1 else 0.0
        against[name] = {
            "clients": len(gain),
            "federated_mean": float(found.federated[known].mean()),
            "own_mean": float(own[known].mean()),
            "gain": float(gain.mean()),
            "gain_interval": bootstrap_mean(gain, seed),
            "p": p_value(float(gain.mean()) / error, len(gain) - 1) if error else None,
            "federated_better": int((gain > 0).sum()),
            "own_better": int((gain < 0).sum()),
        }
    for about, p in zip(against.values(), holm([a["p"] for a in against.values()]), strict=True):
        about["p"] = p
    return {"against": against} if against else {}


def personal_measures(found: ClientAccuracies) -> dict[str, float]:
    """How good clients' own models are, and the share of clients that are better off than alone."""
    new = found.unseen
    of_clients = spread(found.federated if new is None else found.federated[~new])
    measures = {"personal_accuracy": of_clients["mean"]} if of_clients else {}
    measures |= {f"personal_accuracy_{k}": of_clients[k] for k in ("p10", "std") if of_clients}
    if found.local_only is not None:
        known = _compared(found, found.local_only)
        better = (found.federated > found.local_only)[known]
        measures["better_than_alone"] = float(better.double().mean())
    if new is not None and (of_new := spread(found.federated[new])):
        measures["unseen_accuracy"] = of_new["mean"]
    return measures


def _compared(found: ClientAccuracies, own: Tensor) -> Tensor:  # [K] bool
    """The clients that took part, or might have, and have both accuracies."""
    known = ~(own.isnan() | found.federated.isnan())
    return known if found.unseen is None else known & ~found.unseen


def who_failed(setup: Setup, state: State, reports: Reports) -> Record:
    """The end of a round on the virtual clock, its failed clients, and staleness or attempts.

    Clients that failed, were asked again, and reported, are not among those that failed.
    """
    record: Record = {} if setup.clock is None else {"clock": state.time}
    used = set() if reports.arrived else {*reports.reported.clients.tolist()}
    for key, reported in (("failed", False), ("failed_before", True)):
        found = {
            name: some
            for name, clients in reports.failed.items()
            if (some := [client for client in clients if (client in used) == reported])
        }
        record |= {key: found} if found or not reported else {}
    if reports.arrived:
        record["staleness"] = [state.round - 1 - one.version for one in reports.arrived]
    else:
        record["attempts"] = reports.attempts
    return record


def stopped_round(round: int, reports: Reports) -> Record:
    """The outcomes of clients in a round that was discarded because too few reported."""
    failed = {name: list(clients) for name, clients in reports.failed.items()}
    return {"round": round, "failed": failed, "attempts": reports.attempts}


def _outcomes(records: list[Record], stopped: Record | None) -> dict[str, Any]:
    """The number of clients by outcome, over all rounds."""
    outcomes = {REPORTED: sum(len(record["clients"]) for record in records)}
    for record in [*records, *([stopped] if stopped else [])]:
        for failed in (record["failed"], record.get("failed_before", {})):
            for name, clients in failed.items():
                outcomes[name] = outcomes.get(name, 0) + len(clients)
    return {"outcomes": {name: outcomes[name] for name in OUTCOMES if name in outcomes}}


def _on_clock(setup: Setup, records: list[Record]) -> dict[str, Any]:
    """The times on the virtual clock at which accuracies were reached."""
    found: dict[str, Any] = {"clock": records[-1]["clock"] if records else 0.0}
    if setup.experiment.evaluate.on:
        accuracy = measure_name(primary_part(setup.experiment), "accuracy")
        reached = {
            percent: first_with(records, percent / 100, accuracy).get("clock") for percent in TENTHS
        }
        found["clock_to"] = {str(p): time for p, time in reached.items() if time is not None}
    return found


def _is_constant(record: Record) -> bool:
    """Whether the model predicted a single class for all test and validation examples."""
    found = [record.get(f"{part}_classes_predicted") for part in ("test", "validation")]
    return {count for count in found if count is not None} == {1}


def peak_memory(setup: Setup) -> int:
    """Peak memory in bytes: of the GPUs, else of this process and its workers."""
    if setup.device.type == "cuda":
        return torch.cuda.max_memory_allocated(setup.device)
    by_workers = setup.engine.worker_bytes
    return by_workers if setup.devices[0].type == "cuda" else largest_yet() + by_workers
