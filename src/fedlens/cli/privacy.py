"""`fedlens privacy`: what privacy would cost, before anything trains, and what was spent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fedlens.cli import arguments
from fedlens.cli.arguments import once_written, print_json, refuse_existing, say, warn
from fedlens.config.experiment import Experiment
from fedlens.config.sections import demand
from fedlens.privacy.events import Sampling
from fedlens.runs.progress import counted, in_rounds, shown
from fedlens.storage.words import count_of

if TYPE_CHECKING:  # it imports numpy
    from fedlens.privacy.protection import Protection

privacy_app = typer.Typer(
    no_args_is_help=True, help="Plan differential privacy, account for it, and attack a run."
)

NEIGHBOURS = {
    "poisson": "one federation has one client more",
    "fixed": "one client holds other data, and their number is the same",
    "all": "one client sends zeros in one of them",
    "cyclic": "one client sends zeros in one of them",
}
PLANNED = "This is a plan: what trains with this noise is an experiment with [privacy]."
DELTA = "1e-5, or 1 / (10 clients) if that is less"
LARGEST = 1_000_000  # rounds: with more the accountant's grid needs too much memory


@privacy_app.command("plan")
def plan_command(
    experiment: Annotated[Path | None, Argument(help="An experiment file, TOML or JSON.")] = None,
    overrides: arguments.Overrides = None,
    noise: Annotated[float | None, Option(help="The noise's standard deviation, in clips.")] = None,
    epsilon: Annotated[float | None, Option(help="Find the noise for this ε.")] = None,
    delta: Annotated[float | None, Option(help=f"[default: {DELTA}]")] = None,
    sampling: Annotated[
        Sampling | None,
        Option(
            help="Each by its own chance, a fixed number, or not drawn at all. [default: poisson]"
        ),
    ] = None,
    clients: Annotated[int | None, Option(help="Without a file: all clients.")] = None,
    per_round: Annotated[int | None, Option(help="Without a file: those in a round.")] = None,
    rounds: Annotated[int | None, Option(help="Without a file: the rounds.")] = None,
    data: arguments.DataFolder = None,
    out: Annotated[
        Path | None, Option(help="A folder for a page with a picture of ε over rounds.")
    ] = None,
    overwrite: Annotated[bool, Option(help="Replace the page of before.")] = False,
    as_json: arguments.Json = False,
) -> None:
    """What ε a run would have, before anything trains."""
    if out is not None:
        refuse_existing(out / "report.html", overwrite=overwrite)
    sizes = {"clients": clients, "per_round": per_round, "rounds": rounds}
    asked = {"noise": noise, "epsilon": epsilon, "delta": delta, "sampling": sampling}
    described = None if experiment is None else Experiment.read(experiment, overrides or [])
    if described is not None:
        from fedlens.config.protection import protection_of, protects_examples

        if any(size is not None for size in sizes.values()):
            keys = "clients.count=, clients.per_round=, rounds="
            raise ValueError(f"{experiment} has its clients and rounds: change them by {keys}")
        if described.clients.count is None and not protects_examples(described):
            raise ValueError(
                f"{experiment}: its data say how many clients there are: add clients.count="
            )
    counted: Protection | None = None
    rule, private = "", described is not None and described.privacy is not None
    if described is not None and described.privacy is not None:
        if given := [name for name, value in asked.items() if value is not None]:
            raise ValueError(
                f"{experiment} has [privacy]: change it by privacy.{given[0]}=, not by an option"
            )
        demand(described.rounds <= LARGEST, "rounds", described.rounds, f"choose 1 to {LARGEST}")
        if protects_examples(described):
            _show(_of_examples(described, data), out, as_json)
            return
        protection, delta = protection_of(described), described.privacy.delta
        if described.aggregation is not None and described.aggregation.secure:
            from fedlens.setup.algorithm import make_algorithm

            # Clients add discrete noise, which costs more than Gaussian noise of its size.
            (release,) = make_algorithm(described).releases(0)
            counted = replace(protection, noise=release.noise)
    else:
        if (noise is None) == (epsilon is None):
            raise ValueError("give one of --noise and --epsilon: the other one follows from it")
        if described is not None:
            total, cohort, length = _sizes(described, sampling)
        elif clients is None or per_round is None or rounds is None:
            raise ValueError(
                "there is no experiment file: give --clients, --per-round and --rounds"
            )
        else:
            total, cohort, length = clients, per_round, rounds
        demand(total >= 1, "clients", total, "at least 1")
        demand(1 <= cohort <= total, "clients per round", cohort, f"choose 1 to {total}")
        demand(1 <= length <= LARGEST, "rounds", length, f"choose 1 to {LARGEST}")
        demand(noise is None or 1e-6 <= noise <= 1e9, "noise", noise, "choose 1e-6 to 1e9")
        if delta is None:
            delta, rule = min(1e-5, 1 / (10 * total)), f" ({DELTA})"
        remedy = f"choose less than 1 / clients = {1 / total:g}"
        demand(0 < delta < 1 / total, "delta", delta, remedy)
        protection = _planned(sampling or "poisson", total, cohort, length, noise or 0.0)
        if epsilon is not None:
            protection = protection.calibrated(epsilon, delta)
    _show(_of_clients(protection, counted or protection, delta, rule, private), out, as_json)


@privacy_app.command("ledger")
def ledger_command(
    file: Annotated[Path, Argument(help="A ledger: the file that privacy.ledger names.")],
    limit: Annotated[
        float | None, Option(help="The most ε that may be spent on each data set.")
    ] = None,
    delta: Annotated[float, Option(help="The δ that ε is for.")] = 1e-5,
    as_json: arguments.Json = False,
) -> None:
    """What was spent on data over all experiments, and the limit of it."""
    from fedlens.privacy.ledger import Ledger, Limit, total

    demand(0 < delta < 1, "delta", delta, "choose a number between 0 and 1")
    if limit is None and not file.exists():
        raise ValueError(f"{file} is not there: name the file that privacy.ledger names")
    ledger = Ledger(file)
    if limit is not None:
        ledger.set_limit(Limit(limit, delta))
    found: list[dict[str, Any]] = []
    for data, unit in dict.fromkeys((one.data, one.unit) for one in ledger.entries):
        mine = [one for one in ledger.entries if (one.data, one.unit) == (data, unit)]
        found.append(
            {
                "data": mine[0].name,
                "digest": data,
                "unit": unit,
                "runs": len({one.run for one in mine}),
                "rounds": len({(one.run, one.round) for one in mine}),
                "epsilon": total(ledger.spent(data, unit), delta),
                "delta": delta,
            }
        )
    most = None if ledger.limit is None else asdict(ledger.limit)
    if as_json:
        print_json({"spent": found, "limit": most})
        return
    for one in found:
        print(
            f"{one['data']} ({one['digest'][:12]}): epsilon {rounded(one['epsilon'])} at delta "
            f"{delta:g} for each {one['unit']}, by {one['rounds']:,} rounds, runs: {one['runs']:,}"
        )
    if not found:
        print("nothing is spent yet")
    if ledger.limit is not None:
        print(f"limit: epsilon {ledger.limit.epsilon:g} at delta {ledger.limit.delta:g}")


@privacy_app.command("audit")
def audit_command(
    experiment: arguments.ExperimentFile,
    overrides: arguments.Overrides = None,
    out: Annotated[
        Path | None, Option(help="The folder of the page. [default: runs/audit-NAME]")
    ] = None,
    shadows: Annotated[int, Option(help="How many shadow runs, 4 or more.")] = 16,
    client: Annotated[int, Option(help="Whose upload is attacked.")] = 0,
    data: arguments.DataFolder = None,
    overwrite: Annotated[bool, Option(help="Replace the page of before.")] = False,
    quiet: arguments.Quiet = False,
    as_json: arguments.Json = False,
) -> None:
    """Attack an experiment: who was in its data, which images come back?"""
    described = Experiment.read(experiment, overrides or [])
    from fedlens.audit import membership
    from fedlens.audit.membership import measure
    from fedlens.audit.page import blocks, measured, rebuilt, verdict
    from fedlens.audit.reconstruction import check_client, reconstructions
    from fedlens.report.page import render_page
    from fedlens.setup import build

    if described.privacy is not None:  # what an audit trains is not published
        described = replace(described, privacy=replace(described.privacy, ledger=None))
    folder = out or Path("runs") / f"audit-{experiment.stem}"
    refuse_existing(folder / "report.html", overwrite=overwrite)
    setup = build(described, data)
    if setup.dataset.multi_label:
        raise ValueError("an audit is of images with one class each: choose another data set")
    membership.check(setup, shadows)
    check_client(setup, client)
    claim, bare = None, None
    if described.privacy is not None:
        with shown(not quiet, in_rounds, "canaries", described.rounds) as watch:
            claim = measure(setup, watch)
    images = []
    try:
        with shown(not quiet, counted, "images from an upload") as bar:
            images = reconstructions(setup, client, bar)
    except ValueError as why:
        warn(f"no images are sought: {why}")
    with shown(not quiet, counted, "rounds of shadow runs") as bar:
        found = membership.audit(setup, shadows, bar)
    if described.privacy is not None:
        plain = build(replace(described, privacy=None), data)
        with shown(not quiet, counted, "the same without [privacy]") as bar:
            bare = membership.audit(plain, shadows, bar)
    with once_written():
        page = render_page(
            f"Audit of {described.dataset.name}",
            f"{shadows} shadow runs of {described.rounds} rounds each",
            blocks(found, images, setup.dataset.classes, claim, bare),
            folder,
        )
    numbers = measured(found)
    broken = claim is not None and not claim.holds
    if as_json:
        found_all = {"membership": numbers, "reconstruction": rebuilt(images), "page": str(page)}
        found_all |= {} if claim is None else {"claim": asdict(claim)}
        print_json(found_all | ({} if bare is None else {"without_privacy": measured(bare)}))
        raise typer.Exit(int(broken))
    if claim is not None:
        print(f"claim       ε of one {claim.unit}: {verdict(claim)}")
    print(
        f"members     {100 * numbers['found_at_0.01']:.1f}% found at 1% false alarms, area "
        f"{numbers['area']:.3f} (by chance: 1% and 0.5)"
    )
    if bare is not None:
        without = measured(bare)
        print(
            f"without     [privacy]: {100 * without['found_at_0.01']:.1f}% found, area "
            f"{without['area']:.3f}"
        )
    print(f"epsilon     of an example: at least {numbers['epsilon_at_least']:.2f} (95%, δ 1e-5)")
    for one in (image for image in images if image.training is None):
        print(
            f"images      of {len(one.labels)}: best {float(one.psnr.max()):.1f} dB, "
            f"{one.right_labels} of {len(one.labels)} labels"
        )
    print("That these attacks find nothing does not mean that there is nothing to find.")
    say(f"report: {page}")
    raise typer.Exit(int(broken))


def _planned(
    sampling: Sampling, clients: int, cohort: int, rounds: int, noise: float
) -> Protection:
    from fedlens.privacy.mechanisms import gaussian
    from fedlens.privacy.protection import Protection

    # "all": every client counts in every round, whoever is drawn.
    cohort = clients if sampling == "all" else cohort
    return Protection(
        noise=noise,
        clip=1.0,
        mechanism=gaussian(),
        sampling=sampling,
        rounds=rounds,
        clients=clients,
        cohort=cohort,
        noise_cohort=cohort,
        population=clients,
    )


@dataclass(frozen=True)
class Plan:
    """What a plan tells, whoever is protected."""

    told: dict[str, Any]  # for JSON
    before: dict[str, str]  # lines above those of ε
    after: dict[str, str]  # and below
    cost: Callable[[int], float]  # ε after so many rounds
    with_ten: Callable[[int], float]  # the same with ten times as many protected
    ten: str
    last: str = ""


def _of_clients(
    protection: Protection, counted: Protection, delta: float, rule: str, private: bool
) -> Plan:
    """A plan for clients; `counted` has the noise that ε is counted by."""
    from fedlens.privacy import accountant
    from fedlens.privacy.mechanisms import Adaptive

    length, total, cohort = protection.rounds, protection.population, protection.noise_cohort
    # If nobody is drawn, more clients hide nobody better.
    more = counted if protection.sampling == "all" else replace(counted, population=10 * total)
    drawn = {
        "poisson": f"each client with probability {cohort / total:.4g} ({cohort:,} expected)",
        "fixed": f"exactly {cohort:,} clients, drawn anew in every round",
        "all": "every client counts in every round, whoever is drawn",
        "cyclic": f"{cohort:,} clients take turns, and come back after {protection.separation}",
    }[protection.sampling]
    (*_, last) = protection.released(length)
    follows = isinstance(protection.clip, Adaptive)
    besides = "the noisy count that moves the clip" if follows else "nothing else"
    return Plan(
        told={
            "epsilon": accountant.epsilon(counted.released(length), delta),
            "delta": delta,
            "noise": protection.noise,
            "unit": "client",
            "sampling": protection.sampling,
            "neighbours": last.neighbours,
            "rounds": length,
        },
        before={
            "noise": f"{protection.noise} clips (standard deviation, on the sum of a round)",
            "delta": f"{delta:.4g}{rule}",
            "clients": f"{total:,}",
            "sampling": f"{protection.sampling}: {drawn}",
        },
        after={
            "neighbours": f"two federations, hard to tell apart: {NEIGHBOURS[protection.sampling]}",
            "covers": f"one sum of clipped updates a round, in equal shares, and {besides}",
        },
        cost=lambda rounds: accountant.epsilon(counted.released(rounds), delta),
        with_ten=lambda rounds: accountant.epsilon(more.released(rounds), delta),
        ten=f"{10 * total:,} clients, as many in a round, and the same delta",
        last="" if private else PLANNED,
    )


def _of_examples(described: Experiment, data: Path | None) -> Plan:
    """A plan for the examples of clients: who holds how many is read from the data."""
    from fedlens.setup import planned_for_examples

    given = described.privacy
    assert given is not None
    found, more = planned_for_examples(described, data)
    length, turns = found.rounds, found.turns(found.rounds)
    spread, most = found.spread(length, given.delta), int(turns.max())
    rates, steps = _ends(found.rates), _ends(found.steps)
    return Plan(
        told={
            "epsilon": spread["most"],
            "delta": given.delta,
            "noise": found.noise,
            "unit": "example",
            "sampling": "poisson",
            "neighbours": "add-remove",
            "rounds": length,
            "by_client": spread,
        },
        before={
            "noise": f"{found.noise} clips (standard deviation, on the sum of a batch)",
            "delta": f"{given.delta:.4g}",
            "clients": f"{len(turns):,}, each in {int(turns.min()):,} to {most:,} rounds",
            "sampling": f"poisson: each example with probability {rates} in a batch",
            "steps": f"{steps} of a client in a round",
        },
        after={
            "by client": f"{rounded(spread['least'])} the least, {rounded(spread['median'])} the "
            "median; above is the most",
            "neighbours": "two data sets of a client, hard to tell apart: one has an example more",
            "covers": "the uploads of each client, also against the server; not how many examples "
            "it holds",
        },
        cost=lambda rounds: found.epsilon(rounds, given.delta),
        with_ten=lambda rounds: more.epsilon(rounds, given.delta),
        ten="10 times the examples of each client, and the same delta",
    )


def _ends(column: Any) -> str:
    low, high = (f"{float(end):,.4g}" for end in (column.min(), column.max()))
    return low if low == high else f"{low} to {high}"


def _show(plan: Plan, out: Path | None, as_json: bool) -> None:
    length = plan.told["rounds"]
    page = None if out is None else _picture(plan, out)
    if as_json:
        print_json(plan.told | ({} if page is None else {"page": str(page)}))
        return
    lines = list(plan.before.items())
    for part in sorted({math.ceil(length / 4), math.ceil(length / 2), length}):
        after = f"after {count_of(part, 'round')}"
        lines.append(("epsilon", f"{rounded(plan.cost(part))} {after}"))
    lines.append(("10 times", f"{rounded(plan.with_ten(length))} with {plan.ten}"))
    for name, said in [*lines, *plan.after.items()]:
        print(f"{name:<12}{said}")
    if page is not None:
        say(f"report      {page}")
    if plan.last:
        print(plan.last)


def _picture(plan: Plan, out: Path) -> Path:
    """A page with ε over rounds, and over those of ten times as many."""
    from fedlens.report.blocks import Curves, Line, Table
    from fedlens.report.page import render_page

    length = plan.told["rounds"]
    rounds = sorted({max(round(length * part / 40), 1) for part in range(1, 41)})

    def line(name: str, cost: Callable[[int], float]) -> Line:
        values = [cost(one) for one in rounds]
        return Line(name, rounds, [v if math.isfinite(v) else None for v in values])

    curves = Curves(
        title="ε over rounds",
        caption=f"An upper bound, at δ = {plan.told['delta']:g}. 10 times is {plan.ten}.",
        lines=[line("as planned", plan.cost), line("10 times", plan.with_ten)],
        y_label="ε",
    )
    facts = plan.before | {"epsilon": rounded(plan.told["epsilon"])} | plan.after
    title = f"A plan of privacy for each {plan.told['unit']}"
    with once_written():
        rows = [list(one) for one in facts.items()]
        table = Table(title="What is planned", header=["", "planned"], rows=rows)
        return render_page(title, f"{length:,} rounds", [curves, table], out)


def _sizes(described: Experiment, sampling: str | None) -> tuple[int, int, int]:
    """The clients, those in a round and the rounds of an experiment."""
    assert described.clients.count is not None
    keys = {"reporting": described.reporting, "clients.devices": described.clients.devices}
    given = [key for key, value in keys.items() if value is not None]
    if sampling != "all" and given:
        raise ValueError(
            f'sampling is "{sampling or "poisson"}": with {given[0]}, who takes part is more than '
            "a draw, and may depend on the data: add --sampling all"
        )
    return described.clients.count, described.clients.cohort, described.rounds


def rounded(epsilon: float) -> str:
    """Rounded up, as an upper bound is."""
    return f"{math.ceil(100 * epsilon) / 100:.2f}" if math.isfinite(epsilon) else "infinite"
