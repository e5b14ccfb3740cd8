"""DICOM files: the window that they name, else from the darkest to the brightest pixel."""

import numpy as np
import pytest

from fedlens.data.pictures import Form, read

pydicom = pytest.importorskip("pydicom")
VALUES = np.array([[0, 100], [200, 400]], np.uint16)


def write(path, values=VALUES, **changes):
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    made.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    made.Rows, made.Columns = values.shape[:2] if values.ndim == 2 else values.shape[-3:-1]
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.BitsAllocated = made.BitsStored = 8 * values.itemsize
    made.HighBit, made.PixelRepresentation = made.BitsStored - 1, 0
    made.PixelData = values.tobytes()
    for name, value in changes.items():
        setattr(made, name, value)
    made.save_as(path, enforce_file_format=True)
    return path


def shades(path, channels=1):
    return read(path, Form(channels=channels))[..., 0].flatten().tolist()


def test_without_a_window_the_darkest_is_0_and_the_brightest_255(tmp_path):
    assert shades(write(tmp_path / "a.dcm")) == [0, 64, 127, 255]
    assert read(tmp_path / "a.dcm", Form(channels=3)).shape == (2, 2, 3)


def test_the_window_of_the_file_is_shown_and_the_rest_clipped(tmp_path):
    """Width 201 around 200.5: from 100 to 300 of what the slope and the intercept make."""
    window = {"WindowCenter": 200.5, "WindowWidth": 201}
    assert shades(write(tmp_path / "a.dcm", **window)) == [0, 0, 127, 255]
    shifted = write(tmp_path / "b.dcm", **window, RescaleSlope=1, RescaleIntercept=100)
    assert shades(shifted) == [0, 127, 255, 255]
    several = {"WindowCenter": [200.5, 40], "WindowWidth": [201, 80]}
    assert shades(write(tmp_path / "c.dcm", **several)) == [0, 0, 127, 255]


def test_low_values_that_mean_white_are_turned_round(tmp_path):
    path = write(tmp_path / "a.dcm", PhotometricInterpretation="MONOCHROME1")
    assert shades(path) == [255, 191, 128, 0]


def test_colour_and_several_frames(tmp_path):
    colour = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    about = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 0}
    assert np.array_equal(
        read(write(tmp_path / "a.dcm", colour, **about), Form(channels=3)), colour
    )
    frames = np.stack([VALUES, VALUES + 7])[..., None]
    assert shades(write(tmp_path / "b.dcm", frames, NumberOfFrames=2)) == [0, 64, 127, 255]


def test_a_damaged_file_and_one_too_large_are_named(tmp_path):
    path = write(tmp_path / "a.dcm")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"a\.dcm"):
        read(path, Form(channels=1))
    with pytest.raises(ValueError, match="megapixels"):
        read(write(tmp_path / "b.dcm"), Form(channels=1, megapixels=1e-6))


def test_without_pydicom_a_line_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.dcm")
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    with pytest.raises(ValueError, match=r"fedlens\[dicom\]"):
        read(path, Form(channels=1))
