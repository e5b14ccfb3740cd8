"""A trained model with all that predictions need: its preprocessing and its classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedlens.config.experiment import Experiment
from fedlens.core.federation import Fit
from fedlens.data.layouts import images as images_below
from fedlens.data.pictures import MEGAPIXELS, Form, Opened, Undecodable, in_parallel, read
from fedlens.deploy.explain import heat_maps, picture
from fedlens.deploy.own_models import of_client
from fedlens.deploy.resizing import resized
from fedlens.evaluation.reliability import Calibration
from fedlens.models.weights import not_finite
from fedlens.runs.folder import RunFolder
from fedlens.setup.network import untrained
from fedlens.storage.reading import reading
from fedlens.storage.run_files import (
    BEST,
    EVALUATION,
    EXPERIMENT,
    MANIFEST,
    MODEL,
    RERUN,
    check_run,
    read_json,
    read_manifest,
    unfinished,
)
from fedlens.storage.tables import read_tables

BATCH = 64  # images that are classified at a time


@dataclass(frozen=True)
class Preprocessing:
    """How an image is prepared for the model, as in training."""

    shape: tuple[int, int, int]  # channels, height, width
    mean: tuple[float, ...]  # per channel, of images scaled to [0, 1]
    std: tuple[float, ...]
    fit: Fit = "stretch"

    def read(self, path: str | Path, opened: Opened = Path) -> Tensor:  # [channels, H, W] uint8
        """The pixels of an image file, upright, in the model's channels and size."""
        channels, height, width = self.shape
        pixels = read(Path(path), Form((height, width), channels, self.fit), opened)
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)

    def read_all(
        self,
        paths: Sequence[Path],
        broken: list[Undecodable],
        watch: Callable[[int, int], None] | None = None,
    ) -> Iterator[tuple[Path, Tensor]]:
        """The files that can be decoded, with their pixels; the others are added to `broken`.

        `watch` is called with the number of images that are read, and their total.
        """

        def tried(path: Path) -> Tensor | Undecodable:
            try:
                return self.read(path)
            except Undecodable as error:
                return error

        for path, found in zip(paths, in_parallel(tried, paths, watch), strict=True):
            if isinstance(found, Undecodable):
                broken.append(found)
            else:
                yield path, found

    def __call__(self, images: Tensor) -> Tensor:  # [N, channels, any H, any W] -> floats
        """Prepare images of bytes, 0 to 255, for the model.

        Images of another size are resized as in Pillow, up to the rounding of a byte.
        """
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != self.shape[0]:
            given = f"{str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
            raise ValueError(
                f"images are {given}: give bytes, uint8 [N, {', '.join(map(str, self.shape))}]"
            )
        scaled = resized(images.to(torch.float32), self.shape[1:], self.fit)
        scaled = scaled.round().clamp(0, 255) / 255
        mean, std = (
            torch.tensor(v, device=images.device)[:, None, None] for v in (self.mean, self.std)
        )
        return (scaled - mean) / std


class Answer(NamedTuple):
    """The prediction for an image: the most likely classes first."""

    path: str
    classes: list[tuple[str, float]]  # with their probabilities
    picture: bytes = b""  # a PNG of where the likeliest class is seen, if that was asked for
    labels: list[str] | None = None  # those it has, if an image may have several

    def plain(self) -> dict[str, Any]:
        best = [{"class": name, "probability": share} for name, share in self.classes]
        labels = {} if self.labels is None else {"labels": self.labels}
        return {"path": self.path, **labels, "classes": best}

    def at_least(self, probability: float) -> str | None:
        """The likeliest class; None if the model is less sure of it than this."""
        name, share = self.classes[0]
        return name if share >= probability else None


class Classifier(nn.Module):
    """Images of bytes in, logits out: the model of a run behind its own preprocessing.

    The logits are calibrated, if the run had images for that: their softmax says how often the
    model is right. `calibration` is what is known of this. With `multi_label` an image may have
    several of the classes.
    """

    def __init__(
        self,
        module: nn.Module,
        preprocessing: Preprocessing,
        classes: Sequence[str],
        calibration: Calibration | None = None,
        multi_label: bool = False,
    ) -> None:
        super().__init__()
        self.module, self.preprocessing, self.classes = module, preprocessing, tuple(classes)
        self.calibration, self.multi_label = calibration, multi_label

    def forward(self, images: Tensor) -> Tensor:  # [N, channels, H, W] uint8 -> [N, L]
        """The logits of the classes; a model may have more outputs, which are left out."""
        logits: Tensor = self.module(self.preprocessing(images))[:, : len(self.classes)]
        return logits if self.calibration is None else logits / self.calibration.temperature

    def probabilities(self, logits: Tensor) -> Tensor:  # [N, L] both
        """Of the classes: their softmax, or the sigmoid of each if an image may have several."""
        return logits.sigmoid() if self.multi_label else logits.softmax(1)

    def predict(self, paths: Iterable[str | Path], top: int = 1) -> Iterator[Answer]:
        """The `top` classes of each image file, in order; all, if an image may have several."""
        return self.answers(((path, self.preprocessing.read(path)) for path in paths), top)

    @torch.no_grad()
    def answers(
        self,
        images: Iterable[tuple[str | Path, Tensor]],
        top: int = 1,
        explain: bool = False,
        threshold: float = 0.5,
    ) -> Iterator[Answer]:
        """The same as `predict` for images that `preprocessing.read` has read, with their paths.

        With `explain`, answers have a picture of where the likeliest class is seen. If an image may
        have several labels, it has those whose probability is above `threshold`.
        """
        if top < 1:
            raise ValueError(f"top is {top}: choose 1 or more")
        most = len(self.classes) if self.multi_label else min(top, len(self.classes))
        for paths, pixels, logits in self.logits(images):
            best = self.probabilities(logits).topk(most, dim=1)
            pictures = [b""] * len(paths)
            if explain:
                heat = heat_maps(self.module, self.preprocessing(pixels), best.indices[:, 0])
                pictures = list(map(picture, pixels.cpu(), heat.cpu()))
            for path, shown, *found in zip(paths, pictures, *map(Tensor.tolist, best), strict=True):
                named = [(self.classes[k], share) for share, k in zip(*found, strict=True)]
                labels = [name for name, share in named if share > threshold]
                yield Answer(str(path), named, shown, labels if self.multi_label else None)

    @torch.no_grad()
    def logits(
        self, images: Iterable[tuple[str | Path, Tensor]]
    ) -> Iterator[tuple[list[str | Path], Tensor, Tensor]]:
        """The paths of some images, their pixels and their logits [B, L], batch by batch."""
        device, left = next(self.module.parameters()).device, iter(images)
        while batch := list(islice(left, BATCH)):
            pixels = torch.stack([x for _, x in batch]).to(device)
            yield [path for path, _ in batch], pixels, self(pixels)


def load(
    run: str | Path,
    module: nn.Module | None = None,
    *,
    best: bool = False,
    client: str | None = None,
    trust_code: bool = False,
) -> Classifier:
    """The model of a run, in eval mode, with its preprocessing and its classes.

    It is the last or, with `best`, the model that was best on validation (evaluate.best); with
    `client`, a name or a number, the model that this client is measured by. `module` is needed
    only if the run's model was given from Python: one with the same layers. `trust_code` is as in
    `Experiment.read`.
    """
    folder = Path(run)
    check_run(folder, [EXPERIMENT])
    if module is not None and not isinstance(module, nn.Module):
        raise ValueError(f"load is given a {type(module).__name__}: give an nn.Module, or none")
    if best and not (folder / BEST).is_file():
        raise ValueError(f"{folder} has no {BEST}: run it with evaluate.best = true, to its end")
    file = folder / (BEST if best else MODEL)
    if not file.is_file():
        raise ValueError(unfinished(folder))
    manifest = read_manifest(folder)
    about, classes = manifest.get("images"), manifest.get("classes")
    if not isinstance(about, dict) or not isinstance(classes, list) or not classes:
        raise ValueError(f"{folder} does not say how its images were prepared: run it again")
    with reading(folder / MANIFEST, RERUN):
        is_floats, preprocessing = about["floats"], _preprocessing(about)
    if is_floats:
        raise ValueError(
            f"{folder} was trained on tensors of floats, so nobody knows how an image becomes one: "
            "load model.safetensors into your module"
        )
    if module is None:
        if str(read_tables(folder / EXPERIMENT).get("model")).startswith("<"):
            raise ValueError(
                f"{folder} trained a module that was given from Python: call "
                f"fl.load({str(folder)!r}, module) with such a module"
            )
        described = Experiment.read(folder / EXPERIMENT, trust_code=trust_code)
        module = untrained(described, preprocessing.shape, len(classes))
    own = RunFolder(folder).load_model(file.name)
    if client is not None:
        own |= of_client(folder, client, best=best, trust_code=trust_code)
    if bad := not_finite(own):
        raise ValueError(
            f"{file} has numbers that are not finite, in {bad[0]}, so it cannot classify: run the "
            "experiment again, with a smaller local.lr if it diverged"
        )
    try:
        module.load_state_dict(own)
    except RuntimeError as error:
        raise ValueError(
            f"{file} does not fit the model ({str(error).splitlines()[-1].strip()}): "
            "give the module that the run trained"
        ) from error
    known = read_json(folder / EVALUATION) if client is None else None  # of the common model
    calibration, several = Calibration.of(known or {}, file.name), manifest.get("multi_label")
    names = [*map(str, classes)]
    return Classifier(module.float(), preprocessing, names, calibration, several is True).eval()


def _preprocessing(about: Mapping[str, Any]) -> Preprocessing:
    """Read the preprocessing from a manifest."""
    channels, height, width = map(int, about["shape"])
    mean, std = (tuple(map(float, about[name])) for name in ("mean", "std"))
    if min(channels, height, width) < 1 or not len(mean) == len(std) == channels:
        raise ValueError("its images have no size, or a mean and std of other channels")
    if channels * height * width > MEGAPIXELS * 1e6:
        raise ValueError(f"its images are {channels}×{height}×{width}")
    fit = about.get("fit", "stretch")  # runs of earlier versions do not say it
    if fit not in get_args(Fit):
        raise ValueError(f"its images are fitted by {fit!r}")
    return Preprocessing((channels, height, width), mean, std, fit)


def image_files(given: Sequence[Path]) -> list[Path]:
    """The files named, and those below the folders named, in order."""
    found: list[Path] = []
    for path in given:
        inside = sorted(images_below(path)) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path} has no images: name files or folders of images")
        if not inside[0].is_file():
            raise ValueError(f"there is no {path}: name files or folders of images")
        found += inside
    return found
