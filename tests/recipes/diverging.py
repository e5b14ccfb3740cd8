"""Results of a recipe in which a run diverged."""

from dataclasses import replace

from fedlens.recipes.recipe import Results


def diverged(results: Results, cell: str) -> Results:
    """The same, but that the run of a cell diverged."""
    (run,) = results.runs[cell]
    ended = replace(run, summary=run.summary | {"status": "diverged"})
    return Results(results.scale, {**results.runs, cell: [ended]})
