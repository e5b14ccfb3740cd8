"""Image files, decoded in parallel into one array."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, BinaryIO, Literal, TypeVar

import numpy as np

from fedlens.core.federation import PATIENT, Dataset, Fit, LeftOut
from fedlens.data.arrays import (
    Column,
    Pixels,
    examples,
    held_out,
    in_bytes,
    mean_and_std,
    named_by_patient,
)
from fedlens.data.class_names import one_class_twice
from fedlens.data.dicom import ENDING as DICOM
from fedlens.data.dicom import read_dicom
from fedlens.data.places import DECODED, Counted, cache
from fedlens.storage import free_memory
from fedlens.storage.free_memory import num_cores
from fedlens.storage.kept import kept
from fedlens.storage.reading import reason
from fedlens.storage.words import count_of
from fedlens.version import __version__

if TYPE_CHECKING:
    from PIL import Image

ENDINGS = frozenset(  # what Pillow reads on every platform, and DICOM
    (*(".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm"), ".tif", ".tiff", ".webp")
) | {DICOM}


logger = logging.getLogger(__name__)

Part = Literal["train", "test", "validation"]
PARTS: tuple[Part, ...] = ("train", "test", "validation")

OnError = Literal["stop", "skip"]
"""How to treat image files that cannot be decoded: an error names all, or they are left out."""

WORTH = 2**22  # bytes of files whose pixels are kept for the next run
TEST_SHARE = 0.2  # of each class, if the data do not mark test images
MOST_NAMED = 100  # broken files named in one message
REMEDY = "repair or take them out"
GRAY = ("1", "L", "LA")  # the modes of Pillow images without colour
ENOUGH = 2  # times the size: a JPEG that is larger still is decoded at 1/2, 1/4 or 1/8
STRIP = 64  # rows that are compared at the same time
AHEAD = 64  # images that are decoded before the first of them is taken
MEGAPIXELS = 100.0  # of the largest image, and of all that are decoded at the same time


Opened = Callable[[Path], Path | BinaryIO]
T = TypeVar("T")
R = TypeVar("R")


class Undecodable(ValueError):
    """An image file that cannot be decoded, and why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} cannot be decoded ({why}): repair it or take it out")
        self.path, self.why = path, why


@dataclass(frozen=True)
class Form:
    """What image files become: None is whatever each file is."""

    size: int | tuple[int, int] | None = None  # a side, or height and width
    channels: int | None = None
    fit: Fit = "stretch"  # how a rectangular image gets the size
    megapixels: float = MEGAPIXELS  # files of more are refused


@dataclass(frozen=True)
class Found:
    """The image files of a data set, found in folders or listed in a file."""

    name: str
    base: Path
    names: Sequence[str]  # [N] as the user wrote them, relative to `base`
    labels: Sequence[int]  # [N]
    classes: Sequence[str]
    parts: Sequence[Part]  # [N]; all are "train" if test images are not marked
    columns: Mapping[str, Column] = field(default_factory=dict)  # [N]
    clients: str | None = None  # the column that names the client of each image
    remark: str | None = None  # a message for the user
    opened: Opened = Path  # how to open each of the files
    multi_label: bool = False  # labels are `label_sets`

    @property
    def files(self) -> list[Path]:
        return [self.base / name for name in self.names]

    def take(self, index: Sequence[int]) -> Found:
        return replace(
            self,
            names=[self.names[i] for i in index],
            labels=[self.labels[i] for i in index],
            parts=[self.parts[i] for i in index],
            columns={name: column[index] for name, column in self.columns.items()},
        )

    def of(self, part: Part) -> Found:
        return self.take([i for i, own in enumerate(self.parts) if own == part])

    def divided(self, share: float) -> Found:
        """With test images: a fixed share of each class, and of each client, if none are marked.

        Of images with several labels it is a share of all.
        """
        if "test" in self.parts:
            return self
        labels = [0] * len(self.labels) if self.multi_label else self.labels
        clients = None if self.clients is None else self.columns[self.clients].tolist()
        names = named_by_patient(self.names, self.columns.get(PATIENT))
        tests = held_out(names, labels, share, clients, self.base)
        return replace(self, parts=["test" if test else "train" for test in tests])


def dataset(
    found: Found,
    form: Form,
    test_share: float = TEST_SHARE,
    on_error: OnError = "stop",
    watch: Counted | None = None,
) -> Dataset:
    """The data set of these files. Without a size or channels, all must be as the first is.

    `watch` is called with the number of decoded images and the total.
    """
    found = found.divided(test_share)
    there = [part for part in PARTS if part in found.parts]
    found = found.take(sorted(range(len(found.parts)), key=lambda i: there.index(found.parts[i])))
    files = found.files
    make = partial(_decoded, found, form, watch)
    pixels, listed = kept(_place(found, form), ["pixels", "broken"], make)
    lost = dict(zip(map(int, listed[0]), listed[1].tolist(), strict=True))
    broken = [Undecodable(files[i], why) for i, why in lost.items()]
    if on_error == "stop":
        refuse(broken, f'{REMEDY}, or let them be left out with on_error = "skip"')
    if broken:
        found = found.take([i for i in range(len(files)) if i not in lost])
    made, first, labels = {}, 0, np.asarray(found.labels, np.int64)
    for part in there:
        end = first + list(found.parts).count(part)
        if first == end:
            refuse(broken, f"no {'training' if part == 'train' else part} image is left")
        own = examples(pixels, labels, found.columns, slice(first, end))
        made[part] = replace(own, multi_label=found.multi_label)
        first = end
    for line in one_class_twice(found.classes):
        logger.warning("%s: %s", found.name, line)
    if found.remark is not None:
        logger.warning("%s", found.remark)
    return Dataset(
        found.name,
        made["train"],
        made["test"],
        tuple(found.classes),
        *mean_and_std(made["train"].images),
        tuple(LeftOut(str(one.path), one.why) for one in broken),
        validation=made.get("validation"),
        fit=form.fit,
    )


def _place(found: Found, form: Form) -> Path | None:
    """Where the pixels of these files are kept, if decoding them takes a while."""
    import PIL

    files = [(str(file.absolute()), file.stat()) for file in found.files if file.exists()]
    if found.opened is not Path or sum(stat.st_size for _, stat in files) < WORTH:
        return None
    times = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in files]
    made_of = json.dumps([times, astuple(form), __version__, PIL.__version__])
    return cache() / DECODED / hashlib.sha256(made_of.encode()).hexdigest()


def _decoded(found: Found, form: Form, watch: Counted | None) -> list[Column]:
    """The pixels of the files that can be decoded; the numbers of the others, and why not."""
    shape = _first_shape(found, form)
    form = replace(form, channels=shape[2])
    pixels, broken = decode(found.files, shape, form, watch, found.opened)
    why = {one.path: one.why for one in broken}
    lost = [i for i, file in enumerate(found.files) if file in why]
    pixels = np.delete(pixels, lost, 0) if lost else pixels
    return [pixels, np.array([[*map(str, lost)], [why[found.files[i]] for i in lost]], str)]


def _first_shape(found: Found, form: Form) -> tuple[int, ...]:
    """The height, width and channels of the first image that can be decoded."""
    for file in found.files:
        with suppress(Undecodable):
            return read(file, form, found.opened).shape
    return (1, 1, 1)  # no image can be decoded, which the caller reports


def refuse(broken: Sequence[Undecodable], remedy: str = REMEDY) -> None:
    """Raise an error that names all files that cannot be decoded, if there are any."""
    if len(broken) == 1 and remedy.startswith(REMEDY):  # the error states this remedy itself
        raise broken[0]
    if broken:
        named = ", ".join(f"{one.path} ({one.why})" for one in broken[:MOST_NAMED])
        more = f" and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
        raise ValueError(
            f"{count_of(len(broken), 'image')} cannot be decoded, {named}{more}: {remedy}"
        )


def decode(
    paths: Sequence[Path],
    shape: tuple[int, ...],
    form: Form,
    watch: Counted | None = None,
    opened: Opened = Path,
) -> tuple[Pixels, list[Undecodable]]:
    """The pixels [N, H, W, channels] of image files, each of this shape [H, W, channels].

    Also returns the files that cannot be decoded, whose pixels are undefined. `watch` is called
    with the number of files done and their total.
    """
    needed = len(paths) * math.prod(shape)
    what = f"a set of {len(paths):,} images"
    free_memory.demand(what, {"pixels": needed}, "choose a smaller size")
    pixels = np.zeros((len(paths), *shape), np.uint8)

    def fill(i: int) -> Undecodable | None:
        try:
            image = read(paths[i], form, opened)
        except Undecodable as error:
            return error
        if image.shape != pixels.shape[1:]:
            height, width = image.shape[:2]
            raise ValueError(
                f"{paths[i]} is {width}×{height}, but the first image is {shape[1]}×{shape[0]}: "
                f"set size = {min(shape[:2])} or another, and all are resized to it"
            )
        pixels[i] = image
        return None

    done = in_parallel(fill, range(len(paths)), watch)
    return pixels, [one for one in done if one is not None]


def in_parallel(
    function: Callable[[T], R], given: Sequence[T], watch: Counted | None = None
) -> Iterator[R]:
    """What a function makes of each, in order, some ahead of who takes them.

    `watch` is called with the number done and the total.
    """
    with ThreadPoolExecutor(num_cores()) as pool:
        for start in range(0, len(given), AHEAD):
            some = given[start : start + AHEAD]
            for done, one in enumerate(pool.map(function, some), start + 1):
                yield one
                if watch is not None:
                    watch(done, len(given))


def read(path: Path, form: Form, opened: Opened = Path) -> Pixels:
    """The pixels [H, W, channels] of an image file."""
    with _opened(path, form.megapixels, opened) as file:
        return pixels_of(file, form)


def glance(path: Path, megapixels: float = MEGAPIXELS) -> tuple[tuple[int, int], bool]:
    """The width and height of an image file, and whether it is gray.

    A JPEG is decoded at an eighth of its size; the whole file is still read, so that a truncated
    file is found.
    """
    from PIL.ExifTags import Base

    with _opened(path, megapixels) as file:
        width, height = file.size
        file.draft(None, (1, 1))  # no effect on formats other than JPEG
        on_its_side = file.getexif().get(Base.Orientation, 1) in (5, 6, 7, 8)
        strips = range(0, file.height, STRIP)
        gray = all(_is_gray(file.crop((0, top, file.width, top + STRIP))) for top in strips)
        return (height, width) if on_its_side else (width, height), gray


def _is_gray(image: Image.Image) -> bool:
    colours = pixels_of(image, Form(channels=3))
    return all(bool((colours[..., 0] == colours[..., i]).all()) for i in (1, 2))


def open_image(file: Path | BinaryIO, megapixels: float = MEGAPIXELS) -> Image.Image:
    """Open an image without decoding it; raises ValueError if it has more megapixels."""
    from PIL import Image

    if isinstance(file, Path) and file.suffix.lower() == DICOM:
        return read_dicom(file, megapixels)
    Image.MAX_IMAGE_PIXELS = None  # Pillow would print warnings, and its limit has no key
    image = Image.open(file)
    num = image.width * image.height / 1e6
    if num > megapixels:
        image.close()
        raise ValueError(f"{num:,.0f} megapixels, more than megapixels = {megapixels:g}")
    return image


@contextmanager
def _opened(path: Path, megapixels: float, opened: Opened = Path) -> Iterator[Image.Image]:
    """Open an image file; every exception while it is open becomes an Undecodable.

    It waits while other threads decode too many pixels.
    """
    from PIL import UnidentifiedImageError

    try:
        with open_image(opened(path), megapixels) as file, _pixels.taking(file.width * file.height):
            yield file
    except UnidentifiedImageError as error:  # its message only repeats the path
        raise Undecodable(path, "it is cut short, or no image") from error
    except Exception as error:  # decoders raise any exception on broken files
        raise Undecodable(path, reason(error)) from error


class Budget:
    """An amount that threads share: each takes a part of it for a while, or waits for it."""

    def __init__(self, amount: float) -> None:
        self._amount = self._free = amount
        self._changed = Condition()

    @contextmanager
    def taking(self, part: float) -> Iterator[None]:
        part = min(part, self._amount)  # one that is too large takes all
        with self._changed:
            self._changed.wait_for(lambda: self._free >= part)
            self._free -= part
        try:
            yield
        finally:
            with self._changed:
                self._free += part
                self._changed.notify_all()


_pixels = Budget(MEGAPIXELS * 1e6)


def pixels_of(given: Image.Image, form: Form) -> Pixels:
    """The pixels [H, W, channels] of a Pillow image; without channels, gray stays gray."""
    from PIL import Image, ImageOps
    from PIL.ExifTags import Base

    size = (form.size, form.size) if isinstance(form.size, int) else form.size
    if size is not None and given.format == "JPEG":
        least = ENOUGH * max(size)
        given.draft(None, (least, least))
    is_upright = given.getexif().get(Base.Orientation, 1) == 1
    upright = given if is_upright else ImageOps.exif_transpose(given)
    is_deep = given.mode.startswith(("I", "F"))
    if is_deep:
        upright = Image.fromarray(in_bytes(np.asarray(upright)))
    channels = form.channels or (1 if is_deep or given.mode in GRAY else 3)
    mode = "L" if channels == 1 else "RGB"
    image = upright if upright.mode == mode else upright.convert(mode)
    if size is not None and image.size != size[::-1]:
        image = _fitted(image, size, form.fit)
    pixels = np.asarray(image)
    return pixels.reshape(*pixels.shape[:2], channels)


def _fitted(image: Image.Image, size: tuple[int, int], fit: Fit) -> Image.Image:
    """An image of this height and width."""
    from PIL import Image

    (width, height), (high, wide) = image.size, size
    if fit == "letterbox":
        scale = min(wide / width, high / height)
        inner = max(round(width * scale), 1), max(round(height * scale), 1)
        whole = Image.new(image.mode, (wide, high))  # black
        left, top = (wide - inner[0]) // 2, (high - inner[1]) // 2
        whole.paste(image.resize(inner, Image.Resampling.BILINEAR), (left, top))
        return whole
    box = None
    if fit == "crop":
        step = min(width / wide, height / high)
        x, y = max((width - wide * step) / 2, 0), max((height - high * step) / 2, 0)
        box = x, y, width - x, height - y
    return image.resize((wide, high), Image.Resampling.BILINEAR, box)
