"""A run's folder, as the run writes it: each file whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedlens.core import Tree
from fedlens.files import write_atomically
from fedlens.rounds import State
from fedlens.run_files import (
    CHECKPOINT,
    MODEL,
    ROUNDS,
    STATE,
    damaged,
    is_run,
    read_records,
    read_state_index,
    read_summary,
)
from fedlens.runs.checkpoint import describe, from_bytes, restore, to_bytes


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @classmethod
    def create(
        cls, path: Path, overwrite: bool = False, files: Mapping[str, str] | None = None
    ) -> RunFolder:
        """A new folder with these files, in the place of an old run's if `overwrite`.

        It is made beside `path` and moved there whole, so that a run is always known to be one.
        """
        check_free(path, overwrite)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
            made.chmod(0o755)
            for name, text in (files or {}).items():
                write_atomically(made / name, text.encode())
            if path.exists():
                shutil.rmtree(path)
            made.replace(path)
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"{path} cannot be written ({reason}): choose another") from error
        return cls(path)

    def write(self, name: str, text: str) -> None:
        write_atomically(self.path / name, text.encode())

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self.write(name, readable_json(content))

    def summary(self, num_rounds: int) -> dict[str, Any]:
        """The summary, if it is there and of so many rounds: that of a killed run is of fewer."""
        summary = read_summary(self.path)
        return summary if summary.get("rounds") == num_rounds else {}

    def append(self, record: Mapping[str, Any]) -> None:
        with (self.path / ROUNDS).open("a", encoding="utf-8") as file:
            file.write(to_json(record) + "\n")

    def cut_records(self, last: int) -> list[dict[str, Any]]:
        """Keep the records up to round `last`, and drop what came after or was torn."""
        kept = [record for record in read_records(self.path) if record["round"] <= last]
        lines = "".join(to_json(record) + "\n" for record in kept)
        write_atomically(self.path / ROUNDS, lines.encode())
        return kept

    def load_model(self) -> Tree:
        from safetensors.torch import load_file

        model: Tree = load_file(self.path / MODEL)
        return model

    def save_model(self, model: Tree) -> None:
        write_atomically(self.path / MODEL, to_bytes(model))

    def save_state(self, state: State) -> None:
        """The checkpoint: tensors first, then the small file that makes them count."""
        folder = self.path / CHECKPOINT
        folder.mkdir(exist_ok=True)
        name = f"state-{state.round:06d}.safetensors"
        tensors: Tree = {}
        described = describe(state, tensors)
        content = to_bytes(tensors)
        write_atomically(folder / name, content)
        digest = hashlib.sha256(content).hexdigest()
        index = {"round": state.round, "file": name, "sha256": digest, "state": described}
        write_atomically(self.path / STATE, to_json(index).encode())
        for old in folder.glob("state-*.safetensors"):
            if old.name != name:
                old.unlink()

    @property
    def last_saved(self) -> int | None:
        """The round that the checkpoint holds, or None if the run died before the first one."""
        index = read_state_index(self.path)
        return None if index is None else index["round"]

    def load_state(self, device: torch.device) -> State:
        index = read_state_index(self.path)
        assert index is not None, "there is no checkpoint: ask for last_saved first"
        path = self.path / CHECKPOINT / index["file"]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise damaged(path, error.strerror) from error
        if hashlib.sha256(content).hexdigest() != index["sha256"]:
            raise damaged(path, "its checksum is wrong")
        try:
            return restore(State, index["state"], from_bytes(content, device))
        except (LookupError, TypeError) as error:
            raise damaged(path, "it is of another version of Fedlens") from error


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse a path that exists, unless it is an old run that may be overwritten."""
    if not path.exists():
        return
    if not overwrite:
        raise ValueError(f"{path} exists: choose another, or set overwrite=True")
    is_empty = path.is_dir() and not any(path.iterdir())
    if not (is_run(path) or is_empty):
        raise ValueError(f"{path} is not a run, so it is not overwritten: choose another")


def to_json(content: Any, indent: int | None = None) -> str:
    """JSON, in which a number that is not finite is null."""

    def clean(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, Mapping):
            return {key: clean(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(part) for part in value]
        return value

    return json.dumps(clean(content), indent=indent, ensure_ascii=False, allow_nan=False)


def readable_json(content: Mapping[str, Any]) -> str:
    return to_json(content, indent=2) + "\n"
