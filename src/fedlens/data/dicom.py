"""DICOM files, as scanners of hospitals write them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedlens.data.arrays import in_bytes

if TYPE_CHECKING:
    from PIL import Image

ENDING = ".dcm"


def read_dicom(path: Path, megapixels: float) -> Image.Image:
    """The first frame of a file, gray or in colour.

    Gray is shown in the first window that the file names; without one, from the darkest to the
    brightest pixel. Where low values mean white (MONOCHROME1), they are turned round.
    """
    from PIL import Image

    try:
        from pydicom import dcmread
        from pydicom.pixels.processing import apply_modality_lut
    except ModuleNotFoundError as error:
        raise ValueError('DICOM needs pydicom: pip install "fedlens[dicom]"') from error
    about = dcmread(path)
    if (num := about.Rows * about.Columns / 1e6) > megapixels:
        raise ValueError(f"{num:,.0f} megapixels, more than megapixels = {megapixels:g}")
    frames = about.pixel_array
    frame = frames[0] if int(about.get("NumberOfFrames", 1) or 1) > 1 else frames
    if about.SamplesPerPixel == 3:
        return Image.fromarray(frame.astype(np.uint8))
    values = apply_modality_lut(frame, about)
    centre, width = (_first(about.get(name)) for name in ("WindowCenter", "WindowWidth"))
    ends = None
    if centre is not None and width is not None:
        ends = centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2
    shown = in_bytes(values, ends)
    is_turned = about.PhotometricInterpretation == "MONOCHROME1"
    return Image.fromarray(255 - shown if is_turned else shown)


def _first(value: object) -> float | None:
    """A number of a file, or the first of several; None if there is none."""
    several: Any = value if hasattr(value, "__iter__") else [value]
    return next((float(one) for one in several if one is not None), None)
