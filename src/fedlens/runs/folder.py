"""A run's folder: what stands in it, each file written whole or not at all."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedlens.core import Memory, Tree
from fedlens.files import write_atomically
from fedlens.rounds import ClientMemory, State
from fedlens.trees import in_order

STATE = "checkpoint/state.json"


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @classmethod
    def create(
        cls, path: Path, overwrite: bool = False, files: Mapping[str, str] | None = None
    ) -> RunFolder:
        """A new folder with these files, in the place of an old run's if `overwrite`.

        It is made beside its place and moved there whole: a run is always known to be one.
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

    def read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content: dict[str, Any] = json.loads(path.read_bytes())
        except OSError as error:
            raise ValueError(f"{self.path} is not a run, it has no {name}: name one") from error
        except ValueError as error:
            raise _damaged(path, error) from error
        if not isinstance(content, dict):
            raise _damaged(path, "it holds no table")
        return content

    def summary(self, num_rounds: int) -> dict[str, Any]:
        """The summary, if it is there and of so many rounds: that of a killed run is of fewer."""
        if not (self.path / "summary.json").exists():
            return {}
        summary = self.read_json("summary.json")
        return summary if summary.get("rounds") == num_rounds else {}

    def append(self, record: Mapping[str, Any]) -> None:
        with (self.path / "rounds.jsonl").open("a") as file:
            file.write(to_json(record) + "\n")

    def read_records(self) -> list[dict[str, Any]]:
        """What was recorded, up to a line that was torn."""
        path = self.path / "rounds.jsonl"
        records = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        return records

    def cut_records(self, last: int) -> list[dict[str, Any]]:
        """Keep the records up to round `last`, and drop what came after or was torn."""
        kept = list(itertools.takewhile(lambda r: r["round"] <= last, self.read_records()))
        lines = "".join(to_json(record) + "\n" for record in kept)
        write_atomically(self.path / "rounds.jsonl", lines.encode())
        return kept

    @property
    def status(self) -> str | None:
        """What the summary says, or None if the run died before there was one."""
        there = (self.path / "summary.json").exists()
        return self.read_json("summary.json").get("status") if there else None

    def load_model(self) -> Tree:
        from safetensors.torch import load_file

        model: Tree = load_file(self.path / "model.safetensors")
        return model

    def save_model(self, model: Tree) -> None:
        write_atomically(self.path / "model.safetensors", _packed(model))

    def save_state(self, state: State) -> None:
        """The checkpoint: tensors first, then the small file that makes them count."""
        folder = self.path / "checkpoint"
        folder.mkdir(exist_ok=True)
        name = f"state-{state.round:06d}.safetensors"
        clients = sorted(state.clients.rows)
        trees: Memory = {"params": state.params, "buffers": state.buffers}
        trees |= {f"server.{key}": tree for key, tree in state.server.items()}
        trees |= {f"told.{key}": tree for key, tree in state.told.items()}
        if clients:
            rows = [state.clients.rows[client] for client in clients]
            for memory, tree in rows[0].items():
                trees[f"clients.{memory}"] = {
                    key: torch.stack([row[memory][key] for row in rows]) for key in tree
                }
        content = _packed(_flat(trees))
        write_atomically(folder / name, content)
        digest = hashlib.sha256(content).hexdigest()
        index = {"round": state.round, "file": name, "sha256": digest, "clients": clients}
        write_atomically(self.path / STATE, to_json(index).encode())
        for old in folder.glob("state-*.safetensors"):
            if old.name != name:
                old.unlink()

    @property
    def last_saved(self) -> int | None:
        """The round that the checkpoint holds, or None if the run died before the first one."""
        return self._index()["round"] if (self.path / STATE).exists() else None

    def _index(self) -> dict[str, Any]:
        index = self.read_json(STATE)
        if not {"round", "file", "sha256", "clients"} <= index.keys():
            raise _damaged(self.path / STATE, "it is incomplete")
        return index

    def load_state(self, device: torch.device) -> State:
        from safetensors.torch import load

        index = self._index()
        path = self.path / "checkpoint" / index["file"]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _damaged(path, error.strerror) from error
        if hashlib.sha256(content).hexdigest() != index["sha256"]:
            raise _damaged(path, "its checksum is wrong")
        trees = _nested(load(content))
        rows: dict[int, Memory] = {client: {} for client in index["clients"]}
        server: Memory = {}
        told: Memory = {}
        for name, tree in trees.items():
            kind, _, inner = name.partition(".")
            if kind in ("server", "told"):
                on_device = {key: t.to(device) for key, t in tree.items()}
                (server if kind == "server" else told)[inner] = on_device
            if kind == "clients":
                there = {key: t.to(device) for key, t in tree.items()}
                for place, client in enumerate(index["clients"]):
                    rows[client][inner] = {key: t[place].clone() for key, t in there.items()}
        params, buffers = (
            {key: t.to(device) for key, t in trees.get(name, {}).items()}
            for name in ("params", "buffers")
        )
        # Names come out of the file in any order.
        clients = {client: in_order(memory) for client, memory in rows.items()}
        return State(index["round"], params, buffers, server, told, ClientMemory(clients))


def _damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is damaged ({why}): start the run anew")


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse a place where something is, unless it is an old run that may go."""
    if not path.exists():
        return
    if not overwrite:
        raise ValueError(f"{path} exists: choose another, or set overwrite=True")
    is_run = all((path / name).is_file() for name in ("experiment.toml", "manifest.json"))
    is_empty = path.is_dir() and not any(path.iterdir())
    if not (is_run or is_empty):
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


def _packed(tensors: Tree) -> bytes:
    from safetensors.torch import save

    packed: bytes = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    return packed


def _flat(trees: Memory) -> Tree:
    return {f"{tree}/{name}": t for tree, named in trees.items() for name, t in named.items()}


def _nested(tensors: Tree) -> Memory:
    trees: Memory = {}
    for path, tensor in tensors.items():
        tree, _, name = path.partition("/")
        trees.setdefault(tree, {})[name] = tensor
    return trees
