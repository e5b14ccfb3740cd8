"""The result of a run."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.core import Tree
from fedlens.evaluation.measures import OF_OWN_MODELS, PARTS, measure_name
from fedlens.network.low_rank import merged
from fedlens.runs.cell import picture, points_of
from fedlens.runs.folder import RunFolder
from fedlens.runs.records import Record, is_number, summary_of
from fedlens.runs.summary import final
from fedlens.storage import run_files
from fedlens.storage.words import count_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def by_name(accuracy: object, names: Sequence[str] | None) -> dict[str, float]:
    """The accuracies of clients by their names or, without names, numbers; of those tested."""
    shares = accuracy if isinstance(accuracy, list) else []
    called = names or range(len(shares))
    pairs = zip(called, shares, strict=False)
    return {str(name): share for name, share in pairs if is_number(share)}


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run. A notebook shows it with a plot."""

    status: str  #: finished, diverged, invalid or stopped; other if read before its end
    records: list[Record]
    summary: dict[str, Any]
    tensors: Tree  #: of the final model, by the names that they have in training
    folder: Path | None
    best_model: Tree | None = None  #: the best on validation, with evaluate.best
    # The final model's accuracy on each client's own test images, by the client's name or number.
    client_accuracy: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: str | Path) -> Result:
        """Read the result of the run in a folder. Its data and its code are not needed.

        A run that is not over has its rounds so far, and no model.
        """
        run = RunFolder(Path(folder))
        run_files.check_run(run.path, [run_files.EXPERIMENT, run_files.MANIFEST, run_files.ROUNDS])
        records = run_files.read_records(run.path)
        summary = summary_of(run.path, len(records))
        # A run that was over and was resumed still has the model of its earlier end.
        saved = summary["status"] in run_files.OVER and (run.path / run_files.MODEL).is_file()
        model, best = (run.load_model(), run.load_best()) if saved else ({}, None)
        found = (run_files.read_json(run.path / run_files.EVALUATION) or {}) if saved else {}
        names = (run_files.read_json(run.path / run_files.PARTITION) or {}).get("client_names")
        clients = by_name(found.get("client_accuracy"), names)
        return cls(summary["status"], records, summary, model, run.path, best, clients)

    @property
    def model(self) -> Tree:
        """Parameters and buffers for module.load_state_dict; {} if none is saved."""
        return merged(self.tensors)

    @property
    def final(self) -> dict[str, float]:
        """The last evaluation, by name: test_accuracy, test_loss, ..."""
        known = self.summary.get("final") or {}
        return final(self.records) | {k: known[k] for k in OF_OWN_MODELS if k in known}

    def __repr__(self) -> str:
        count = len(self.records)
        words = [self.status, count_of(count, "round")]
        measure = self._measure
        if is_number(self.final.get(measure)):  # files store None for non-finite values
            words.append(f"{measure} {self.final[measure]:.4g}")
        if self.folder is not None:
            words.append(str(self.folder))
        return f"<Result: {', '.join(words)}>"

    @property
    def _measure(self) -> str:
        """The main measure: accuracy on test, else on validation, else on train."""
        names = [measure_name(part, "accuracy") for part in PARTS]
        return next((name for name in names if name in self.final), "train_loss")

    def plot(self, measure: str | None = None, axes: Axes | None = None) -> Axes:
        """Plot a measure by round, on `axes` or new ones; by default the accuracy."""
        from matplotlib.ticker import MaxNLocator

        from fedlens.report.palette import colour_of

        name = measure or self._measure
        points = points_of(self.records, name)
        if not points:
            known = sorted({key for record in self.records for key in record} - {"round"})
            raise ValueError(f"{name!r} was not recorded: choose one of {', '.join(known)}")
        if axes is None:  # as on a page
            from matplotlib import pyplot

            axes = pyplot.subplots(figsize=(5.5, 3.2), layout="constrained")[1]
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", alpha=0.4)
        marker = "o" if len(points) == 1 else None
        axes.plot(*zip(*points, strict=True), marker=marker, color=colour_of(len(axes.lines)))
        ticks = axes.xaxis.get_major_locator()
        if isinstance(ticks, MaxNLocator):  # the default, unless the user chose a scale
            ticks.set_params(integer=True)
        axes.set_xlabel("round")
        axes.set_ylabel(name.replace("_", " "))
        return axes

    def to_pandas(self) -> Any:
        """The records as a DataFrame with one row per round; it needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ValueError("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(self.records).set_index("round")

    def _repr_html_(self) -> str:
        """A curve and the last evaluation, for notebooks."""
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{value:.4g}</td></tr>"
            for name, value in self.final.items()
            if isinstance(value, int | float)
        )
        title = html.escape(repr(self).strip("<>"))
        name = self.folder.name if self.folder is not None else "this run"
        curve = picture({name: points_of(self.records, self._measure)}, self._measure)
        return f"<b>{title}</b><div>{curve}</div><table>{rows}</table>"
