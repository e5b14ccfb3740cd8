"""A model as one file that runs without Fedlens, checked against the model it is made of."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.config.consent import place_of_error
from fedlens.data import Source
from fedlens.data.published import fashion_mnist_mini
from fedlens.deploy.classifier import Classifier
from fedlens.storage.files import write_atomically
from fedlens.storage.reading import reason

Format = Literal["onnx", "torchscript", "safetensors"]
ENDINGS: dict[str, Format] = {
    ".onnx": "onnx",
    ".pt": "torchscript",
    ".safetensors": "safetensors",
}
NEEDED = ("onnx", "onnxscript", "onnxruntime")
CLOSE = 1e-3  # the largest difference between two probabilities of a class
CHECKED = 16  # images


class Probabilities(nn.Module):
    """Images of bytes in, probabilities of the classes out."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:  # [N, channels, H, W] uint8 -> [N, L]
        logits: Tensor = self.classifier(images)
        return self.classifier.probabilities(logits)


def export(classifier: Classifier, out: Path, kind: Format) -> float | None:
    """Write the model; return how far its probabilities were from PyTorch's, on real images.

    ONNX and TorchScript files take bytes of any size and return probabilities: the graph resizes,
    normalises and applies the softmax or sigmoid. A safetensors file has the tensors alone, and
    metadata that say how images are prepared. It cannot be run, so None is returned.
    """
    model = Probabilities(classifier).eval()
    if kind == "safetensors":
        write_atomically(out, _tensors(classifier))
        return None
    _check_one_way(classifier)
    images = [*real_images(classifier.preprocessing.shape[0])]
    content, run = (_onnx if kind == "onnx" else _torchscript)(model, images[0])
    with torch.no_grad():
        difference = max(float((run(some) - model(some)).abs().max()) for some in images)
    if not difference <= CLOSE:
        raise RuntimeError(f"the {kind} file differs from PyTorch by {difference:.2g}")
    write_atomically(out, content)
    return difference


def _check_one_way(classifier: Classifier) -> None:
    """Raise an error if a model branches on its input: a file would contain one branch only."""
    images = torch.zeros(2, 1, *classifier.preprocessing.shape)
    try:
        with torch.no_grad(), _quietly():
            torch.func.vmap(classifier.module, randomness="same")(images)
    except Exception as error:  # other errors of vmap do no harm here
        if "control flow" in str(error) or ".item()" in str(error):
            where = place_of_error(error).partition(": ")[0] or "in its forward pass"
            raise ValueError(
                f"the model looks at the values of a tensor ({where}), and a file would do "
                "for all images as for the first: take that out, or let --out end in .safetensors"
            ) from error


def real_images(channels: int) -> Iterator[Tensor]:  # [N, channels, H, W] uint8
    """Some images of Fashion-MNIST, in their own size and larger."""
    images = fashion_mnist_mini(Source()).test.images[:CHECKED].expand(-1, channels, -1, -1)
    yield images.contiguous()
    larger = F.interpolate(images.float(), (75, 61), mode="bilinear").round()
    yield larger.to(torch.uint8)


def _tensors(classifier: Classifier) -> bytes:
    from safetensors.torch import save

    said = {"classes": classifier.classes, **vars(classifier.preprocessing)}
    said["probabilities"] = "sigmoid" if classifier.multi_label else "softmax"
    if classifier.calibration is not None:
        said["temperature"] = classifier.calibration.temperature
    tensors = {name: t.contiguous() for name, t in classifier.module.state_dict().items()}
    content: bytes = save(tensors, {name: json.dumps(value) for name, value in said.items()})
    return content


Made = tuple[bytes, Callable[[Tensor], Tensor]]
"""The content of a file, and a function that runs it."""


def _torchscript(model: Probabilities, example: Tensor) -> Made:
    with _quietly():
        traced = torch.jit.trace(model, example)  # type: ignore[no-untyped-call]
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        return file.getvalue(), torch.jit.load(file)  # type: ignore[no-untyped-call]


def _onnx(model: Probabilities, example: Tensor) -> Made:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"ONNX needs {', '.join(missing)}: pip install 'fedlens[export]'")
    import onnx
    import onnxruntime

    sizes = {0: "images", 2: "height", 3: "width"}
    try:
        with _quietly():
            program: Any = torch.onnx.export(
                model,
                (example,),
                input_names=["images"],
                output_names=["probabilities"],
                dynamic_shapes=({axis: torch.export.Dim(name) for axis, name in sizes.items()},),
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        why = reason(error.__cause__ or error).partition(". ")[0]  # without its stack trace
        raise ValueError(
            f"torch cannot write this model as ONNX ({why}): let --out end in .pt"
        ) from error
    made = program.model_proto
    onnx.helper.set_model_props(made, {"classes": json.dumps(model.classifier.classes)})
    onnx.checker.check_model(made)
    content = made.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        (answer,) = session.run(None, {"images": images.numpy()})
        return torch.from_numpy(answer)

    return content, run


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress logs and warnings of exporters: the files that they write are checked."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
