"""`fedlens privacy`: what privacy would cost, before anything trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.arguments import Json, Overrides, print_json
from fedlens.cli.audit import audit_command
from fedlens.config.experiment import Experiment
from fedlens.config.sections import demand
from fedlens.privacy.events import Neighbours, Release, Sampling

privacy_app = typer.Typer(no_args_is_help=True, help="Plan differential privacy, and attack a run.")

privacy_app.command("audit")(audit_command)

NEIGHBOURS = {
    "poisson": "one federation has one client more",
    "fixed": "one client holds other data, and their number is the same",
    "all": "one client sends zeros in one of them",
}
DELTA = "1e-5, or 1 / (10 clients) if that is less"
LARGEST = 1_000_000  # rounds: with more the accountant's grid needs too much memory


@privacy_app.command("plan")
def plan_command(
    experiment: Annotated[
        Path | None, typer.Argument(help="An experiment file, TOML or JSON.")
    ] = None,
    overrides: Overrides = None,
    noise: Annotated[
        float | None, typer.Option(help="The noise's standard deviation, in clips.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Find the noise for this ε.")] = None,
    delta: Annotated[float | None, typer.Option(help=f"[default: {DELTA}]")] = None,
    sampling: Annotated[
        Sampling, typer.Option(help="Each by its own chance, a fixed number, or not drawn at all.")
    ] = "poisson",
    clients: Annotated[int | None, typer.Option(help="Without a file: all clients.")] = None,
    per_round: Annotated[int | None, typer.Option(help="Without a file: those in a round.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Without a file: the rounds.")] = None,
    as_json: Json = False,
) -> None:
    """What ε a run would have, before anything trains."""
    if (noise is None) == (epsilon is None):
        raise ValueError("give one of --noise and --epsilon: the other one follows from it")
    sizes = (clients, per_round, rounds)
    if experiment is not None:
        if any(size is not None for size in sizes):
            keys = "clients.count=, clients.per_round=, rounds="
            raise ValueError(f"{experiment} has its clients and rounds: change them by {keys}")
        total, cohort, length = _sizes(experiment, overrides or [], sampling)
    elif clients is None or per_round is None or rounds is None:
        raise ValueError("there is no experiment file: give --clients, --per-round and --rounds")
    else:
        total, cohort, length = clients, per_round, rounds
    demand(total >= 1, "clients", total, "at least 1")
    demand(1 <= cohort <= total, "clients per round", cohort, f"choose 1 to {total}")
    demand(1 <= length <= LARGEST, "rounds", length, f"choose 1 to {LARGEST}")
    demand(noise is None or 1e-6 <= noise <= 1e9, "noise", noise, "choose 1e-6 to 1e9")
    rule = "" if delta is not None else f" ({DELTA})"
    if delta is None:
        delta = min(1e-5, 1 / (10 * total))
    demand(0 < delta < 1 / total, "delta", delta, f"choose less than 1 / clients = {1 / total:g}")

    from fedlens.privacy import accountant  # imports numpy

    def events(noise: float, rounds: int = length, clients: int = total) -> list[Release]:
        rate = 1.0 if sampling == "all" else cohort / clients
        neighbours: Neighbours = "replace" if sampling == "fixed" else "add-remove"
        return [Release(noise, sampling, rate, neighbours, rounds)]

    if noise is None:
        assert epsilon is not None
        # Rounded up, so that the noise that is shown is enough.
        noise = math.ceil(1e4 * accountant.noise_for(epsilon, delta, events)) / 1e4
    found = accountant.epsilon(events(noise), delta)
    if as_json:
        print_json(
            {
                "epsilon": found,
                "delta": delta,
                "noise": noise,
                "unit": "client",
                "sampling": sampling,
                "neighbours": events(noise)[0].neighbours,
                "rounds": length,
            }
        )
        return
    drawn = {
        "poisson": f"each client with probability {cohort / total:.4g} ({cohort:,} expected)",
        "fixed": f"exactly {cohort:,} clients, drawn anew in every round",
        "all": "every client counts in every round, whoever is drawn",
    }[sampling]
    print(f"noise       {noise} clips (standard deviation, on the sum of a round)")
    print(f"delta       {delta:.4g}{rule}")
    print(f"clients     {total:,}")
    print(f"sampling    {sampling}: {drawn}")
    for part in sorted({math.ceil(length / 4), math.ceil(length / 2), length}):
        cost = accountant.epsilon(events(noise, part), delta)
        print(f"epsilon     {_shown(cost)} after {part:,} round{'' if part == 1 else 's'}")
    ten = _shown(accountant.epsilon(events(noise, clients=10 * total), delta))
    print(f"10 times    {ten} with {10 * total:,} clients, as many in a round, and the same delta")
    print(f"neighbours  two federations, hard to tell apart: {NEIGHBOURS[sampling]}")
    print("covers      one sum of clipped updates a round, in equal shares, and nothing else")
    print("This is a plan: what trains with this noise is an experiment with [privacy].")


def _sizes(file: Path, overrides: list[str], sampling: str) -> tuple[int, int, int]:
    """The clients, those in a round and the rounds of an experiment."""
    described = Experiment.read(file, overrides)
    if described.clients.count is None:
        raise ValueError(f"{file}: its data say how many clients there are: add clients.count=")
    keys = {"reporting": described.reporting, "clients.devices": described.clients.devices}
    given = [key for key, value in keys.items() if value is not None]
    if sampling != "all" and given:
        raise ValueError(
            f'sampling is "{sampling}": with {given[0]}, who takes part is more than a draw, and '
            "may depend on the data: add --sampling all"
        )
    return described.clients.count, described.clients.cohort, described.rounds


def _shown(epsilon: float) -> str:
    """Rounded up, as an upper bound is."""
    return f"{math.ceil(100 * epsilon) / 100:.2f}" if math.isfinite(epsilon) else "infinite"
