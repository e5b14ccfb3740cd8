"""Writing a run folder: files atomically, rounds.jsonl by line, one process at a time.

A checkpoint is a state as files: its tensors as safetensors, its structure as JSON. That does not
depend on the fields of `State`: a state is any nesting of dicts and dataclasses with tensors and
plain numbers. In the JSON description, a dict or dataclass is an object with its names in order; a
dict by client is a list of the clients and the description of their values, stacked into one tensor
for all clients; a tensor is its name in the safetensors file. What clients remember that finds no
room in memory has a file of its own for each client and round, which is never changed: a dict by
client then has a third part, the clients with such files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_type_hints

import torch
from torch import Tensor

from fedlens.core import Memory, Tree
from fedlens.core.by_client import ByClient, Elsewhere
from fedlens.core.trees import in_order, map_tensors, moved, stack, tensors_in, unstack
from fedlens.rounds import State
from fedlens.storage import run_files
from fedlens.storage.files import remove_leftovers, write_atomically
from fedlens.storage.locks import LOCK, FolderLock, not_writable
from fedlens.storage.reading import BadFile, demand_fields, reading


def describe(value: Any, tensors: Tree, path: str = "") -> Any:
    """The JSON description of `value`; its tensors are added to `tensors`, by path."""
    if isinstance(value, Tensor):
        assert path not in tensors, f"two tensors of a state are called {path}"
        tensors[path] = value
        return path
    if isinstance(value, Mapping) and value and all(isinstance(key, int) for key in value):
        there = value.elsewhere if isinstance(value, ByClient) else {}
        here = [client for client in value if client not in there]
        rows = [value[client] for client in here]
        if len({t.device for t in tensors_in(rows)}) > 1:  # some clients' memory is on the host
            rows = map_tensors(rows, Tensor.cpu)
        files = [[client, *one.described] for client, one in there.items()]
        return [here, describe(stack(rows), tensors, path), *([files] if files else [])]
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        prefix = f"{path}/" if path else ""
        return {name: describe(part, tensors, f"{prefix}{name}") for name, part in value.items()}
    assert value is None or isinstance(value, (int, float)), f"{path} of a state is {value!r}"
    return value


def restore(
    kind: Any,
    described: Any,
    tensors: Tree,
    stored: Callable[[int, int, str], Elsewhere[Memory]] | None = None,
) -> Any:
    """The described object of type `kind`, with separate memory for the tensors of each client.

    `stored` is how what has a file of its own is read.
    """
    if isinstance(described, str):
        return tensors[described]
    if isinstance(described, list):
        clients, joint, *files = described
        rows = unstack(restore(None, joint, tensors), len(clients))
        own = [map_tensors(row, torch.clone) for row in rows]
        found: dict[int, Any] = dict(zip(clients, own, strict=True))
        for client, round, sha256 in files[0] if files else ():
            assert stored is not None, "who reads a checkpoint has its folder"
            found[client] = stored(client, round, sha256)
        return ByClient(found) if files else found
    if isinstance(described, dict):
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        parts = {n: restore(hints.get(n), part, tensors, stored) for n, part in described.items()}
        return cast(Any, kind)(**parts) if is_dataclass(kind) else parts
    return described


def to_bytes(tensors: Tree) -> bytes:
    """The tensors as a safetensors file, in which no two tensors may share memory."""
    from safetensors.torch import save

    own: Tree = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    content: bytes = save(own)
    return content


def from_bytes(content: bytes, device: torch.device) -> Tree:
    from safetensors.torch import load

    return {name: tensor.to(device) for name, tensor in load(content).items()}


KEPT = 2  # checkpoints: the older one is used if the newest is damaged

logger = logging.getLogger(__name__)


class Mark(NamedTuple):
    """A position in the records of a run, and a checksum of all records up to it."""

    num_records: int
    num_bytes: int
    sha256: str


NO_RECORDS = Mark(0, 0, hashlib.sha256().hexdigest())


class Change(NamedTuple):
    """A change to a file of a folder."""

    kind: Literal["write", "append", "sync", "remove"]
    name: str  # path relative to the folder
    content: bytes = b""
    at: int = 0  # position of an append, which truncates there: it may be repeated


OnChange = Callable[[Change], None]


class Records:
    """Writes rounds.jsonl, one record per line."""

    def __init__(self, folder: RunFolder, content: bytes = b"") -> None:
        """`content` is what the file already contains."""
        self.folder = folder
        self._count, self._size = content.count(b"\n"), len(content)
        self._digest = hashlib.sha256(content)

    @property
    def mark(self) -> Mark:
        return Mark(self._count, self._size, self._digest.hexdigest())

    def append(self, record: Mapping[str, Any]) -> None:
        line = f"{run_files.to_json(record)}\n".encode()
        self.folder.make(Change("append", run_files.ROUNDS, line, self._size))
        self._digest.update(line)
        self._count, self._size = self._count + 1, self._size + len(line)

    def sync(self) -> None:
        self.folder.make(Change("sync", run_files.ROUNDS))


class Checkpoint(NamedTuple):
    """A saved state, and the records up to it."""

    state: State
    records: Sequence[dict[str, Any]] = ()
    content: bytes = b""  # the records as bytes of the file
    best: Tree | None = None  # the best model so far, if it is kept


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run. A writer holds its lock, from `create` or `open`.

    `on_change` is called after each change to a file. Making the same changes elsewhere gives a
    copy of the folder on another machine.
    """

    path: Path
    lock: FolderLock | None = None
    on_change: OnChange | None = None

    @classmethod
    def create(cls, path: Path, overwrite: bool, files: Mapping[str, str]) -> RunFolder:
        """Create a folder with these files; `overwrite` replaces the folder of an old run."""

        def fill(folder: Path) -> None:
            for name, text in files.items():
                write_atomically(folder / name, text.encode())

        return cls(path, new_folder(path, fill, overwrite))

    @classmethod
    def open(cls, path: Path, on_change: OnChange | None = None) -> RunFolder:
        """Open the folder of a run to resume it, and remove half-written files."""
        states, clients = path / run_files.CHECKPOINT, path / run_files.OF_CLIENTS
        for link in (states, clients, *clients.glob("*")):
            if link.is_symlink():  # old states would be removed from its target
                raise ValueError(
                    f"{link} is a link to another folder: put a copy of that in its place"
                )
        lock = FolderLock(path)
        for folder in (path, states, path / "figures", *clients.glob("*")):
            if not folder.is_symlink() or folder == path:
                remove_leftovers(folder)
        return cls(path, lock, on_change)

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            self.lock.release()

    def make(self, change: Change) -> None:
        path = self.path / change.name
        if not self.path.is_dir():  # do not create it again with this file only
            raise OSError(f"{self.path} is gone: if it was moved, resume it there")
        match change.kind:
            case "write":
                write_atomically(path, change.content)
            case "append":
                path.touch()
                with path.open("r+b") as file:
                    file.seek(change.at)
                    file.truncate()
                    file.write(change.content)
            case "sync":  # flush appended content to disk
                with suppress(FileNotFoundError), path.open("rb") as file:
                    os.fsync(file.fileno())
            case "remove":
                path.unlink(missing_ok=True)
        if self.on_change is not None:
            self.on_change(change)

    def write(self, name: str, text: str) -> None:
        self._write(self.path / name, text.encode())

    def _write(self, path: Path, content: bytes) -> None:
        self.make(Change("write", str(path.relative_to(self.path)), content))

    def _remove(self, path: Path) -> None:
        self.make(Change("remove", str(path.relative_to(self.path))))

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self.write(name, readable_json(content))

    def summary(self, num_rounds: int) -> dict[str, Any]:
        """The summary if it covers this many rounds, else {}: a killed run's covers fewer."""
        summary = run_files.whole_summary(self.path)
        if summary.get("rounds") != num_rounds:
            return {}
        demand_fields(summary, {"seconds": dict}, self.path / run_files.SUMMARY, run_files.RERUN)
        demand_fields(
            summary["seconds"],
            {"total": (int, float)},
            self.path / run_files.SUMMARY,
            run_files.RERUN,
        )
        return summary

    def keep(self, saved: Checkpoint) -> None:
        """Cut the records to those of a checkpoint: later rounds are run again."""
        for _, round, path in self._files_of_clients():
            if round > saved.state.round:
                self._remove(path)
        # Written anew, not truncated in place: the file may be a hard link to a finished run's.
        self._write(self.path / run_files.ROUNDS, saved.content)

    def load_model(self, name: str = run_files.MODEL) -> Tree:
        """The tensors of a model, if their checksum is that of the summary or none is known."""
        path, known = self.path / name, run_files.whole_summary(self.path).get("sha256")
        with reading(path, run_files.RERUN):
            content = path.read_bytes()
            if isinstance(known, dict) and known.get(name, _sha256(content)) != _sha256(content):
                raise run_files.damaged(path, "its checksum is wrong")
            return from_bytes(content, torch.device("cpu"))

    def load_best(self) -> Tree | None:
        return self.load_model(run_files.BEST) if (self.path / run_files.BEST).is_file() else None

    def save_model(self, model: Tree, best: Tree | None) -> dict[str, str]:
        """Write the model and the best one, if it is kept; return their checksums by file."""
        models = {run_files.MODEL: model} | ({} if best is None else {run_files.BEST: best})
        contents = {name: to_bytes(tensors) for name, tensors in models.items()}
        for name, content in contents.items():
            self._write(self.path / name, content)
        return {name: _sha256(content) for name, content in contents.items()}

    def save_state(
        self, state: State, records: Mark = NO_RECORDS, best: Tree | None = None
    ) -> None:
        """Write a checkpoint: first the tensors, then the small index file that makes it valid.

        The records that it depends on must already be on disk.
        """
        (self.path / run_files.CHECKPOINT).mkdir(exist_ok=True)
        tensors_file, index_file = run_files.state_files(self.path, state.round)
        tensors: Tree = {}
        described = describe(state, tensors)
        described_best = None if best is None else describe(best, tensors, "best")
        content = to_bytes(tensors)
        self._remove(index_file)  # it may be left from before a resume
        self._write(tensors_file, content)
        index = {
            "round": state.round,
            "sha256": _sha256(content),
            "records": records._asdict(),
            "state": described,
            "best": described_best,
        }
        plain = json.loads(run_files.to_json(index))
        signed = {"sha256": run_files.checksum(plain), "index": plain}
        self._write(index_file, run_files.to_json(signed).encode())
        self._remove_states(run_files.saved_rounds(self.path)[KEPT:])
        self._remove_superseded(self._files_of_clients(), state.round)

    def store_client(self, client: int, round: int, memory: Memory) -> Elsewhere[Memory]:
        """Write what a client remembers after a round, to a file that is never changed."""
        flat = {f"{part}/{name}": t for part, tree in memory.items() for name, t in tree.items()}
        content, path = to_bytes(flat), run_files.client_file(self.path, client, round)
        self._write(path, content)
        # States from the round before the last on may still be saved.
        self._remove_superseded(self._files_of_clients(client), round - 2)
        return self._stored(client, round, _sha256(content))

    def _stored(self, client: int, round: int, sha256: str) -> Elsewhere[Memory]:
        path = run_files.client_file(self.path, int(client), int(round))
        if not path.is_file():
            raise run_files.damaged(path, "it is missing")

        def read() -> Memory:
            content = path.read_bytes()
            if _sha256(content) != sha256:
                raise run_files.damaged(path, "its checksum is wrong")
            memory: Memory = {}
            for place, t in from_bytes(content, torch.device("cpu")).items():
                part, name = place.split("/", 1)
                memory.setdefault(part, {})[name] = t
            ordered: Memory = in_order(memory)
            return ordered

        return Elsewhere(read, (round, sha256))

    def _files_of_clients(self, client: int | None = None) -> Iterator[tuple[int, int, Path]]:
        """Those of all clients, or of one, each with its client and its round."""
        folder, pattern = self.path / run_files.OF_CLIENTS, "*/*-*.safetensors"
        if client is not None:
            first = run_files.client_file(self.path, client, 0)
            folder, pattern = first.parent, first.name.replace("-000000", "-*")
        for path in folder.glob(pattern):
            found, round = path.stem.split("-")
            yield int(found), int(round), path

    def _remove_superseded(self, files: Iterable[tuple[int, int, Path]], complete: int) -> None:
        """Remove files of clients that no checkpoint refers to, nor a state from `complete` on."""
        needed = *run_files.saved_rounds(self.path)[:KEPT], complete
        for _, some in groupby(sorted(files), itemgetter(0)):
            paths = {round: path for _, round, path in some}
            kept = {max((r for r in paths if r <= round), default=None) for round in needed}
            for round, path in paths.items():
                if round <= complete and round not in kept:
                    self._remove(path)

    def load_checkpoint(self, device: torch.device) -> Checkpoint | None:
        """The newest valid checkpoint with its records; None if there never was one.

        Newer checkpoints that are damaged or incomplete are logged and removed. If all are damaged,
        it raises an error.
        """
        wrong: list[BadFile] = []
        passed_over: dict[int, str] = {}
        for round in run_files.saved_rounds(self.path):
            _, index_file = run_files.state_files(self.path, round)
            if not index_file.exists():  # the run was killed while writing it
                passed_over[round] = f"{index_file} is missing"
                continue
            try:
                found = self._loaded(round, device)
            except BadFile as error:
                wrong.append(error)
                passed_over[round] = error.what
                continue
            for why in passed_over.values():
                logger.warning("%s: going on from the checkpoint of round %d", why, round)
            self._remove_states(list(passed_over))
            return found
        if wrong:
            raise wrong[0]
        return None

    def _loaded(self, round: int, device: torch.device) -> Checkpoint:
        index = run_files.read_state_index(self.path, round)
        path, _ = run_files.state_files(self.path, round)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise run_files.damaged(path, error.strerror) from error
        if _sha256(content) != index["sha256"]:
            raise run_files.damaged(path, "its checksum is wrong")
        try:
            tensors = from_bytes(content, torch.device("cpu"))
            state = restore(State, index["state"], tensors, self._stored)
            state = moved(state, device)  # but clients' memory
            best = restore(dict, index["best"], tensors) if index.get("best") else None
            best = moved(best, device)
            mark = Mark(**index["records"])
        except (LookupError, TypeError) as error:
            raise run_files.damaged(path, "it is of another version of Fedlens") from error
        recorded = self._recorded(mark)
        return Checkpoint(
            state, run_files.parse_records(self.path / run_files.ROUNDS, recorded), recorded, best
        )

    def _recorded(self, mark: Mark) -> bytes:
        """The records that a checkpoint depends on; raises if they have changed."""
        path = self.path / run_files.ROUNDS
        content = path.read_bytes() if path.is_file() else b""
        content = content[: mark.num_bytes]
        have, needed = content.count(b"\n"), mark.num_records
        if have < needed:
            raise run_files.damaged(path, f"it has {have} of the {needed} records of a checkpoint")
        if _sha256(content) != mark.sha256:
            raise run_files.damaged(path, "its checksum is wrong")
        return content

    def remove_states(self) -> None:
        """Remove every checkpoint: a run that is over needs none."""
        self._remove_states(run_files.saved_rounds(self.path))
        for _, _, path in self._files_of_clients():
            self._remove(path)

    def _remove_states(self, rounds: list[int]) -> None:
        for round in rounds:
            for path in reversed(run_files.state_files(self.path, round)):
                self._remove(path)


def new_folder(path: Path, fill: Callable[[Path], None], overwrite: bool) -> FolderLock:
    """Make a folder beside `path`, fill it, and rename it to `path`; it stays locked.

    So a run folder is never incomplete. An old run at `path` is removed if `overwrite` is set and
    no process writes to it.
    """
    check_free(path, overwrite)
    made = path.with_name(f".{path.name}.new")
    try:
        made.mkdir(parents=True, exist_ok=True)
        if any(made.iterdir()) and not (made / LOCK).exists():
            raise ValueError(f"{made} is in the way, and not a run's: move it")
    except OSError as error:
        raise not_writable(path, error) from error
    lock = FolderLock(made)
    try:
        _empty(made)  # left by a process that was killed here
        fill(made)
        check_free(path, overwrite)  # another process may have been faster
        if path.exists() and any(path.iterdir()):
            with FolderLock(path):
                shutil.rmtree(path)
        made.replace(path)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        lock.release()
        if isinstance(error, OSError):
            raise not_writable(path, error) from error
        raise
    lock.folder = path
    return lock


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def check_free(
    path: Path, overwrite: bool, remedy: str = "choose another, or set overwrite=True"
) -> None:
    """Raise if a path exists, unless it is empty, or an old run that may be overwritten."""
    if not path.exists():
        above = next((one for one in path.absolute().parents if one.exists()), path.absolute())
        if not above.is_dir():
            raise ValueError(f"{path} cannot be written (Not a directory): choose another")
        return
    is_empty = path.is_dir() and not any(path.iterdir())
    if not (run_files.is_run(path) or is_empty):
        refused = "is not a run, so it is not overwritten" if overwrite else "exists and is no run"
        raise ValueError(f"{path} {refused}: choose another")
    if not overwrite and not is_empty:
        raise ValueError(f"{path} exists: {remedy}")
    if others := run_files.strangers(path):
        named = ", ".join([*others[:3], *["..."] * (len(others) > 3)])
        raise ValueError(f"{path} has files that no run wrote ({named}): move them elsewhere first")
    if path.name in ("", ".."):  # the new folder is made beside it
        raise ValueError(f"{path} is the folder you are in, or above it: write its name instead")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def readable_json(content: Mapping[str, Any]) -> str:
    return run_files.to_json(content, indent=2) + "\n"
