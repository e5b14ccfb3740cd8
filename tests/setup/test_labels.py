"""What is refused where images may have several labels."""

from typing import Any

import pytest

import fedlens as fl
from fedlens.config.names import ALGORITHMS, ATTACKS, LOSSES, METRICS, PARTITIONS
from fedlens.setup import build, federate
from fedlens.setup.labels import BY_CLASS
from tests.films import LOSS, described
from tests.toys import toy

PARTITIONED: dict[str, dict[str, Any]] = {
    "classes": {"per_client": 1},
    "dirichlet": {"alpha": 1.0},
    "fresh": {"per_class": 1},
}
PARTITIONED |= {"dirichlet-per-class": {"alpha": 1.0}, "drawn": {"per_class": 1}}
PARTITIONED |= {"published": {"path": "p.csv"}}
OPTIONS: dict[str, dict[str, Any]] = {
    "backdoor": {"target": 0},
    "edge-case": {"source": 0, "target": 1},
}


def refused(key: str, name: str) -> dict[str, Any]:
    if key == "algorithm":
        return {"algorithm": name}
    if key == "attack":
        return {"attack": {"name": name, "clients": 1, **OPTIONS.get(name, {})}}
    if key == "evaluate.metrics":
        return {"evaluate": fl.Evaluate(metrics=[name])}
    of = {"name": name, **PARTITIONED.get(name, {})}
    return {"clients": fl.Clients(count=2, partition=of)}


@pytest.mark.parametrize(
    ("key", "name"), [(key, name) for key, names in BY_CLASS.items() for name in names]
)
def test_what_counts_on_one_class_an_image_is_refused_in_one_line(key, name):
    with pytest.raises(ValueError, match="several labels") as error:
        build(described(**refused(key, name)))
    assert "\n" not in str(error.value) and str(error.value).startswith(f'{key} is "{name}"')


def test_the_names_that_are_refused_exist():
    known = {"algorithm": ALGORITHMS, "clients.partition": PARTITIONS, "attack": ATTACKS}
    for key, names in BY_CLASS.items():
        assert {*names} <= {*{**known, "evaluate.metrics": METRICS}[key]}


ALONE = fl.Clients(count=2, partition={"name": "shifted", "of": {"name": "shards"}})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        *[({"loss": name}, "binary_cross_entropy") for name in LOSSES if name != LOSS],
        ({"local": fl.LocalTraining(class_balance=0.9)}, "positive_weight"),
        ({"outputs": 5}, "outputs"),
        ({"clients": ALONE}, "shards"),
    ],
)
def test_other_settings_that_do_not_fit_are_refused(changes, word):
    with pytest.raises(ValueError, match=word) as error:
        federate(described(**changes))
    assert "\n" not in str(error.value)


def test_data_of_one_class_an_image_do_not_have_the_loss_of_several():
    with pytest.raises(ValueError, match="each image"):
        build(described(dataset=toy()))


@pytest.mark.parametrize("partition", ["iid", "power-law", "quantity-dirichlet", "proportions"])
def test_partitions_that_read_no_classes_stay(partition):
    options: dict[str, Any] = {"power-law": {"exponent": 1.0}, "quantity-dirichlet": {"alpha": 1.0}}
    options["proportions"] = {"sizes": [0.5, 0.5]}
    named = {"name": partition, **options.get(partition, {})}
    setup = build(described(clients=fl.Clients(count=2, partition=named)))
    assert setup.federation.num_examples(0) == 40
