"""`fedlens bench`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fedlens.cli.arguments import Json, Quiet, print_json


def bench_command(
    workloads: Annotated[
        list[str] | None, typer.Argument(help="pfl-cnn, hsu-cnn, mcmahan-cnn (these if none) ...")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="auto, sequential, stacked, processes or ray")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, fp32, tf32, bf16 or fp64")] = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how fast rounds are on this machine."""
    from fedlens.runs.bench import COMMON, bench, named, table

    names = workloads or COMMON
    for name in names:
        named(name)  # raises on a wrong name before any measurement

    def say(stage: str) -> None:
        if not quiet:
            print(stage, file=sys.stderr, flush=True)

    found = [
        bench(name, engine=engine, device=device, precision=precision, watch=say) for name in names
    ]
    if as_json:
        print_json(found[0] if len(found) == 1 else found)
        return
    first = found[0]
    print(f"engine {first['engine']}, {first['device']}, {first['precision']}, ", end="")
    print(f"median of {first['repeats']}; the limit is {first['limit_flops'] / 1e9:,.0f} GFLOP/s")
    print(table(found))
