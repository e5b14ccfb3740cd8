"""The data sets that are too large to decode again for every run."""

from __future__ import annotations

from collections.abc import Callable

from fedlens.data import store
from fedlens.data.places import Source, roots
from fedlens.federation import Dataset


def _prepared(name: str) -> Callable[..., Dataset]:
    def load(source: Source, *, size: int = 96) -> Dataset:
        """The set as `fedlens data prepare` made it, its images `size` × `size`."""
        for root in roots(source):
            place = root / f"{name}-{size}"
            if place.is_dir():
                return store.dataset(place)
        looked = ", ".join(str(root) for root in roots(source))
        raise ValueError(
            f"{name} of size {size} is not in {looked}: make it with `fedlens data prepare {name} "
            f"--size {size} --from METADATA --images IMAGES`"
        )

    return load


inaturalist_user_120k = _prepared("inaturalist-user-120k")
inaturalist_geo_30k = _prepared("inaturalist-geo-30k")
inaturalist_geo_3k = _prepared("inaturalist-geo-3k")
inaturalist_geo_1k = _prepared("inaturalist-geo-1k")
inaturalist_geo_100 = _prepared("inaturalist-geo-100")
landmarks_user_160k = _prepared("landmarks-user-160k")
