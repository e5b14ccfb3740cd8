"""The runs of tables and figures as one sweep, in which equal experiments run once."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from fedlens.config.experiment import Experiment
from fedlens.runs.equal import text_of
from fedlens.runs.folder import new_folder
from fedlens.runs.progress import decoding
from fedlens.runs.summary import Record
from fedlens.runs.sweep import prepare
from fedlens.runs.watching import Watch, Watching, tell
from fedlens.storage.locks import LOCK, one_writer, remove_dead_lock
from fedlens.storage.run_files import (
    MODEL,
    OVER,
    is_run,
    last_saved,
    read_manifest,
    read_status,
)
from fedlens.version import __version__

AT_ONCE = 64  # runs that are prepared together: each holds a model in memory
Cells = Mapping[Path, Experiment]
"""Experiments by the folders of their runs."""


@dataclass(frozen=True)
class Together:
    """The cells of several items, which run as one sweep."""

    outs: Sequence[Path]  # the items' folders
    cells: Cells
    chosen: Sequence[Path]  # the folders of the selected cells
    names: Mapping[Path, str]  # the name of each in progress reports
    data: Path | None = None  # where named data sets are searched first

    @property
    def left(self) -> Cells:
        """The cells to run: of equal experiments, if none is done, the one with the most rounds."""
        waiting = [
            places
            for places in self._equal
            if not any(map(_is_over, places)) and self._texts[places[0]] not in self._beside
        ]
        furthest = [max(places, key=_num_saved) for places in waiting]
        return {place: self.cells[place] for place in furthest}

    @property
    def stages(self) -> Iterator[Cells]:
        """The cells to run, in parts prepared together; cells that start from another come last."""
        models = {str(place.resolve() / MODEL) for place in self.cells}
        left = self.left
        for depends in (False, True):
            part = [place for place in left if (left[place].weights in models) == depends]
            for start in range(0, len(part), AT_ONCE):
                yield {place: left[place] for place in part[start : start + AT_ONCE]}

    @property
    def count(self) -> int:
        """The number of runs, including those that are done."""
        return len(self._equal)

    @property
    def rounds(self) -> int:
        return sum(self.cells[places[0]].rounds for places in self._equal)

    @property
    def rounds_done(self) -> int:
        return sum(max(map(self._rounds_done, places)) for places in self._equal)

    def _rounds_done(self, place: Path) -> int:
        is_done = _is_over(place) or self._texts[place] in self._beside
        return self.cells[place].rounds if is_done else _num_saved(place)

    @cached_property
    def _texts(self) -> Mapping[Path, str]:
        return {place: self.cells[place].toml() for place in self.chosen}

    @property
    def _equal(self) -> list[list[Path]]:
        """The selected folders, grouped: folders of different items with one experiment share it.

        Runs made by another version of Fedlens are never shared.
        """
        found: dict[tuple[str, int], list[Path]] = {}
        seen: Counter[tuple[Path, str]] = Counter()
        for place, text in self._texts.items():
            is_alone = read_status(place) is not None and not _is_ours(place)
            item, what = place.parent, str(place) if is_alone else text
            found.setdefault((what, seen[item, what]), []).append(place)
            seen[item, what] += 1
        return list(found.values())

    def run(self, watch: Watch | None = None, seconds: Mapping[str, float] | None = None) -> None:
        """Run or resume the remaining cells; `watch` is called as if all were one sweep.

        `seconds` is the expected time of a round by name, where it is known.
        """
        with one_writer(*self.outs):
            parents = {place.parent for place in self.chosen}
            for folder in (*parents, *filter(_is_over, self.chosen)):
                remove_dead_lock(folder)  # of a process killed after its last write
            total = self.rounds
            self._take_over()
            while stage := next(self.stages, None):
                self._run_stage(stage, total, watch, seconds or {})
                assert all(map(_is_over, stage)), "a sweep ends its runs"
                self._take_over()

    def _run_stage(
        self, stage: Cells, total: int, watch: Watch | None, seconds: Mapping[str, float]
    ) -> None:
        elsewhere = self.rounds_done - sum(map(self._rounds_done, stage))
        later = sum(
            (one.rounds - self._rounds_done(place)) * seconds.get(self.names[place], 1)
            for place, one in self.left.items()
            if place not in stage
        )

        def say(record: Record) -> None:
            if "done" in record:
                done, left = elsewhere + record["done"], later + record["left"]
                record = record | {"done": done, "total": total, "left": left}
            tell(watch, record)

        told = Watching(say) if watch is not None else None
        points = {self.names[place]: experiment for place, experiment in stage.items()}
        folders = {self.names[place]: place for place in stage}
        made = prepare(points, folders, data=self.data, watch=decoding(told))
        made.run(told, keep_states=False, seconds=seconds)

    @cached_property
    def _beside(self) -> Mapping[str, Path]:
        """Finished runs of other items in sibling folders, by the text of their experiment."""
        parents = dict.fromkeys(out.parent for out in self.outs)
        others = (other for parent in parents for other in sorted(parent.glob("*/runs/*")))
        return _done(other for other in others if other not in self.cells)

    def _take_over(self) -> None:
        """Copy selected runs that another item, here or in a sibling folder, has finished."""
        wanted = [place for place in self.chosen if not _is_over(place)]
        if not wanted:
            return
        done = {**self._beside, **_done(self.cells)}
        for place in wanted:
            same = done.get(self._texts[place])
            if same is not None:
                copy = partial(
                    shutil.copytree,
                    same,
                    dirs_exist_ok=True,
                    copy_function=_link,
                    ignore=shutil.ignore_patterns(LOCK),
                )
                new_folder(place, copy, overwrite=True).release()


def _done(places: Iterable[Path]) -> dict[str, Path]:
    """Finished runs of this version of Fedlens by the text of their experiment; equal ones once."""
    found: dict[str, Path] = {}
    for place in places:
        if is_run(place) and _is_done_by_us(place):
            found.setdefault(text_of(place), place)
    return found


def _is_over(place: Path) -> bool:
    return read_status(place) in OVER


def _num_saved(place: Path) -> int:
    """Rounds of a run that a resume need not repeat."""
    return last_saved(place) or 0


def _is_ours(place: Path) -> bool:
    """Whether a run was started by this version of Fedlens."""
    with contextlib.suppress(ValueError):  # one of its files is damaged
        return read_manifest(place).get("fedlens") == __version__
    return False


def _is_done_by_us(place: Path) -> bool:
    with contextlib.suppress(ValueError):  # one of its files is damaged
        return _is_over(place) and _is_ours(place)
    return False


def _link(source: str, dest: str) -> None:
    try:
        os.link(source, dest)  # files of a finished run are never modified
    except OSError:
        shutil.copy2(source, dest)
