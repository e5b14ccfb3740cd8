"""Attacks beside defences: what each defence keeps under its worst attack, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

from fedlens.config.names import TRUST
from fedlens.report.blocks import Block, Curves, Heat, Table
from fedlens.report.groups import Group, curve, mean_and_std, off_if_many
from fedlens.report.numbers import NONE, Cell, format_number
from fedlens.runs.records import PART_NAMES, Run, is_number, primary_part

SUCCESS = "backdoor_success"
DROPPED = 0.5  # of what a client counts in a plain mean, below which it counts as dropped
MOST_CLIENTS = 60  # of a heat map of who is dropped


class Detection(NamedTuple):
    """How often clients were dropped, over rounds and repeats."""

    honest: int
    honest_dropped: int
    hostile: int
    hostile_dropped: int

    @property
    def precision(self) -> float | None:
        dropped = self.honest_dropped + self.hostile_dropped
        return self.hostile_dropped / dropped if dropped else None

    @property
    def recall(self) -> float | None:
        return self.hostile_dropped / self.hostile if self.hostile else None


def dropped(run: Run) -> Iterator[tuple[int, bool]]:
    """Each client of each round, and whether it was dropped; nothing, if no defence says."""
    for record in run.rounds:
        counts, clients = record.get(TRUST), record.get("clients")
        if isinstance(counts, list) and isinstance(clients, list):
            few = DROPPED / max(len(counts), 1)
            yield from ((k, x < few) for k, x in zip(clients, counts, strict=False) if is_number(x))


def hostile_of(run: Run) -> set[int] | None:
    """The hostile clients of a run; None, if they are drawn anew in each round."""
    if not run.experiment.get("attack"):
        return set()
    found = run.summary.get("hostile")
    return {*found} if isinstance(found, list) else None


def detection(runs: Sequence[Run]) -> Detection | None:
    """None, if nobody is weighed, or nobody knows who is hostile."""
    counts = {(bad, out): 0 for bad in (False, True) for out in (False, True)}
    for run in runs:
        if (hostile := hostile_of(run)) is not None:
            for client, out in dropped(run):
                counts[client in hostile, out] += 1
    if not any(counts.values()):
        return None
    (good, good_out), (bad, bad_out) = (
        (counts[one, False] + counts[one, True], counts[one, True]) for one in (False, True)
    )
    return Detection(good, good_out, bad, bad_out)


@dataclass(frozen=True)
class Board:
    """Runs by attack and defence: "" is none. Runs of a cell differ in their seeds alone."""

    cells: Mapping[tuple[str, str], Sequence[Run]]

    @cached_property
    def attacks(self) -> list[str]:
        return list(dict.fromkeys(attack for attack, _ in self.cells if attack))

    @cached_property
    def defences(self) -> list[str]:
        return list(dict.fromkeys(defence for _, defence in self.cells))

    @cached_property
    def part(self) -> str:
        return primary_part([run for runs in self.cells.values() for run in runs])

    def accuracies(self, attack: str, defence: str) -> list[float]:
        """Final accuracies by seed; a run that diverged guesses."""
        found = [self._accuracy(run) for run in self.cells.get((attack, defence), ())]
        return [value for value in found if value is not None]

    def _accuracy(self, run: Run) -> float | None:
        classes = run.manifest.get("classes")
        if run.status in ("diverged", "invalid") and isinstance(classes, list) and classes:
            return 1 / len(classes)
        return run.final(f"{self.part}_accuracy")

    def mean(self, attack: str, defence: str) -> float | None:
        found = self.accuracies(attack, defence)
        return fmean(found) if found else None

    def worst(self, defence: str) -> str | None:
        """The attack that leaves the least accuracy."""
        found = {one: self.mean(one, defence) for one in self.attacks}
        known = {one: mean for one, mean in found.items() if mean is not None}
        return min(known, key=lambda one: known[one], default=None)

    def cost(self, defence: str) -> float | None:
        """What the defence costs without an attack, in accuracy."""
        with_it, without = self.mean("", defence), self.mean("", "")
        return None if with_it is None or without is None else without - with_it

    def verdict(self) -> str:
        """One sentence of result."""
        kept: dict[str, tuple[float, str]] = {}
        for defence in self.defences:
            worst = self.worst(defence)
            mean = None if worst is None else self.mean(worst, defence)
            if worst is not None and mean is not None:
                kept[defence] = mean, worst
        if not any(kept):
            return "No run has an accuracy."
        best = max((one for one in kept if one), key=lambda one: kept[one][0])
        words = f"{called(best)} keeps most under its worst attack: {_by(*kept[best])}"
        words += f"; without a defence it is {_by(*kept[''])}." if "" in kept else "."
        if (cost := self.cost(best)) is not None:
            words += f" When nobody attacks it costs {points(cost)}."
        return words[0].upper() + words[1:]

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """The table: a row for each defence."""
        header = ["defence", "no attack", "costs", "worst attack", "keeps"]
        return header, [self._row(defence) for defence in self.defences]

    def _row(self, defence: str) -> list[str]:
        worst, cost = self.worst(defence), self.cost(defence)
        return [
            called(defence),
            mean_and_std(self.accuracies("", defence), percent=True),
            NONE if cost is None or not defence else points(cost),
            worst or NONE,
            mean_and_std(self.accuracies(worst, defence) if worst else [], percent=True),
        ]

    def plain(self) -> dict[str, Any]:
        """The same as plain values."""
        found = {
            called(defence): {
                "accuracy": {one or NOBODY: self.accuracies(one, defence) for one in self.columns},
                "worst": self.worst(defence),
                "cost": self.cost(defence),
                "detection": {
                    one or NOBODY: None if seen is None else seen._asdict()
                    for one in self.columns
                    for seen in [detection(self.cells.get((one, defence), ()))]
                },
            }
            for defence in self.defences
        }
        return {"defences": found, "verdict": self.verdict()}

    @cached_property
    def columns(self) -> list[str]:
        return [*([""] if any(not attack for attack, _ in self.cells) else []), *self.attacks]

    def blocks(self) -> list[Block]:
        header, rows = self.rows()
        return [
            self._matrix(),
            Table(
                title="Each defence under its worst attack",
                name="worst",
                caption="Mean ± one standard deviation over seeds. What a defence costs is the "
                "accuracy of a plain mean minus its own, when nobody attacks.",
                header=header,
                rows=rows,
            ),
            *self._successes(),
            *self._curves(),
            *self._detections(),
        ]

    def _heat(
        self, of: Callable[[str, str], float | None], columns: Sequence[str], **more: Any
    ) -> Heat:
        return Heat(
            values=[[of(attack, defence) for attack in columns] for defence in self.defences],
            row_names=[called(defence) for defence in self.defences],
            column_names=[attack or NOBODY for attack in columns],
            row_label="defence",
            column_label="attack",
            percent=True,
            digits=1,
            **more,
        )

    def _matrix(self) -> Heat:
        worst = [(i, self.worst(defence)) for i, defence in enumerate(self.defences)]
        return self._heat(
            self.mean,
            self.columns,
            title="Accuracy under attack",
            name="accuracy_under_attack",
            caption=f"Final accuracy on the {PART_NAMES[self.part]} examples, the mean over seeds, "
            "in percent. A frame is around the worst attack of each defence. A run that diverged "
            "counts as one that guesses.",
            value_label="final accuracy",
            best=frozenset((i, self.columns.index(one)) for i, one in worst if one),
        )

    def _successes(self) -> Iterator[Heat]:
        """Where an attack wants something else than harm: how often it gets it."""

        def mean(attack: str, defence: str) -> float | None:
            ends = [run.final(SUCCESS) for run in self.cells.get((attack, defence), ())]
            found = [end for end in ends if end is not None]
            return fmean(found) if found else None

        wanting = [
            one for one in self.attacks if any(mean(one, d) is not None for d in self.defences)
        ]
        if wanting:
            yield self._heat(
                mean,
                wanting,
                title="Success of the attack",
                name="success",
                caption="The share of test images that the model takes for what the attacker "
                "wants, the mean over seeds, in percent. Less is better.",
                value_label="success",
            )

    def _curves(self) -> Iterator[Curves]:
        metric = f"{self.part}_accuracy"
        for attack in self.columns:
            groups = [
                Group(called(defence), tuple(self.cells.get((attack, defence), ())), {})
                for defence in self.defences
            ]
            lines = [curve(one, metric) for one in groups]
            if any(len(line.x) > 1 for line in lines):
                yield Curves(
                    title=f"Round by round: {attack or NOBODY}",
                    caption=f"Accuracy on the {PART_NAMES[self.part]} examples. Bands are ± one "
                    "standard deviation over seeds.",
                    lines=off_if_many([line for line in lines if line.x]),
                    y_label="accuracy",
                    percent=True,
                )

    def _detections(self) -> Iterator[Block]:
        rows: list[list[Cell]] = []
        for defence in self.defences:
            for attack in self.columns:
                seen = detection(self.cells.get((attack, defence), ()))
                if seen is None:
                    continue
                out = seen.honest_dropped / seen.honest if seen.honest else None
                shares = (out, seen.recall, seen.precision)
                words = [NONE if x is None else format_number(x, True) for x in shares]
                rows.append([called(defence), attack or NOBODY, *words])
        if not rows:
            return
        yield Table(
            title="Who was dropped",
            name="detection",
            caption="Of defences that weigh or drop clients: dropped is who counts less than half "
            "of what it does in a plain mean, in a round. Recall is the share of hostile clients "
            "that were dropped; precision, of the dropped clients, that of hostile ones.",
            header=["defence", "attack", "honest dropped", "recall", "precision"],
            rows=rows,
        )
        if (heat := self._by_client()) is not None:
            yield heat

    def _by_client(self) -> Heat | None:
        """How often each client was dropped under the worst attack of each defence."""
        columns: dict[str, dict[int, float]] = {}
        marked: list[set[int]] = []
        for defence in self.defences:
            worst = self.worst(defence)
            runs = [] if worst is None else [*self.cells.get((worst, defence), ())][:1]
            found: dict[int, list[bool]] = {}
            for client, out in (pair for run in runs for pair in dropped(run)):
                found.setdefault(client, []).append(out)
            hostile = hostile_of(runs[0]) if runs else None
            if found and hostile is not None:
                columns[called(defence)] = {k: fmean(v) for k, v in found.items()}
                marked.append(hostile)
        clients = sorted({client for one in columns.values() for client in one})
        if not columns or len(clients) > MOST_CLIENTS:
            return None
        bad = set.intersection(*marked)
        return Heat(
            title="Who was dropped, by client",
            name="dropped_by_client",
            caption="The share of its rounds in which a client was dropped, under the worst attack "
            "of each defence, in percent. Of repeats, the first run.",
            values=[[one.get(client) for one in columns.values()] for client in clients],
            row_names=[f"{k} (hostile)" if k in bad else f"{k}" for k in clients],
            column_names=[*columns],
            row_label="client",
            column_label="defence",
            value_label="share of rounds",
            percent=True,
            shares=True,
        )


NOBODY = "no attack"


def called(defence: str) -> str:
    return defence.replace("+", " with ") or "plain mean"


def points(cost: float) -> str:
    return f"{100 * cost:.1f} points".replace("-", "−")


def _by(mean: float, attack: str) -> str:
    return f"{format_number(mean, True)} by {attack}"
