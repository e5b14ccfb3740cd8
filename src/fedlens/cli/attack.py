"""`fedlens attack`: every attack against every defence."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from fedlens.cli import arguments
from fedlens.cli.arguments import once_written, print_json, print_table, say
from fedlens.cli.run import swept
from fedlens.config.experiment import Experiment, Named
from fedlens.config.names import ALGORITHMS, ATTACKS, DEFENCES
from fedlens.config.options import did_you_mean

ATTACKED = "sign-flip,ipm,alie,mimic"
DEFENDED = "median,trimmed-mean,krum,geometric-median,centred-clipping"
SHARE = 0.2  # of the clients that are hostile, if the file has no attack


def attack_command(
    experiment: arguments.ExperimentFile,
    overrides: arguments.Overrides = None,
    attacks: Annotated[str, Option(help="Names, with commas: see fedlens list attacks.")] = (
        ATTACKED
    ),
    defences: Annotated[
        str, Option(help="Names, with commas; krum+nnm has nnm before krum.")
    ] = DEFENDED,
    seeds: Annotated[int, Option(help="Runs of each, with this many seeds.")] = 3,
    out: Annotated[
        Path | None, Option(help="The folder of the runs and the page. [default: runs/attack-NAME]")
    ] = None,
    overwrite: Annotated[bool, Option(help="Replace runs that are there.")] = False,
    data: arguments.DataFolder = None,
    ray_address: arguments.RayAddress = None,
    quiet: arguments.Quiet = False,
    as_json: arguments.Json = False,
) -> None:
    """Run attacks beside defences: what each keeps, and costs."""
    if seeds < 1:
        raise ValueError(f"--seeds is {seeds}: choose 1 or more")
    base = Experiment.read(experiment, overrides or [])
    cells = cells_of(base, _listed(attacks, "--attacks"), _listed(defences, "--defences"))
    folder = out or Path("runs") / f"attack-{experiment.stem}"
    points = {
        _name(attack, defence, seed): replace(made, seed=seed)
        for (attack, defence), made in cells.items()
        for seed in range(base.seed, base.seed + seeds)
    }
    swept(points, folder, data, ray_address, quiet, overwrite)
    from fedlens.report.attacks import Board
    from fedlens.report.page import render_page
    from fedlens.runs.records import read

    with once_written():
        own = range(base.seed, base.seed + seeds)
        board = Board(
            {
                (attack, defence): [read(folder / _name(attack, defence, s)) for s in own]
                for attack, defence in cells
            }
        )
        page = render_page(
            f"Attacks on {base.dataset.name}",
            board.verdict(),
            board.blocks(),
            folder,
            progress=not quiet,
        )
    if as_json:
        print_json(board.plain() | {"page": str(page)})
        return
    print_table(*board.rows())
    say(board.verdict())
    say(f"report: {page}")


def cells_of(
    base: Experiment, attacks: Sequence[str], defences: Sequence[str]
) -> dict[tuple[str, str], Experiment]:
    """The experiment of each attack, or none (""), against each defence, or none ("").

    What the file says of an attack or a defence is kept. Other defences are told how many clients
    are hostile, and other attacks have as many as the file's, or a fifth.
    """
    from fedlens.attacks import Attack

    options = {} if base.attack is None else base.attack.options
    named: dict[str, Named | None] = {"": None}
    for name in attacks:
        told = {key: options[key] for key in ("clients", "redraw") if key in options}
        taken = inspect.signature(ATTACKS.find(name)).parameters
        new = Named(name, {"clients": SHARE, **{k: v for k, v in told.items() if k in taken}})
        named[name] = base.attack if base.attack and base.attack.name == name else new
    clients = base.clients
    if clients.count is None:
        raise ValueError("the data say how many clients there are: add clients.count=")
    some: Any = next((one for one in named.values() if one is not None), None)
    made: Attack = ATTACKS.make(some, of=Attack)
    in_a_round = math.ceil(made.count(clients.count) * clients.cohort / clients.count)
    others = tuple(one for one in base.algorithm if one.name not in DEFENCES)
    given = {one.name: one for one in base.algorithm if one.name in DEFENCES}
    papers = {
        words: tuple(
            given.get(name, _told(name, in_a_round, clients.cohort))
            for name in words.split("+")
            if name
        )
        for words in ("", *defences)
    }
    return {
        (attack, defence): replace(base, attack=how, algorithm=(*others, *own))
        for defence, own in papers.items()
        for attack, how in named.items()
    }


def _told(name: str, hostile: int, clients: int) -> Named:
    """A defence that expects so many hostile clients in a round."""
    options = inspect.signature(ALGORITHMS.find(name)).parameters
    if name == "trimmed-mean":
        return Named(name, {"share": min(hostile / clients, 0.49)})
    return Named(name, {"byzantine": hostile} if "byzantine" in options else {})


def _listed(words: str, option: str) -> list[str]:
    """Names from a list with commas, each known and none twice."""
    names = [word.strip() for word in words.split(",") if word.strip()]
    known: Mapping[str, Any] = ATTACKS if option == "--attacks" else dict.fromkeys(DEFENCES)
    for name in [part for one in names for part in one.split("+")]:
        if name not in known:
            raise ValueError(f"{option} has {name!r}: {did_you_mean(name, sorted(known))}")
    if not names or len({*names}) < len(names):
        raise ValueError(f"{option} is {words!r}: name one or more, each once")
    return names


def _name(attack: str, defence: str, seed: int) -> str:
    return f"{attack or 'no-attack'},{defence or 'no-defence'},seed={seed}"
