"""`fedlens schema` and `fedlens explain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli import completion
from fedlens.cli.arguments import refuse_existing


def schema_command(
    out: Annotated[Path | None, typer.Option(help="The file. [default: print it]")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the file that is there.")] = False,
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


def explain_command(
    key: Annotated[
        str,
        typer.Argument(
            help="A key of an experiment, as local.lr, a section, or a name: fedprox ...",
            autocompletion=completion.keys,
        ),
    ],
) -> None:
    """Explain a key of an experiment, or a name that it can use."""
    from fedlens.config.explained import explain

    for line in explain(key):
        print(line)
