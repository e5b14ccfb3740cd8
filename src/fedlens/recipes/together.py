"""The runs of one table or figure, or of several: all as one sweep, equal experiments once."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from fedlens.experiment import Experiment
from fedlens.locks import LOCK, one_writer, remove_dead_lock
from fedlens.run_files import (
    MODEL,
    OVER,
    is_run,
    last_saved,
    read_manifest,
    read_status,
)
from fedlens.runs.equal import text_of
from fedlens.runs.folder import new_folder
from fedlens.runs.progress import decoding
from fedlens.runs.summary import Record
from fedlens.runs.sweep import prepare
from fedlens.runs.watching import Watch, Watching, within_of
from fedlens.version import __version__

AT_ONCE = 64  # runs that are made ready together: each holds a model in memory
Cells = Mapping[Path, Experiment]
"""Experiments by the folders that their runs are to have."""


@dataclass(frozen=True)
class Together:
    """The cells of some items, which are run as one sweep."""

    outs: Sequence[Path]  # the items' folders
    cells: Cells
    chosen: Sequence[Path]  # the folders of those that are wanted
    names: Mapping[Path, str]  # what each is called while it runs
    data: Path | None = None  # where named data sets are looked for first

    @property
    def left(self) -> Cells:
        """What is to be run: of equal experiments the one that is furthest, if none is done."""
        waiting = [
            places
            for places in self._equal
            if not any(map(_is_over, places)) and self._texts[places[0]] not in self._beside
        ]
        furthest = [max(places, key=_num_saved) for places in waiting]
        return {place: self.cells[place] for place in furthest}

    @property
    def stages(self) -> Iterator[Cells]:
        """What is left, in parts that can be made ready at once: first what others start from."""
        models = {str(place.resolve() / MODEL) for place in self.cells}
        left = self.left
        for depends in (False, True):
            part = [place for place in left if (left[place].weights in models) == depends]
            for start in range(0, len(part), AT_ONCE):
                yield {place: left[place] for place in part[start : start + AT_ONCE]}

    @property
    def count(self) -> int:
        """How many runs there are in all, those included that are done."""
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
        """The folders that are wanted, those of different items with one experiment together.

        A run of another Fedlens is nobody else's.
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
        """Run what is left, or go on with it; `watch` is called as if all were one sweep.

        `seconds` are what a round of each is expected to take, by name, where that is known.
        """
        with one_writer(*self.outs):
            parents = {place.parent for place in self.chosen}
            for folder in (*parents, *filter(_is_over, self.chosen)):
                remove_dead_lock(folder)  # of whoever was killed when all in it was written
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
            assert watch is not None
            if "done" in record:
                done, left = elsewhere + record["done"], later + record["left"]
                record = record | {"done": done, "total": total, "left": left}
            watch(record)

        told = Watching(say, within_of(watch)) if watch is not None else None
        points = {self.names[place]: experiment for place, experiment in stage.items()}
        folders = {self.names[place]: place for place in stage}
        made = prepare(points, folders, data=self.data, watch=decoding(told))
        made.run(told, keep_states=False, seconds=seconds)

    @cached_property
    def _beside(self) -> Mapping[str, Path]:
        """What other items, in folders beside these, have done: by the text of the experiment."""
        parents = dict.fromkeys(out.parent for out in self.outs)
        others = (other for parent in parents for other in sorted(parent.glob("*/runs/*")))
        return _done(other for other in others if other not in self.cells)

    def _take_over(self) -> None:
        """What is wanted and was run by another item, here or beside these, becomes theirs, too."""
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
    """Finished runs of this Fedlens, by the text of their experiment: of equal ones the first."""
    found: dict[str, Path] = {}
    for place in places:
        if is_run(place) and _is_done_by_us(place):
            found.setdefault(text_of(place), place)
    return found


def _is_over(place: Path) -> bool:
    return read_status(place) in OVER


def _num_saved(place: Path) -> int:
    """Rounds of a run that need not be run again, if it goes on."""
    return last_saved(place) or 0


def _is_ours(place: Path) -> bool:
    """Whether a run was begun by the Fedlens that is running now."""
    with contextlib.suppress(ValueError):  # a file of it is damaged
        return read_manifest(place).get("fedlens") == __version__
    return False


def _is_done_by_us(place: Path) -> bool:
    with contextlib.suppress(ValueError):  # a file of it is damaged
        return _is_over(place) and _is_ours(place)
    return False


def _link(source: str, dest: str) -> None:
    try:
        os.link(source, dest)  # nobody writes into a file of a finished run
    except OSError:
        shutil.copy2(source, dest)
