"""The tables of data sets that are not fetched say what the code takes."""

from fedlens.data import DATASETS
from fedlens.data.curation import SETS
from tests.test_docs import DATA, documented_options, options_in_code


def test_the_options_of_sets_put_in_place_and_prepared_are_documented():
    own = {name: DATASETS[name] for name in ("tiny-imagenet", "femnist", "omniglot")}
    assert documented_options(DATA, "put in place", 3) == options_in_code(own)
    prepared = {name: DATASETS[name] for name in SETS}
    assert documented_options(DATA, "prepared", 2) == options_in_code(prepared)
