"""`fedlens privacy audit`: what an attacker learns, measured on one's own data."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.arguments import (
    DataFolder,
    ExperimentFile,
    Json,
    Overrides,
    Quiet,
    once_written,
    print_json,
    refuse_existing,
    warn,
)
from fedlens.runs.progress import counted, in_rounds, shown
from fedlens.storage.reading import printable


def audit_command(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the page. [default: runs/audit-NAME]")
    ] = None,
    shadows: Annotated[int, typer.Option(help="How many shadow runs, 4 or more.")] = 16,
    client: Annotated[int, typer.Option(help="Whose upload is attacked.")] = 0,
    data: DataFolder = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the page of before.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Attack an experiment: who was in its data, which images come back?"""
    from fedlens.audit import membership
    from fedlens.audit.canaries import measure
    from fedlens.audit.page import blocks, measured, rebuilt, verdict
    from fedlens.audit.reconstruction import reconstructions
    from fedlens.config.experiment import Experiment
    from fedlens.report.page import render_page
    from fedlens.setup import build

    described = Experiment.read(experiment, overrides or [])
    if described.privacy is not None:  # what an audit trains is not published
        described = replace(described, privacy=replace(described.privacy, ledger=None))
    folder = out or Path("runs") / f"audit-{experiment.stem}"
    membership.check_shadows(shadows)
    refuse_existing(folder / "report.html", overwrite=overwrite)
    setup = build(described, data)
    images = []
    if setup.network.buffers:
        warn('no images are sought: the attack needs a model without batch norm (norm = "group")')
    else:
        with shown(not quiet, counted, "images from an upload") as bar:
            images = reconstructions(setup, client, bar)
    claim = None
    if described.privacy is not None:
        with shown(not quiet, in_rounds, "canaries", described.rounds) as watch:
            claim = measure(setup, watch)
    with shown(not quiet, counted, "rounds of shadow runs") as bar:
        found = membership.audit(setup, shadows, bar)
    with once_written():
        page = render_page(
            f"Audit of {described.dataset.name}",
            f"{shadows} shadow runs of {described.rounds} rounds each",
            blocks(found, images, setup.dataset.classes, claim),
            folder,
        )
    numbers = measured(found)
    broken = claim is not None and not claim.holds
    if as_json:
        found_all = {"membership": numbers, "reconstruction": rebuilt(images), "page": str(page)}
        print_json(found_all | ({} if claim is None else {"claim": asdict(claim)}))
        raise typer.Exit(int(broken))
    if claim is not None:
        print(f"claim       ε of one {claim.unit}: {verdict(claim)}")
    print(
        f"members     {100 * numbers['found_at_0.01']:.1f}% found at 1% false alarms, area "
        f"{numbers['area']:.3f} (by chance: 1% and 0.5)"
    )
    print(f"epsilon     of an example: at least {numbers['epsilon_at_least']:.2f} (95%, δ 1e-5)")
    for one in images:
        print(
            f"images      of {len(one.labels)}: best {float(one.psnr.max()):.1f} dB, "
            f"{one.right_labels} of {len(one.labels)} labels"
        )
    print("That these attacks find nothing does not mean that there is nothing to find.")
    print(f"report: {printable(str(page))}")
    raise typer.Exit(int(broken))
