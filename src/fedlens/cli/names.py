"""`fedlens list`, `fedlens explain` and `fedlens schema`: what an experiment can have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import click
from typer import Argument, Option

from fedlens.cli import completion
from fedlens.cli.arguments import refuse_existing
from fedlens.config.names import KINDS

WORDS = {
    "algorithms": "What clients and server do in a round; several can be combined.",
    "models": "Networks; a function of your own is named MODULE:NAME.",
    "partitions": "How examples are divided among clients.",
    "devices": "How fast clients' devices are, on a virtual clock.",
    "engines": "How clients are trained: one by one, side by side, by processes, on a cluster.",
    "attacks": "What clients that attack do to their data, or to what they send.",
    "losses": "What clients minimise.",
    "metrics": "What is measured besides accuracy.",
    "optimizers": "How clients take their steps.",
    "schedules": "How a number changes from round to round.",
    "mechanisms": "How the noise of privacy goes together over rounds.",
    "clips": "How long an update may be, with privacy, if that changes.",
    "anneals": "How the learning rate changes within a round.",
    "datasets": "Images with labels: published sets, and forms of your own.",
    "recipes": "Tables and figures of papers, for fedlens reproduce.",
}


def list_command(
    kind: Annotated[
        str | None, Argument(click_type=click.Choice([*KINDS]), help=f"one of {', '.join(KINDS)}")
    ] = None,
    long: Annotated[bool, Option("--long", help="With options, and what each is.")] = False,
) -> None:
    """Print the names that an experiment can use, and what each is.

    Without a kind: what can be listed.
    """
    if kind is None:
        for name in KINDS:
            print(f"{name.ljust(max(map(len, KINDS)))}  {WORDS[name]}")
        return
    from fedlens.config.explained import choices, in_a_line

    found = choices(KINDS[kind])
    width = max(map(len, found))
    for name, choice in found.items():
        records = _measured(name, whole=long) if kind == "recipes" else ""
        if long:
            print(f"{in_a_line(name, choice)}{records}\n    {choice.words}")
        else:
            print(f"{name.ljust(width)}  {choice.words}{records}")


def _measured(recipe: str, whole: bool = False) -> str:
    """How much of a recipe the checkout has stored runs of, if commands run in its folder.

    With `whole`, complete results also have their counts, and runs with other settings are listed.
    """
    from fedlens.recipes.store import STORE, file_of, read_index

    index = read_index(STORE)
    others = [str(file_of(STORE, name)) for name, one in index.items() if one.recipe == recipe]
    if recipe not in index:
        return ""
    known = index[recipe]
    count = len(known.runs)
    much = [f"{count} run{'s' * (count != 1)}"]
    if whole or known.experiments < known.of:
        much.insert(0, f"{known.experiments} of {known.of} experiment{'s' * (known.of != 1)}")
    if known.seeds < known.of_seeds:
        much.append(f"{known.seeds} of {known.of_seeds} seeds")
    if known.shorter:
        much.append(f"{known.shorter} with fewer rounds")
    others = [other for other in others if other != str(file_of(STORE, recipe))]
    also = f"; with other settings: {', '.join(others)}" if whole and others else ""
    return f"  measured: {STORE} ({', '.join(much)}){also}"


def explain_command(
    key: Annotated[
        str,
        Argument(
            help="A key of an experiment, as local.lr, a section, or a name: fedprox ...",
            autocompletion=completion.keys,
        ),
    ],
) -> None:
    """Explain a key of an experiment, or a name that it can use."""
    from fedlens.config.explained import explain

    for line in explain(key):
        print(line)


def schema_command(
    out: Annotated[Path | None, Option(help="The file. [default: print it]")] = None,
    overwrite: Annotated[bool, Option(help="Replace the file that is there.")] = False,
) -> None:
    """Write the JSON Schema of experiment files, for editors."""
    from fedlens.config.explained import schema
    from fedlens.storage.files import write_atomically

    text = json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
    if out is None:
        print(text, end="")
        return
    if out.is_file():
        refuse_existing(out, overwrite=overwrite)
    write_atomically(out, text.encode())
    print(f"schema: {out}")
