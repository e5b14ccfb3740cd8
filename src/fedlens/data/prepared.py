"""The data sets that are too large to decode again for every run."""

from __future__ import annotations

from fedlens.core.federation import Dataset
from fedlens.data import store
from fedlens.data.places import Source, roots


def _prepared(name: str, source: Source, size: int) -> Dataset:
    """The set as `fedlens data prepare` made it."""
    for root in roots(source):
        place = root / f"{name}-{size}"
        if place.is_dir():
            return store.dataset(place)
    looked = ", ".join(str(root) for root in roots(source))
    raise ValueError(
        f"{name} of size {size} is not in {looked}: make it with `fedlens data prepare {name} "
        f"--size {size} --from METADATA --images IMAGES`"
    )


def inaturalist_user_120k(source: Source, *, size: int = 96) -> Dataset:
    """iNaturalist: 120,300 photographs of 1,203 species, `size` × `size`, by user."""
    return _prepared("inaturalist-user-120k", source, size)


def inaturalist_geo_30k(source: Source, *, size: int = 96) -> Dataset:
    """iNaturalist: 120,300 photographs, `size` × `size`, by S2 cell of at most 30,000."""
    return _prepared("inaturalist-geo-30k", source, size)


def inaturalist_geo_3k(source: Source, *, size: int = 96) -> Dataset:
    """iNaturalist: 120,300 photographs, `size` × `size`, by S2 cell of at most 3,000."""
    return _prepared("inaturalist-geo-3k", source, size)


def inaturalist_geo_1k(source: Source, *, size: int = 96) -> Dataset:
    """iNaturalist: 120,300 photographs, `size` × `size`, by S2 cell of at most 1,000."""
    return _prepared("inaturalist-geo-1k", source, size)


def inaturalist_geo_100(source: Source, *, size: int = 96) -> Dataset:
    """iNaturalist: 120,300 photographs, `size` × `size`, by S2 cell of at most 100."""
    return _prepared("inaturalist-geo-100", source, size)


def landmarks_user_160k(source: Source, *, size: int = 96) -> Dataset:
    """Landmarks: 164,172 photographs of 2,028 landmarks, `size` × `size`, by author."""
    return _prepared("landmarks-user-160k", source, size)
