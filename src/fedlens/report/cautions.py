"""What a reader of a run's accuracy must also know: weak classes, collapses, clients left behind.

Page, terminal, model card and `predict` all say what is decided here.

"Far" is `FAR`, 20 points: it separates a class or a client that the model fails from one that is
merely harder, and a collapse from the ups and downs of clients that differ. A share is far below
another only if the upper end of its 95% interval (Wilson's) still is, so that three right answers
in ten, say, are not called weak beside an accuracy of 80%: by chance they may be six.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, harmonic_mean
from typing import Any, NamedTuple

from fedlens.evaluation.intervals import wilson
from fedlens.evaluation.measures import measure_name
from fedlens.report.holdings import client_names, matrix, measured
from fedlens.report.numbers import format_number
from fedlens.report.personal import shares
from fedlens.runs.records import PART_NAMES, Run

FAR = 0.2
NAMED = 3  # classes or clients that a sentence names at most, the worst first


class Caution(NamedTuple):
    """Something that accuracy hides, in a few words and in a sentence."""

    short: str
    text: str


def cautions(run: Run) -> list[Caution]:
    """What the accuracy of a run hides; empty if nothing is known, or nothing stands out."""
    found = [weak_classes(run.evaluation, run.manifest.get("classes") or ()), _left_behind(run)]
    if run.summary.get("collapsed") is True and run.status != "diverged":
        found[0] = Caution("one class for all", "Its model gives every image the same class.")
    return [one for one in (*found, _collapse(run), _better_alone(run)) if one is not None]


def weak_classes(evaluation: Mapping[str, Any], classes: Sequence[str]) -> Caution | None:
    """The classes whose recall is far below the accuracy of the evaluated model."""
    confusion = matrix(evaluation.get("confusion"))
    if confusion is None or not len(confusion) == len(classes) == confusion.shape[1] - 1:
        return None
    hits, sizes = confusion.diagonal().tolist(), confusion.sum(1).tolist()
    accuracy = sum(hits) / max(sum(sizes), 1)
    shares = {str(c): (hit / n, n) for c, hit, n in zip(classes, hits, sizes, strict=False) if n}
    weak = {name: share for name, share in shares.items() if _is_far_below(*share, accuracy)}
    if not weak:
        return None
    part = PART_NAMES.get(str(evaluation.get("part")), "")
    return Caution(
        f"weak at {_named(weak)}",
        f"It is weak at {_measured(weak, 'recall')}: of all {part} images it recognises "
        f"{format_number(accuracy, True)}.",
    )


def _left_behind(run: Run) -> Caution | None:
    """The clients whose accuracy is far below the mean of the others."""
    shares = _of_clients(run, "federated") or _of_clients(run, "client_accuracy")
    total, behind = sum(share for share, _ in shares.values()), {}
    for name, (share, tested) in shares.items():
        if len(shares) > 1 and _is_far_below(share, tested, (total - share) / (len(shares) - 1)):
            behind[name] = share, tested
    if not behind:
        return None
    others = [share for name, (share, _) in shares.items() if name not in behind]
    rest = f", the others {format_number(fmean(others), True)} on average" if others else ""
    is_one = "is" if len(behind) == 1 else "are"
    text = f"Left behind {is_one} {_measured(behind, 'accuracy')}{rest}."
    return Caution(f"{_named(behind)} left behind", text)


def _collapse(run: Run) -> Caution | None:
    """The rounds in which accuracy was far below its best until then."""
    confusion = matrix(run.evaluation.get("confusion"))
    if confusion is None:
        return None
    curve = run.curve(measure_name(str(run.evaluation.get("part")), "accuracy"))
    points = [(y, round) for round, y in zip(*curve, strict=True) if 0 <= y <= 1]
    best, falls = (0.0, 0), []
    for value, round in points:
        if _is_far_below(value, int(confusion.sum()), best[0]):
            falls.append((value, round, best))
        best = max(best, (value, -round))
    if not falls:
        return None
    value, at, (before, since) = min(falls)
    low, high = (format_number(x, True) for x in (value, before))
    many = f" in {len(falls)} evaluations, rounds {falls[0][1]} to {falls[-1][1]}"
    end = ", and did not recover" if falls[-1][1] == points[-1][1] else ""
    return Caution(
        f"fell to {low} in round {at}",
        f"Accuracy fell on the way{many if len(falls) > 1 else ''}: to {low} in round {at}, after "
        f"{high} in round {-since}{end}.",
    )


def _better_alone(run: Run) -> Caution | None:
    """Whether the clients, or some, get better models by training alone, as far as measured."""
    federated, alone = _of_clients(run, "federated"), _of_clients(run, "local_only")
    both = [name for name in federated if name in alone]
    if not both:
        return None
    ours, own = (fmean(shares[name][0] for name in both) for shares in (federated, alone))
    count = len(both) * harmonic_mean([alone[name][1] for name in both])  # as certain as this many
    better = {
        name: (alone[name][0], federated[name][0])
        for name in both
        if wilson(*alone[name])[0] > federated[name][0]
    }
    if wilson(own, round(count))[0] > ours:
        whose, on_average = "the clients", " on average"
    elif better:
        whose, on_average = _named(better), "" if len(better) == 1 else " on average"
        own, ours = (fmean(side) for side in zip(*better.values(), strict=True))
    else:
        return None
    return Caution(
        "better alone" if on_average else f"{whose} better alone",
        f"Trained alone, {whose} would do better: "
        f"{format_number(own, True)}{on_average}, {format_number(ours, True)} with this model.",
    )


def _of_clients(run: Run, key: str) -> dict[str, tuple[float, int]]:
    """The accuracies that were recorded as `key` and the number of examples, by client.

    Clients that never took part are left out.
    """
    found, tested, new = (shares(run, name) for name in (key, "client_tested", "unseen"))
    if len(found) != len(tested):
        return {}
    known = (found >= 0) & (found <= 1) & (tested > 0)
    known &= new != 1 if len(new) == len(known) else True
    names = client_names(run) or [f"client {k}" for k in range(len(known))]
    counted = zip(names, found.tolist(), tested.tolist(), known.tolist(), strict=False)
    return {name: (share, int(count)) for name, share, count, is_known in counted if is_known}


def _is_far_below(share: float, count: int, other: float) -> bool:
    return wilson(share, count)[1] < other - FAR


def _named(shares: Mapping[str, tuple[float, float]]) -> str:
    """The worst of these by name, and the number of the others."""
    return _joined(sorted(shares, key=lambda name: shares[name][0]))


def _measured(shares: Mapping[str, tuple[float, int]], what: str) -> str:
    """The worst of these with their shares and intervals, and the number of the others."""
    words = []
    for name, (share, count) in sorted(shares.items(), key=lambda one: one[1][0]):
        value, around = measured(share, count)
        words.append(f"{name} ({what} {value}, 95% interval {around}, {count:,} images)")
    return _joined(words)


def _joined(words: Sequence[str]) -> str:
    more = [f"{len(words) - NAMED} more"] if len(words) > NAMED else []
    *most, last = [*words[:NAMED], *more]
    return f"{', '.join(most)} and {last}" if most else last
