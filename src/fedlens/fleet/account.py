"""What a site has given of its data: a ledger in its folder, and the budget of its policy.

The head of the site's log has the mark of the ledger. So a ledger that is lost, changed or cut off
is noticed, and closes the site: a new one begins only where the log knows of none, and a person
approves an experiment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fedlens.algorithm import Algorithm
from fedlens.algorithm.pieces import PoissonBatches
from fedlens.fleet.log import Log
from fedlens.fleet.policy import Policy, Refused
from fedlens.fleet.terms import Terms
from fedlens.privacy.events import Release
from fedlens.privacy.ledger import Entry, Ledger, total
from fedlens.storage.files import write_atomically

LEDGER = "ledger.jsonl"
DATA = "all that the site ever had"  # so that examples that are added open no new account


def released(algorithm: Algorithm, size: int, updates: int) -> Release:
    """What so many updates tell of `size` examples."""
    private, draw = algorithm.objective.private, algorithm.draw
    if private is None:
        (release,) = algorithm.releases(0)
        return replace(release, count=updates)
    assert isinstance(draw, PoissonBatches)
    steps = updates * draw.num_steps(size)
    return Release(float(private.noise), "poisson", draw.rate(size), count=steps)


@dataclass(frozen=True)
class Account:
    home: Path

    @property
    def path(self) -> Path:
        return self.home / LEDGER

    def begin(self) -> None:
        """Begin a ledger, unless there is one or the log knows of one."""
        empty = not self.path.is_file() or not self.path.stat().st_size
        if empty and not Log(self.home).head.ledger:
            write_atomically(self.path, b"")
            Log(self.home).add("ledger", ledger=mark(Ledger(self.path)))

    def ledger(self) -> Ledger:
        """The ledger; a ValueError unless it has all lines that the log knows of."""
        known = Log(self.home).head.ledger
        number, _, chain = known.partition(":")
        if not self.path.is_file():
            raise ValueError(f"{self.path} is missing, and what was spent is unknown: put it back")
        ledger = Ledger(self.path)
        if not known or ledger.chains[int(number) :][:1] != [chain]:
            raise ValueError(
                f"{self.path} is not the ledger that the log beside it knows, and what was spent "
                "is unknown: put the old files back"
            )
        return ledger

    def pay(self, terms: Terms, algorithm: Algorithm, size: int, updates: int) -> None:
        """Write down what updates tell before they are made; Refused beyond the budget."""
        assert terms.privacy is not None
        ledger, unit = self.ledger(), terms.privacy.unit
        more, budget = released(algorithm, size, updates), Policy.read(self.home).privacy
        if budget is not None:
            before = ledger.spent(DATA, unit)
            spent, after = (total(one, budget.delta) for one in (before, [*before, more]))
            if after > budget.epsilon:
                left = f"{max(budget.epsilon - spent, 0):.3g} is left, and this would pass it"
                raise Refused(f"its policy gives {budget} in all: {left}")
        last = max((one.round for one in ledger.entries if one.run == terms.hash), default=0)
        ledger.order([Entry(DATA, "this site", unit, terms.hash, last + 1, more)])

    def describe(self, terms: Terms, size: int) -> Iterator[str]:
        """What an experiment costs, and what then remains of the budget, line by line."""
        given, budget = terms.privacy, Policy.read(self.home).privacy
        if given is None:
            return
        begun = self.path.is_file() or Log(self.home).head.ledger
        spent = self.ledger().spent(DATA, given.unit) if begun else []
        more = released(terms.algorithm, size, terms.most_updates)
        delta = given.delta if budget is None else budget.delta
        cost, before, after = (total(one, delta) for one in ([more], spent, [*spent, more]))
        whom = "this site" if given.unit == "client" else f"each of {size:,} examples"
        each = f"at delta {delta:g} for {whom}"
        yield f"cost:      epsilon {cost:.3g} {each}, by {terms.most_updates:,} updates"
        yield f"spent:     epsilon {before:.3g} before, and {after:.3g} with this experiment"
        if budget is not None:
            enough = f"{budget.epsilon - after:.3g} remains"
            short = "which this would pass: the site would refuse what is beyond"
            left = enough if after <= budget.epsilon else short
            yield f"budget:    epsilon {budget.epsilon:g}; {left}"


def mark(ledger: Ledger) -> str:
    return f"{len(ledger.chains) - 1}:{ledger.chains[-1]}"
