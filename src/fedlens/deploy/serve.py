"""A page for asking a model about photos, and the same for programs: POST an image to `classify`.

Nothing is written: photos and answers are in memory while they are asked for.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from fedlens.data.pictures import Undecodable
from fedlens.deploy.classifier import Classifier
from fedlens.deploy.explain import NoMaps
from fedlens.report.local import Given, serving_locally
from fedlens.report.palette import CSS

LARGEST = 64 * 2**20  # bytes of a photo
SECONDS = 60.0  # for sending it
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # others may start programs
HERE = Path(__file__).parent


@contextmanager
def serving_model(
    classifier: Classifier,
    name: str,
    host: str,
    port: int,
    top: int = 3,
    abstain: float | None = None,
    told: Sequence[str] = (),
) -> Iterator[str]:
    """Serve a page about a model inside the `with` block; yield its URL.

    `told` is what a person must know of its answers.
    """
    page = _page(classifier, name, abstain, told)
    explain, one_at_a_time = _has_maps(classifier, top), Lock()

    def classified(content: bytes) -> dict[str, Any]:
        from PIL import Image

        try:
            Image.MAX_IMAGE_PIXELS = None  # Pillow would print warnings; `read` has a limit
            Image.open(io.BytesIO(content), formats=FORMATS).close()
            pixels = classifier.preprocessing.read("the photo", lambda _: io.BytesIO(content))
        except Exception as error:  # decoders raise any exception on broken files
            why = error.why if isinstance(error, Undecodable) else "it is no image"
            return {"error": f"this cannot be read ({why}): give a photo, as JPEG or PNG"}
        with one_at_a_time:
            (answer,) = classifier.answers([("", pixels)], top, explain)
        found = answer.plain() | ({"answer": answer.at_least(abstain)} if abstain else {})
        del found["path"]
        shown = base64.b64encode(answer.picture).decode()
        return found | ({"heat_map": f"data:image/png;base64,{shown}"} if explain else {})

    def respond(name: str, content: bytes | None) -> Given | None:
        if name == "" and content is None:
            return Given(page)
        if name == "classify" and content is not None:
            found = classified(content)
            text = json.dumps(found).encode()
            return Given(text, "application/json", 400 if "error" in found else 200)
        return None

    with serving_locally(respond, host, port, LARGEST, SECONDS) as address:
        yield address


def _has_maps(classifier: Classifier, top: int) -> bool:
    """Whether the model has a convolution, whose maps show where it looks. It answers once."""
    blank = torch.zeros(classifier.preprocessing.shape, dtype=torch.uint8)
    try:
        list(classifier.answers([("", blank)], top, explain=True))
    except NoMaps:
        return False
    return True


def _page(classifier: Classifier, name: str, abstain: float | None, told: Sequence[str]) -> bytes:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    script = (HERE / "serve.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = environment.get_template("serve.html.jinja").render(
        name=name,
        classes=classifier.classes,
        several=classifier.multi_label,
        calibrated=classifier.calibration is not None,
        abstain=abstain,
        told=told,
        style=CSS,
        script=script,
        script_hash=digest,
    )
    return text.encode(errors="backslashreplace")
