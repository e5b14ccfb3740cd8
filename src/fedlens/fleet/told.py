"""What a site was asked and what left it, in words, from its own log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlens.fleet.account import DATA, LEDGER, Account
from fedlens.fleet.approvals import Approvals
from fedlens.fleet.log import Log
from fedlens.fleet.policy import Policy, Refused
from fedlens.privacy.ledger import total
from fedlens.storage.words import count_of

ASKED = {
    "sizes": "how much it holds",
    "train": "to train",
    "test": "to test a model",
    "keep": "to keep the final model",
    "open": "to open a sum",
}


def told_of(home: Path) -> Iterator[str]:
    """All experiments that a site was asked for, one after another, and what remains to give."""
    by_experiment: dict[str, list[Mapping[str, Any]]] = {}
    for event in Log(home).events():
        if event.get("event") in ("approved", "answered"):
            by_experiment.setdefault(str(event.get("experiment")), []).append(event)
    if not by_experiment:
        yield "nothing was asked of this site, and nothing left it"
    for experiment, events in by_experiment.items():
        yield f"experiment {experiment[:12]}: {_approved(home, experiment)}"
        yield from (f"  {line}" for line in _of_one(events))
    budget = Policy.read(home).privacy
    if budget is not None:
        begun = (home / LEDGER).is_file() or Log(home).head.ledger
        spent = Account(home).ledger().spent(DATA, budget.unit) if begun else []
        left = max(budget.epsilon - total(spent, budget.delta), 0.0)
        yield f"budget: {budget}; {left:.3g} remains"
    yield "images and labels did not leave this site"


def _approved(home: Path, experiment: str) -> str:
    try:
        found = Approvals(home).of(experiment)
    except (Refused, ValueError):
        return "not approved here"
    terms = found.offer.terms
    what = f"{' + '.join(terms.algorithms)}, {count_of(terms.rounds, 'round')}"
    return f"{what}; approved by {found.by} at {found.at}, as client {found.offer.client}"


def _of_one(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    answered = [one for one in events if one["event"] == "answered"]
    good = [one for one in answered if isinstance(one.get("sent"), dict)]
    asked = Counter(str(one.get("asked")) for one in answered)
    if answered:
        times = [f"{_times(asked[what])} {words}" for what, words in ASKED.items() if asked[what]]
        yield f"asked: {', '.join(times)}; the last time at {answered[-1]['time']}"
    left = []
    if any("label_counts" in one["sent"]["facts"] for one in good):
        left.append("how many examples it holds of each class")
    elif any(one["asked"] == "sizes" for one in good):
        left.append("how many examples it holds")
    updates = [one["sent"]["bytes"] for one in good if one["asked"] == "train"]
    if updates:
        left.append(f"{len(updates)} updates of the model, {sum(updates) / 1e6:.2f} MB")
    if tests := sum(one["asked"] == "test" for one in good):
        left.append(f"how many held-out examples {tests} models classify correctly")
    yield f"left the site: {'; '.join(left) or 'nothing'}"
    for guarantee in dict.fromkeys(one["sent"]["guarantee"] for one in good):
        yield f"guarantee: {guarantee}"
    refused = [one for one in answered if "sent" not in one]
    if refused:
        often = _times(len(refused) + sum(int(one.get("again", 0)) for one in answered))
        why = refused[-1].get("refused") or refused[-1].get("raised")
        yield f"refused or failed: {often}, at last: {why}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
