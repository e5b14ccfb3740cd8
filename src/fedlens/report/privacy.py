"""The privacy of runs: ε in words, by round and beside accuracy, and what has no guarantee."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fedlens.report.blocks import Block, Curves, Line, Table
from fedlens.report.groups import Group, by_cost, curve, off_if_many
from fedlens.runs.records import PART_NAMES, Run, is_number, list_in, number, table_in

NO_HELP = "none against the server: it sees the update, and adds the noise"


def _shown(epsilon: float | None) -> str:
    """Rounded up, as an upper bound is."""
    return "infinite" if epsilon is None else f"{math.ceil(100 * epsilon) / 100:.2f}"


def sums_line(run: Run) -> str:
    """What the server of a run saw of its sites, if it did not see their updates."""
    if table_in(run.experiment, "aggregation").get("secure") is not True:
        return ""
    return "By secure sums the server saw the sum of each round's updates, and no update"


def privacy_line(run: Run) -> str:
    """The ε of a run in a line; "" if it is not private."""
    told = table_in(run.summary, "privacy")
    if not told:
        return ""
    spent, delta, size = (number(told.get(key)) for key in ("epsilon", "delta", "clients"))
    shown = "without bound" if spent is None else f"at most {_shown(spent)}"
    how = told.get("mechanism")
    how = f"{how.get('name') if isinstance(how, dict) else how} noise"
    if told.get("unit") == "example":
        how += " at its client, so also against the server"
    elif sums_line(run):
        how += ", of which each site added a part, so also against the server"
    how += f", {told.get('sampling')} sampling, {told.get('neighbouring')} neighbours"
    line = f"ε is {shown} at δ = {delta or 0:g} for each {told.get('unit')} ({how})"
    if is_number(told.get("noise_cohort")):
        line += f", of a federation of {size or 0:,.0f} with {told['noise_cohort']:,} in a round"
    return line


def _epsilons(run: Run) -> list[float | None]:
    return [number(row.get("epsilon")) for row in run.rounds]


def privacy_blocks(groups: Sequence[Group], part: str) -> Iterator[Block]:
    """ε by round, accuracy by ε if there are several groups, and what leaves a single run."""
    private = [one for one in groups if any(run.has("epsilon") for run in one.runs)]
    if private:
        yield Curves(
            title="Privacy spent",
            name="epsilon",
            caption="ε of all rounds so far, an upper bound, for the δ of each run.",
            lines=off_if_many([curve(one, "epsilon") for one in private]),
            y_label="ε",
        )
    lines = [
        line
        for one in private
        if len(groups) > 1 and (line := by_cost(one, f"{part}_accuracy", _epsilons)).x
    ]
    ends = {line.x[-1]: line.y[-1] for line in lines}
    if len({_shown(x) for x in ends}) == len(lines) > 1:  # an ε each, so that they have an order
        lines.append(
            Line("at the end", sorted(ends), [ends[x] for x in sorted(ends)], style="dotted")
        )
    if lines:
        yield Curves(
            title="Accuracy by ε",
            name="accuracy_by_epsilon",
            caption=f"{PART_NAMES[part].capitalize()} accuracy against the ε spent for it.",
            lines=off_if_many(lines),
            x_label="ε",
            y_label=f"{PART_NAMES[part]} accuracy",
            percent=True,
        )
    runs = [run for one in groups for run in one.runs]
    if len(runs) == 1 and (told := table_in(runs[0].summary, "privacy")):
        unit = told.get("unit")
        if unit == "example":
            what, follow = "each upload of a client, by steps with noise", "uploads"
        else:
            what, follow = "the noisy sum of clipped updates", "sums"
        rows = [
            [what, privacy_line(runs[0])],
            ["the model, and all from it", f"the same: it follows from the {follow}"],
        ]
        if spread := table_in(told, "by_client"):
            shown = (f"{name} {_shown(number(spread.get(name)))}" for name in ("least", "median"))
            rows[0][1] += f"; of other clients less: {', '.join(shown)}"
        if unit == "client":
            hidden = "none by noise alone; secure sums hide it among those of the others"
            help = hidden if sums_line(groups[0].runs[0]) else NO_HELP
            rows.append(["each client's update, to the server", help])
        if told.get("count_noise"):
            rows.append(["label counts of clients, with noise", "the same: they have a share"])
        if table_in(told, "clip"):
            rows.append(["the clip, and the noisy count that moves it", "the same: it has a share"])
        rows += [[str(one), "none"] for one in list_in(told, "not_covered")]
        yield Table(
            title="What leaves, and under which guarantee",
            caption=f"Training losses, and whatever else a {unit} measures, are not recorded. What "
            "has no guarantee is known to whoever has the run folder, so it is not for others.",
            header=["what", "guarantee"],
            rows=rows,
        )
