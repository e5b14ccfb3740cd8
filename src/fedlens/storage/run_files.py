"""The files of a run folder: their names, and how to read them.

Runs write them (`runs/folder.py`); resumed runs and reports read them through this module, which
does not need torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedlens.storage.locks import is_locked
from fedlens.storage.reading import BadFile, argument, demand_fields, reading, reason
from fedlens.storage.tables import once, parse_tables, read_text

EXPERIMENT = "experiment.toml"
MANIFEST = "manifest.json"
PARTITION = "partition.json"
ROUNDS = "rounds.jsonl"  # one record a line
SUMMARY = "summary.json"
EVALUATION = "evaluation.json"  # of the final model, in detail
CLIENTS = "clients.json"  # accuracies with `local_only` or `fine_tune`, by client
MODEL = "model.safetensors"
BEST = "best.safetensors"  # the model that was best on validation, if it is kept
CHECKPOINT = "checkpoint"  # a folder with the newest states, each as two files
OF_CLIENTS = f"{CHECKPOINT}/clients"  # what clients remember that finds no room in memory

OF_PAGES = ("figures", "comparison", "report.html")  # what reports write beside runs

OF_RUNS = (  # everything that a run and its page write into its folder
    *(EXPERIMENT, MANIFEST, PARTITION, ROUNDS, SUMMARY, EVALUATION, CLIENTS),
    *(MODEL, BEST, CHECKPOINT, "figures", "report.html", "tensorboard", "sites.json"),
)

RERUN = "run the experiment again"
OVER = ("finished", "diverged", "invalid", "stopped")
"""The statuses of runs that have nothing left to do."""

LARGEST_LOSS = 1e12  # a run whose last loss is larger is invalid
UNSOUND = f"no finite number below {LARGEST_LOSS:.0e}"  # the last loss of an invalid run


class Unwritable(OSError):
    """The folder of a run that has begun cannot be written to."""


class RunFailed(RuntimeError):
    """A run that has already written its folder cannot continue."""


def is_run(folder: Path) -> bool:
    """Whether a run wrote this folder: these two files exist from the start of a run."""
    return all((folder / name).is_file() for name in (EXPERIMENT, MANIFEST))


def strangers(folder: Path) -> list[str]:
    """What is in the folder of a run and was not written by it; hidden files are left out."""
    names = (path.name for path in folder.iterdir())
    return sorted(name for name in names if name not in OF_RUNS and not name.startswith("."))


Folders = str | Path | Iterable[str | Path]
"""One folder, or several."""


def runs_in(paths: Folders) -> list[Path]:
    """The run folders among `paths`, and those inside other folders of `paths`, such as a sweep.

    What reports write beside runs is left out, so that `sweep/*` names the runs of a sweep.
    """
    found: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        inside = [path / name for name in _inside(path)]
        found += inside if inside and not is_run(path) else [path]
    others = [path for path in found if not _is_of_pages(path)]
    return others or found


def passed_over(paths: Iterable[Path]) -> list[Path]:
    """The sweeps beside runs in a folder of `paths`: `runs_in` takes only the runs there."""
    named = list(paths)
    return [
        inner
        for folder in named
        if not is_run(folder) and _inside(folder)
        for inner in sorted(folder.iterdir())
        if inner not in named and not is_run(inner) and _inside(inner)
    ]


def _inside(folder: Path) -> list[str]:
    """The names of the run folders in a folder, without leftovers of killed processes (`.*`)."""
    names = (one.parent.name for one in folder.glob(f"*/{EXPERIMENT}"))
    return sorted(name for name in names if not name.startswith("."))


def _is_of_pages(path: Path) -> bool:
    is_page = (path / "report.html").is_file() and not (path / EXPERIMENT).is_file()
    return is_page or path.name in OF_PAGES


def check_run(folder: Path, needed: Sequence[str]) -> None:
    """Refuse a folder that lacks one of these files, and say where the runs are."""
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} is not a run folder: {_remedy(folder, missing)}")


def experiment_text(folder: Path) -> str:
    return read_text(folder / EXPERIMENT)


def read_experiment(folder: Path) -> dict[str, Any]:
    """The experiment of a run, as plain tables."""
    with reading(folder / EXPERIMENT, RERUN):
        return parse_tables(experiment_text(folder), folder / EXPERIMENT)


def read_manifest(folder: Path) -> dict[str, Any]:
    check_run(folder, [MANIFEST])
    return read_json(folder / MANIFEST) or {}


def own_code(folder: Path) -> list[Path]:
    """The folders where a run found the user's own functions; none if `folder` is not a run."""
    with suppress(ValueError):
        found = read_manifest(folder).get("code")
        places = found if isinstance(found, list) else []
        return [Path(place) for place in places if isinstance(place, str)]
    return []


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records in the order of rounds; for a round that was run again, its last record.

    A last line that is incomplete because the run was killed is left out.
    """
    path = folder / ROUNDS
    return parse_records(path, path.read_bytes() if path.is_file() else b"")


def parse_records(path: Path, content: bytes) -> list[dict[str, Any]]:
    """The records in `content`, the bytes of the file `path`."""
    lines = [(place, line) for place, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    records: dict[int, dict[str, Any]] = {}
    for place, line in lines:
        try:
            record = parse_json(line)
            if not isinstance(record, dict) or type(record.get("round")) is not int:
                raise ValueError("it has no round number")
        except (ValueError, RecursionError) as error:
            if place == lines[-1][0]:
                break
            remedy = "delete the line or run again"
            raise BadFile(f"{path}, line {place}", reason(error), remedy) from error
        records[record["round"]] = record
    return [records[round] for round in sorted(records)]


def read_summary(folder: Path) -> dict[str, Any]:
    """The results of a run, or its state when it started; empty if it was killed before that."""
    return read_json(folder / SUMMARY) or {}


def whole_summary(folder: Path) -> dict[str, Any]:
    """The summary; empty also if it is damaged, since a resumed run writes it anew."""
    with suppress(BadFile):
        return read_summary(folder)
    return {}


def read_status(folder: Path) -> str | None:
    """The status of a run, or None if there is no run."""
    if not (folder / MANIFEST).is_file():
        return None
    return status_of(folder, whole_summary(folder))


def status_of(folder: Path, summary: Mapping[str, Any]) -> str:
    """The status of a run; a `running` one without a lock was killed, and so is `interrupted`."""
    status = str(summary.get("status") or "interrupted")
    return "interrupted" if status == "running" and not is_locked(folder) else status


def state_files(folder: Path, round: int) -> tuple[Path, Path]:
    """The two files of a round's checkpoint: the tensors, and the index that validates them."""
    name = folder / CHECKPOINT / f"state-{round:06d}"
    return name.with_suffix(".safetensors"), name.with_suffix(".json")


def client_file(folder: Path, client: int, round: int) -> Path:
    """What a client remembers after a round, if it has a file of its own."""
    return folder / OF_CLIENTS / f"{client // 100:04d}" / f"{client:06d}-{round:06d}.safetensors"


def saved_rounds(folder: Path) -> list[int]:
    """The rounds with a checkpoint or a part of one, the newest first."""
    place = folder / CHECKPOINT
    try:
        names = [path.name for path in place.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:  # what is in it is not known, so nothing may be begun again
        raise BadFile(place, reason(error), "make it a folder that you can read") from error
    found = (re.fullmatch(r"state-(\d{6,})\.(safetensors|json)", name) for name in names)
    return sorted({int(name[1]) for name in found if name}, reverse=True)


def last_saved(folder: Path) -> int | None:
    """The round of the newest checkpoint with a valid index, or None if there is none."""
    for round in saved_rounds(folder):
        with suppress(ValueError, OSError):
            read_state_index(folder, round)
            return round
    return None


def identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode of a folder: another one in its place has others. None if it is missing."""
    with suppress(FileNotFoundError):
        about = folder.stat()
        return about.st_dev, about.st_ino
    return None


def can_go_on(folder: Path, replaced: tuple[int, int] | None = None) -> bool:
    """Whether the folder has a checkpoint, and is not the one that was to be replaced."""
    return (folder / CHECKPOINT).exists() and identity(folder) != replaced


def unfinished(folder: Path) -> str:
    """Why a run has no model, and what to do about it."""
    done = last_saved(folder)
    sooner = f", or end it soon by --rounds {done + 1}" if done is not None else ""
    return f"{folder} has no {MODEL} yet: finish it with fedlens resume {argument(folder)}{sooner}"


def read_state_index(folder: Path, round: int) -> dict[str, Any]:
    """The index of the checkpoint of a round, verified. Raises FileNotFoundError."""
    _, path = state_files(folder, round)
    signed = _parsed(path)
    signed = demand_fields(signed, {"index": dict, "sha256": str}, path, RERUN)
    if signed["sha256"] != checksum(signed["index"]):
        raise damaged(path, "its checksum is wrong")
    fields = {"round": int, "sha256": str, "records": dict, "state": dict}
    return demand_fields(signed["index"], fields, path, RERUN)


def checksum(content: Any) -> str:
    """The SHA-256 of plain values, written as JSON."""
    return hashlib.sha256(json.dumps(content, allow_nan=False).encode()).hexdigest()


def to_json(content: Any, indent: int | None = None) -> str:
    """The content as JSON; numbers that are not finite become null."""

    def clean(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, Mapping):
            return {key: clean(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(part) for part in value]
        return value

    return json.dumps(clean(content), indent=indent, ensure_ascii=False, allow_nan=False)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None if there is no such file."""
    if not path.is_file():
        return None
    return demand_fields(_parsed(path), {}, path, RERUN)


def damaged(path: Path, why: object) -> BadFile:
    """The error for a file that is not as the run wrote it."""
    return BadFile(path, str(why), RERUN)


LONG_NUMBER = re.compile(rb"[0-9]{19}")  # it may not fit in 64 bits


def parse_json(content: bytes) -> Any:
    """The content of a JSON file; refuses keys given twice and integers beyond 64 bits."""
    # Checking each number is slow, so it is done only if one of them is long.
    whole = _whole if LONG_NUMBER.search(content) else None
    return json.loads(content, parse_int=whole, object_pairs_hook=once)


def _whole(digits: str) -> int:
    number = int(digits) if len(digits) < 25 else 2**63
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"the number {digits[:25]} does not fit in 64 bits")
    return number


def _parsed(path: Path) -> Any:
    content = path.read_bytes()
    try:
        return parse_json(content)
    except (ValueError, RecursionError) as error:
        raise damaged(path, reason(error)) from error


def _remedy(folder: Path, missing: Sequence[str]) -> str:
    if not folder.is_dir():
        what = "it is a file" if folder.is_file() else "there is no such folder"
        return f"{what}; name one that `fedlens run` wrote"
    inside = _inside(folder)
    if inside:  # it is a folder of runs, and one run is needed
        more = ", ..." if len(inside) > 3 else ""
        return f"the runs are inside it; name them one by one ({', '.join(inside[:3])}{more})"
    return f"it has no {' and no '.join(missing)}; name one that `fedlens run` wrote"
