"""What a run came to, for people to look at."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.core import Tree
from fedlens.run_files import EXPERIMENT, MANIFEST, MODEL, OVER, ROUNDS, check_run, read_records
from fedlens.runs.folder import RunFolder
from fedlens.runs.measures import PARTS, measure_name
from fedlens.runs.records import is_number, summary_of
from fedlens.runs.summary import Record, final

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class Result:
    """What a run came to. In a notebook it draws itself."""

    status: str  # finished, diverged, invalid or stopped; one that was read may not be over
    records: list[Record]
    summary: dict[str, Any]
    model: Tree  # parameters and buffers, as module.load_state_dict takes them; {}: none is saved
    folder: Path | None
    best_model: Tree | None = None  # that was best on validation, with evaluate.best

    @classmethod
    def read(cls, folder: str | Path) -> Result:
        """What the run in a folder came to. Neither its data nor its code need be there.

        A run that is not over has its rounds so far, and no model.
        """
        run = RunFolder(Path(folder))
        check_run(run.path, [EXPERIMENT, MANIFEST, ROUNDS])
        records = read_records(run.path)
        summary = summary_of(run.path, len(records))
        # A run that was over and goes on still has the model of its earlier end.
        saved = summary["status"] in OVER and (run.path / MODEL).is_file()
        model, best = (run.load_model(), run.load_best()) if saved else ({}, None)
        return cls(summary["status"], records, summary, model, run.path, best)

    @property
    def final(self) -> dict[str, float]:
        """The last evaluation, by name: test_accuracy, test_loss, ..."""
        return final(self.records)

    def __repr__(self) -> str:
        count = len(self.records)
        words = [self.status, "1 round" if count == 1 else f"{count} rounds"]
        measure = self._measure
        if is_number(self.final.get(measure)):  # what is not finite is None, once it was written
            words.append(f"{measure} {self.final[measure]:.4g}")
        if self.folder is not None:
            words.append(str(self.folder))
        return f"<Result: {', '.join(words)}>"

    @property
    def _measure(self) -> str:
        """What is looked at first: accuracy on test, else on validation, else on train."""
        names = [measure_name(part, "accuracy") for part in PARTS]
        return next((name for name in names if name in self.final), "train_loss")

    def plot(self, measure: str | None = None, axes: Axes | None = None) -> Axes:
        """A measure round by round, on `axes` or on new ones; without one, the accuracy."""
        from matplotlib.ticker import MaxNLocator

        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.subplots()[1]
        name = measure or self._measure
        points = [(record["round"], record[name]) for record in self.records if name in record]
        if not points:
            known = sorted({key for record in self.records for key in record} - {"round"})
            raise ValueError(f"{name!r} was not recorded: choose one of {', '.join(known)}")
        axes.plot(*zip(*points, strict=True), marker="o" if len(points) == 1 else None)
        ticks = axes.xaxis.get_major_locator()
        if isinstance(ticks, MaxNLocator):  # as they are, unless somebody chose a scale
            ticks.set_params(integer=True)
        axes.set_xlabel("round")
        axes.set_ylabel(name.replace("_", " "))
        return axes

    def to_pandas(self) -> Any:
        """The records as a DataFrame, a row a round; it needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ValueError("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(self.records).set_index("round")

    def _repr_html_(self) -> str:
        """A curve and the last evaluation, for notebooks."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 3), layout="constrained")
        if self.records:
            self.plot(axes=figure.add_subplot())
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
        picture = drawn.getvalue()
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{value:.4g}</td></tr>"
            for name, value in self.final.items()
            if isinstance(value, int | float)
        )
        title = html.escape(repr(self).strip("<>"))
        return f"<b>{title}</b><div>{picture[picture.index('<svg') :]}</div><table>{rows}</table>"
