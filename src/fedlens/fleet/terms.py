"""The terms of an experiment: data with a hash. A site approves them, and runs nothing else."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedlens.algorithm import Algorithm
from fedlens.algorithm.secure import FEWEST, enough
from fedlens.config.experiment import NUM_CLIENTS, Clients, Experiment, Named, as_plain
from fedlens.config.options import check, names_as_data, refuse_unknown, types_of
from fedlens.config.sections import Aggregation, Privacy, demand
from fedlens.core import Tree
from fedlens.core.federation import Dataset, Examples, Fit
from fedlens.data.partitions import natural_column
from fedlens.fleet.keys import fingerprint
from fedlens.fleet.payload import digest
from fedlens.runs.run import epochs_without_effect
from fedlens.setup.algorithm import make_algorithm
from fedlens.setup.network import make_network, normalisation
from fedlens.storage.reading import printable, shortened
from fedlens.storage.tables import LONGEST, parse_tables, to_value
from fedlens.version import __version__

logger = logging.getLogger(__name__)

NOT_TOLD = (
    *("attack", "dataset", "device", "evaluate", "faults", "normalise", "stop", "weights"),
    "weights_sha256",
)
"""The keys of an experiment that only the server uses. Sites take all others, and no more."""
TOLD = {f.name: f for f in fields(Experiment) if f.name not in NOT_TOLD}
TOLD_OF_CLIENTS = ("holdout", "per_round", "seed")


@dataclass(frozen=True)
class Images:
    """The images that a model takes."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # channels, height, width
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    fit: Fit = "stretch"
    multi_label: bool = False  # whether an image may have several of the classes

    def __post_init__(self) -> None:
        unique = 0 < len(self.classes) == len(set(self.classes))
        demand(unique, "data.classes", shortened(repr(self.classes)), "name each class once")
        demand(min(self.shape) > 0, "data.shape", self.shape, "give numbers above 0")
        for key, given in (("data.mean", self.mean), ("data.std", self.std)):
            fits = given is None or len(given) == self.shape[0]
            demand(fits, key, given, "give one number for each channel")


@dataclass(frozen=True)
class Peer:
    """A site whose numbers may be in a sum with those of others."""

    name: str
    number: int  # as which client it was approved
    key: str  # its public key

    def __post_init__(self) -> None:
        fingerprint(self.key)  # or a ValueError


def peers(keys: Mapping[str, str]) -> list[Peer]:
    """Sites by their public keys, numbered in their order."""
    return [Peer(name, number, key) for number, (name, key) in enumerate(keys.items())]


@dataclass(frozen=True)
class Content:
    """What terms consist of."""

    fedlens: str  # the version
    experiment: dict[str, Any]
    data: Images
    sites: tuple[Peer, ...] = ()  # with secure sums: all that may be in them
    frozen: str = ""  # the digest of `layers_sent_once`

    def __post_init__(self) -> None:
        if self.secure and len(self.sites) < FEWEST:
            raise ValueError(
                f"secure sums need the keys of {FEWEST} sites, and here are {len(self.sites)}: "
                "start the server by `fedlens fleet serve`, with a *.pub of each"
            )
        if not self.secure and self.sites:
            raise ValueError("only secure sums need the keys of sites: leave them out")
        for values in zip(*(astuple(one) for one in self.sites), strict=True):
            if len(set(values)) < len(values):
                raise ValueError("two sites have the same key, name or number: each has its own")

    @property
    def secure(self) -> bool:
        given = self.experiment.get("aggregation")
        return isinstance(given, dict) and given.get("secure") is True

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=True, allow_nan=False)


@dataclass(frozen=True)
class Terms:
    """An experiment as a site sees it. Terms that differ in anything have different hashes.

    The text may come from anyone: it is checked as data. Nothing in it is looked up by name,
    imported or called before the site's policy has allowed its `own_code`.
    """

    text: str
    content: Content = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "content", _content_of(self.text))

    @classmethod
    def of(cls, experiment: Experiment, dataset: Dataset, sites: Sequence[Peer] = ()) -> Terms:
        """`sites` are all that may take part, which only secure sums must know."""
        check_possible(experiment)
        if "test" in experiment.evaluate.on and not len(dataset.test):
            raise ValueError(
                f"{dataset.name} has no test images: set evaluate.on = [], and clients.holdout, by "
                "which sites test models on images of theirs"
            )
        mean, std = normalisation(experiment, dataset)
        whole = tuple(dataset.classes), dataset.shape, mean, std
        images = Images(*whole, dataset.fit, dataset.multi_label)
        told = _told(experiment.plain())
        given = experiment.aggregation
        whom = tuple(sites) if given is not None and given.secure else ()
        once = layers_sent_once(experiment, dataset)
        return cls(Content(__version__, told, images, whom, digest(once) if once else "").text)

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.content.data.classes

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.content.data.shape

    @property
    def algorithms(self) -> list[str]:
        return [one["name"] for one in self.content.experiment["algorithm"]]

    @property
    def rounds(self) -> int:
        return int(self.content.experiment["rounds"])

    @property
    def privacy(self) -> Privacy | None:
        given = self.content.experiment.get("privacy")
        with names_as_data():
            found: Privacy | None = None if given is None else check(given, Privacy, "privacy")
        return found

    @property
    def sums(self) -> Aggregation | None:
        """The sums that hide the updates of single sites, if they do."""
        given = self.content.experiment.get("aggregation")
        found: Aggregation | None = None
        if self.content.secure:
            found = check(given, Aggregation, "aggregation")
        return found

    @property
    def holds_out(self) -> bool:
        """Whether models are tested on examples of the sites."""
        return bool(self.content.experiment["clients"]["holdout"])

    @property
    def own_code(self) -> list[str]:
        """All that may be an import path, wherever it stands: code that is not Fedlens' own."""
        return [*dict.fromkeys(text for text in _texts_in(self.content.experiment) if ":" in text)]

    def experiment(self, examples: Examples) -> Experiment:
        """The experiment, with the site's own examples as its data set."""
        data = self.content.data
        none = examples.take(torch.arange(0))
        dataset = Dataset("the site's", examples, none, data.classes, data.mean, data.std)
        tables = dict(self.content.experiment)
        share = tables["clients"]["per_round"]
        # Without sums it does not matter to the training of one client how many others there are.
        count = share if isinstance(share, int) else len(self.content.sites) or 1
        clients = Clients(**tables.pop("clients"), count=count, partition=Named("iid"))
        made = Experiment(dataset=dataset, clients=clients, **tables)
        _check_complete(self.content.experiment, made.plain())
        return made

    def describe(self) -> list[str]:
        """What the terms contain: the main things in plain words, then all, line by line."""
        tables, data = self.content.experiment, self.content.data
        local, work = tables["local"], "steps" if "steps" in tables["local"] else "epochs"
        shape, names = "×".join(map(str, data.shape)), [shortened(n, 60) for n in data.classes]
        lines = [
            f"experiment {self.hash}",
            f"data:      images {shape} of {len(names)} classes: "
            f"{', '.join(names[:12])}{', ...' if len(names) > 12 else ''}",
            f"model:     {to_value(tables['model'])}",
            f"algorithm: {' + '.join(self.algorithms)}",
            f"training:  {self.rounds} rounds, {work} of each: {to_value(local[work])}, batches of "
            f"{local['batch_size']}, lr {to_value(local['lr'])}",
            f"code of its own: {', '.join(self.own_code) or 'none'}",
            *[f"layers that stay as they are, and come once: {self.content.frozen}"]
            * bool(self.content.frozen),
            *self._whom(),
            f"by Fedlens {self.content.fedlens}",
            "all of it:",
        ]
        everything = {**tables, **asdict(data)}
        lines += [f"  {key} = {to_value(value)}" for key, value in everything.items()]
        return [*map(printable, lines)]

    def _whom(self) -> list[str]:
        """With whom the updates of a site are added up, if they are."""
        if self.sums is None:
            return []
        each = (f"{one.name} {fingerprint(one.key)}" for one in self.content.sites)
        return [
            "sums with: the sites of these keys; a key that is the server's own hides nothing:",
            *(f"  {one}" for one in each),
        ]

    @property
    def fewest(self) -> int:
        """How many sites a sum has at least."""
        assert self.sums is not None
        return max(enough(self.sums.threshold, self.cohort), FEWEST)

    @property
    def cohort(self) -> int:
        """How many sites are asked in a round of secure sums."""
        clients = self.content.experiment["clients"]
        return Clients(**clients, count=len(self.content.sites)).cohort

    @property
    def guarantee(self) -> str:
        """What protects the updates of a site from those who see them, in words."""
        found, given = [], self.privacy
        if self.sums is not None:
            whose = f"{self.fewest} sites or more"
            told = f"secure sums: the server sees the sum of what {whose} send, and no part"
            lies = "" if self.fewest == self.cohort else ", unless it lies about who was lost"
            found.append(told + lies)
        if given is not None:
            found.append(f"privacy of each {given.unit}: noise {given.noise}, drawn at the site")
        return "; ".join(found) or "none: the server sees each update as it is"

    def effects(self) -> list[str]:
        """What the experiment means for the site's data, line by line.

        This runs the code that the terms name: the policy must have allowed it.
        """
        algorithm = self.algorithm
        leaves = ["its versions of Fedlens, Python and PyTorch", "how many examples it holds"]
        if "label_counts" in algorithm.discloses:
            leaves.append("how many examples it holds of each class")
        measured = "" if algorithm.covered else ", with the training loss"
        hidden = ", each with masks, so that only sums can be read" * (self.sums is not None)
        own = algorithm.personal
        sends = "updates of the model" if own is None else own.sends
        leaves.append(f"up to {self.most_updates} {sends}{measured}{hidden}")
        if self.holds_out:
            leaves.append(
                f"how many of its held-out examples each of up to {self.most_tested} models "
                "classifies correctly, which can tell how many there are of each class"
            )
        remembers = algorithm.remembers
        keeps = own is not None and not own.averaged
        channel = ", ".join(map(repr, algorithm.channel)) or "updates leave as they are"
        lines = [
            f"channel:   {channel}",
            f"guarantee: {self.guarantee}",
            "comes to the site: the model of each round, and the final one, which it keeps",
            f"leaves the site: {'; '.join(leaves)}",
            f"stays at the site: images, labels{', what it remembers' * remembers}"
            + ", the layers or the model that are its own" * keeps,
        ]
        return [*map(printable, lines)]

    @property
    def most_updates(self) -> int:
        """How many updates a site sends at most: one in each round, unless it is drawn again."""
        select = self.algorithm.select
        return self.rounds * (select.cohort_size if select.replacement else 1)

    @property
    def most_tested(self) -> int:
        """How many models a site tests at most: one before the first round, one after each."""
        return self.rounds + 1

    @cached_property
    def algorithm(self) -> Algorithm:
        nothing = Examples(
            torch.zeros((0, *self.shape), dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
        )
        return make_algorithm(self.experiment(nothing))


def _content_of(text: str) -> Content:
    """The content of terms; a ValueError unless every key is known and all values are its kind."""
    if len(text) > LONGEST:
        raise ValueError(f"the terms are longer than {LONGEST:,} bytes: they are no experiment's")
    tables = parse_tables(text, Path("terms.json"))
    if tables.get("fedlens") != __version__:
        other = shortened(str(tables.get("fedlens")), 20)
        raise ValueError(f"it is for Fedlens {other}, and this is {__version__}: install the same")
    content: Content = check(tables, Content, "terms")
    if content.text != text:
        raise ValueError("the terms are not written as Fedlens writes them: get its own server")
    given, hints = content.experiment, types_of(Experiment)
    refuse_unknown(given, TOLD, "")
    for key, one in TOLD.items():
        if key not in given and one.default is not None:
            raise ValueError(f"the terms lack {key}: the server must send it")
    with names_as_data():
        parts = {key: check(part, hints[key], key) for key, part in given.items()}
    if parts.get("privacy") is not None:
        check_private(parts["privacy"], parts.get("aggregation"))
    check_sums(parts.get("aggregation"))
    used = {key: as_plain(part) for key, part in parts.items()}
    refuse_unknown(given["clients"], TOLD_OF_CLIENTS, "clients.")
    _check_complete(given, used)
    return content


def _told(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of an experiment that sites receive."""
    clients = {key: part for key, part in tables["clients"].items() if key in TOLD_OF_CLIENTS}
    return {key: part for key, part in tables.items() if key in TOLD} | {"clients": clients}


def _check_complete(given: dict[str, Any], used: dict[str, Any]) -> None:
    """Raise ValueError if a default is used that was not given, so that nobody would read it."""
    for key, part in _told(used).items():
        if part != given.get(key):
            raise ValueError(f"the terms lack a part of {key}: the server must send every option")


def _texts_in(value: Any) -> Iterator[str]:
    """All text in nested tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(part)


def layers_sent_once(experiment: Experiment, dataset: Dataset) -> Tree:
    """The layers that are not trained and were loaded: sites cannot make them by themselves."""
    return {} if experiment.weights is None else make_network(experiment, dataset)[0].frozen


def for_fleet(experiment: Experiment) -> Experiment:
    """The experiment with `auto` resolved for a fleet: a site has one client, trained by one core.

    The engine `ray` becomes `processes` too: a Ray actor computes the same bytes.
    """
    engine = "processes" if experiment.engine in ("auto", "ray") else experiment.engine
    precision = "fp32" if experiment.precision == "auto" else experiment.precision
    return replace(experiment, engine=engine, precision=precision, device="cpu")


def of_sites(experiment: Experiment, sites: int | None) -> Experiment:
    """The experiment for a fleet, with `sites` clients if that is given."""
    experiment = for_fleet(experiment)
    if sites is None:
        return experiment
    asked = experiment.clients.per_round
    per_round = min(asked, sites) if isinstance(asked, int) else asked
    clients = replace(experiment.clients, count=sites, per_round=per_round)
    return replace(experiment, clients=clients)


def check_possible(experiment: Experiment) -> None:
    """Raise ValueError for an experiment that a fleet cannot run."""
    if not isinstance(experiment.model, Named):
        raise ValueError("model was given from Python: in a fleet it needs a name")
    clients, evaluate = experiment.clients, experiment.evaluate
    for what, given in (
        ("faults", experiment.faults),
        ("clients.devices", clients.devices),
        ("clients.unseen", clients.unseen or None),
    ):
        if given is not None:
            raise ValueError(
                f"{what} is for simulations, real sites fail by themselves: leave it out"
            )
    if evaluate.local_only or evaluate.fine_tune:
        raise ValueError(
            "sites of a fleet train no models of their own: leave evaluate.local_only and "
            "evaluate.fine_tune out"
        )
    if set(evaluate.on) - {"test"} or evaluate.twin:
        raise ValueError(
            "the server of a fleet has no training examples: evaluate on test alone, without a "
            "twin (clients.holdout tests the model at the sites)"
        )
    if experiment.privacy is not None:
        check_private(experiment.privacy, experiment.aggregation)
        if experiment.privacy.ledger is not None:
            raise ValueError("sites keep their own ledgers: leave privacy.ledger out")
    check_sums(experiment.aggregation)
    if experiment.attack is not None:
        raise ValueError("sites of a fleet do not attack: leave attack out, or simulate")
    if experiment.engine == "stacked":
        raise ValueError('each site trains one client: choose engine "processes" or "sequential"')
    algorithm = make_algorithm(_of_some(experiment))
    if algorithm.pace is not None:
        raise ValueError("a fleet runs in rounds: leave asynchronous algorithms out")
    if experiment.aggregation is not None and algorithm.select.replacement:
        raise ValueError(
            "a sum hides sites, and this algorithm may draw one site several times in a round: "
            "leave aggregation.secure out, or choose another algorithm"
        )
    if not algorithm.draw.by_client:
        raise ValueError(
            "what a client draws depends on the others: leave out the algorithm that draws so"
        )
    share = clients.per_round
    if algorithm.select.replacement and not isinstance(share, int):
        raise ValueError(
            f"clients.per_round is {share:g}, and a site may be drawn several times in a round: "
            "give a number of clients, so that sites know how often at most"
        )


def check_sums(given: Aggregation | None) -> None:
    if given is not None and given.secure == "simulated":
        raise ValueError(
            'aggregation.secure is "simulated", which hides nothing: for a fleet set it to true'
        )


def check_private(given: Privacy, sums: Aggregation | None) -> None:
    """Raise ValueError for [privacy] that sites cannot keep by themselves."""
    if given.unit != "example" and (sums is None or not sums.secure):
        raise ValueError(
            f'privacy.unit is "{given.unit}", whose noise the server of a fleet would have to add: '
            'choose "example", whose noise the sites draw, or set aggregation.secure'
        )
    if given.noise is None:
        raise ValueError(
            "privacy.epsilon costs each site another noise, and sites approve one: give "
            "privacy.noise (`fedlens privacy plan` says which)"
        )
    if given.count_noise is not None:
        raise ValueError(
            "privacy.count_noise is for simulations: leave it out, with what needs label counts"
        )


def say_without_effect(experiment: Experiment, num_sites: int) -> None:
    """Log a warning for each key that only a simulation uses; the server has `num_sites` sites."""
    clients, partition = experiment.clients, experiment.clients.partition
    found: dict[str, tuple[Any, str]] = {}
    if experiment.engine == "ray":
        found["engine"] = experiment.engine, "each site trains by itself"
    if experiment.device not in ("auto", "cpu"):
        where = "the server computes on the CPU, and a site where its own --device says"
        found["device"] = experiment.device, where
    if clients.count not in (None, NUM_CLIENTS, num_sites):  # NUM_CLIENTS is the default
        have = "1 site has its key" if num_sites == 1 else f"{num_sites} sites have their keys"
        found["clients.count"] = clients.count, f"{have} here"
    # A column that names clients has an effect: it decides which images become test images.
    if partition.name != "iid" and natural_column(partition.name, partition.options) is None:
        found["clients.partition"] = partition.name, "sites hold the images that they have"
    if clients.seed is not None and not clients.holdout:
        found["clients.seed"] = clients.seed, "nothing is dealt or held out"
    for key, (value, why) in found.items():
        logger.warning("%s is %s, which has no effect: %s", key, value, why)
    if line := epochs_without_effect(_of_some(experiment)):
        logger.warning("%s", line)


def _of_some(experiment: Experiment) -> Experiment:
    """The experiment with a number of clients: if it has none, enough for its rounds."""
    share = experiment.clients.per_round
    some = experiment.clients.count or (share if isinstance(share, int) else 1)
    return replace(experiment, clients=replace(experiment.clients, count=some))
