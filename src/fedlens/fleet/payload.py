"""The tensors in messages: their flat names, the form that they must have, and their bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from fedlens.algorithm.channel import OWN_MODEL
from fedlens.algorithm.channel import packed as packed_numbers
from fedlens.algorithm.channel import unpacked as unpacked_numbers
from fedlens.algorithm.pieces.upload import own_model
from fedlens.core import Facts, Memory, Plan, Tree
from fedlens.core.trees import bytes_of, map_tensors
from fedlens.engines import Sequential
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.download import DIFFERENCE
from fedlens.rounds.uploads import norm_of
from fedlens.rounds.work import Part, Shared, work_alone
from fedlens.runs.folder import from_bytes

PARTS = ("update", "counters", "extra", "scalars", "channel_scalars")
"""The fields of a client's `Part` that it sends."""
MEASURES = ("scalars", "channel_scalars")


def num_bytes(network: Network) -> int:
    """The bytes of a model."""
    return sum(t.nbytes for t in network.initial.values())


def flat(value: Any, path: str = "") -> Tree:
    """The tensors of nested dicts, by their paths."""
    if isinstance(value, Mapping):
        found: Tree = {}
        for name, part in value.items():
            assert "/" not in name, f"{name!r} is no name of a part"
            found |= flat(part, f"{path}/{name}" if path else name)
        return found
    return {path: value}


def nested(tree: Tree) -> dict[str, Any]:
    """The nested dicts of flat paths: the inverse of `flat`."""
    found: dict[str, Any] = {}
    for path, tensor in tree.items():
        *parents, name = path.split("/")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = tensor
    return found


def model(shared: Shared) -> Tree:
    """What a site is sent to train on."""
    return flat({"params": shared.params, "buffers": shared.buffers, "told": shared.told})


def difference(shared: Shared) -> Tree:
    """The same for a site that has the model of the round before; empty, if there is no such."""
    rest = {"buffers": shared.buffers, "told": shared.told}
    return flat({DIFFERENCE: shared.difference, **rest}) if shared.difference else {}


class Reply(NamedTuple):
    """What came back from a site: what it answered, or how it failed."""

    facts: Mapping[str, Any]
    tensors: Tree
    failed: str | None = None  # one of OUTCOMES
    reason: str = ""


def written(facts: Mapping[str, Any], tensors: Tree) -> tuple[str, bytes]:
    """Facts and tensors as they are sent."""
    return json.dumps(facts), to_wire(tensors) if tensors else b""


def read(facts: str, tensors: bytes) -> Reply:
    """The facts and tensors that `written` was given; a ValueError for anything else."""
    try:
        found = json.loads(facts)
    except RecursionError as error:
        raise ValueError("its facts are no facts") from error
    if not isinstance(found, dict):
        raise ValueError("it has no facts")
    return Reply(found, from_wire(tensors) if tensors else {})


def sent(part: Part, program: ClientProgram) -> Tree:
    """The tensors of its part that a client sends; measures have no noise, so none with privacy."""
    tree = flat({name: getattr(part, name) for name in PARTS})
    covered = program.algorithm.covered
    return {n: t for n, t in tree.items() if not (covered and n.partition("/")[0] in MEASURES)}


def packed(part: Part, shared: Shared, program: ClientProgram) -> Tree:
    """What travels of `sent`: the client's update as its channel packs it."""
    model, found = shared.params | shared.buffers, dict[str, Tensor]()
    for path, tensor in sent(part, program).items():
        kind, _, name = path.partition("/")
        if kind == "update" and program.algorithm.upload is own_model:
            found[f"{path}/{OWN_MODEL}"] = tensor.flatten()
        elif kind == "update":
            start, role = model[name].flatten(), program.layout.entries[name].role
            notes = {kind: tree[name][0] for kind, tree in part.notes.items() if name in tree}
            channel = program.algorithm.channel
            parts = packed_numbers(channel, tensor.flatten(), role, notes, start)
            found |= flat(parts, path)
        else:
            found[path] = tensor
    return found


def unpacked(tree: Tree, shared: Shared, program: ClientProgram, declared: Tree) -> Tree:
    """The inverse of `packed`, of the form `declared`; a ValueError for any other tensors."""
    model, left, found = shared.params | shared.buffers, dict(tree), dict[str, Tensor]()
    for path, like in declared.items():
        kind, _, name = path.partition("/")
        if kind == "update":
            prefix = f"{path}/"
            parts = {n.removeprefix(prefix): left.pop(n) for n in tree if n.startswith(prefix)}
            start, channel = model[name].flatten(), program.algorithm.channel
            found[path] = unpacked_numbers(channel, parts, like.numel(), start).view(like.shape)
        elif path in left:
            found[path] = left.pop(path)
    wrong = mismatch(found | left, declared)
    if wrong is not None:
        raise ValueError(wrong)
    return {path: found[path] for path in declared}


def received(tree: Tree, keep: Memory) -> Part:
    """The part of one client, from the tensors that it sent and the memory that it keeps."""
    fields = {name: {} for name in PARTS} | nested(tree)
    fields["scalars"] = fields["scalars"] or {"loss": torch.zeros(1)}  # with privacy: of no use
    return Part(**fields, keep=[keep], combined=False, borrowed=False)


def without_steps(program: ClientProgram, engine: Sequential, shared: Shared) -> Part:
    """What a client sends that takes no step: by this, all know its form."""
    none = torch.zeros((1, 0), dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.int64)
    facts = Facts(zero, none)
    plan = Plan(none[..., None], none)
    params, buffers, told = map_tensors((shared.params, shared.buffers, shared.told), itemgetter(0))
    memory = program.memory(params, buffers, told)
    (part,) = engine.map(program, shared, work_alone(plan, zero, facts, memory))
    return part


def mismatch(given: Tree, expected: Tree) -> str | None:
    """How tensors differ in name, shape or dtype from the expected ones, or None."""
    for what, names in (("lacks", expected.keys() - given), ("has", given.keys() - expected)):
        if names:
            return f"it {what} {min(names)}"
    for name, like in expected.items():
        tensor = given[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            return f"{name} is {_form(tensor)}, and should be {_form(like)}"
    return None


def digest(tree: Tree, *others: int) -> str:
    """A hash of all tensors, which identifies a model, and of numbers beside them."""
    found = hashlib.sha256(repr(others).encode())
    for name, tensor in sorted(tree.items()):
        found.update(f"{name!r} {_form(tensor)} ".encode())
        found.update(bytes_of(tensor))
    return found.hexdigest()


def norm(tree: Tree) -> float:
    """The norm of a client's update and `extra`; not finite if any number that it sends is not."""
    parts = {name: {} for name in PARTS} | nested(tree)
    trees = [parts["update"], *map_tensors([*parts["extra"].values()], lambda t: t[None])]
    others = [
        t.double().sum() for name in ("scalars", "channel_scalars") for t in parts[name].values()
    ]
    return float(norm_of(trees, sum(others, torch.zeros(1))))


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def to_wire(tensors: Tree) -> bytes:
    """The bytes of a safetensors file, which keeps no order: each name begins with its place.

    They are made here, for `safetensors` needs twice their memory.
    """
    head: dict[str, Any] = {}
    parts, end = list[memoryview](), 0
    for place, (name, t) in enumerate(tensors.items()):
        parts.append(bytes_of(t))
        begin, end = end, end + len(parts[-1])
        form = {"dtype": _code(t.dtype), "shape": [*t.shape], "data_offsets": [begin, end]}
        head[f"{place}/{name}"] = form
    text = json.dumps(head).encode()
    return b"".join((len(text).to_bytes(8, "little"), text, *parts))


def _code(dtype: torch.dtype) -> str:
    """The name of a dtype in a safetensors file, such as F32, BF16, I64, U8 or BOOL."""
    name = str(dtype).removeprefix("torch.")
    for word, letter in (("bfloat", "BF"), ("float", "F"), ("uint", "U"), ("int", "I")):
        name = name.replace(word, letter)
    return name.upper()


def from_wire(content: bytes) -> Tree:
    """The tensors that `to_wire` encoded, in their order; a ValueError for any other bytes."""
    try:
        found = from_bytes(content, torch.device("cpu"))
    except SafetensorError as error:
        raise ValueError(f"it is not a file of tensors: {error}") from error
    places = {int(path.partition("/")[0]): path for path in found}
    if len(places) != len(found):
        raise ValueError("two tensors have one place")
    return {path.partition("/")[2]: found[path] for _, path in sorted(places.items())}
