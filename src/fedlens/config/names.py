"""What can be chosen by name, and the module of each function, which is imported on first use.

So names can be read and listed without PyTorch. The function has the same name, with _ for -.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fedlens.config.options import OWN, ByName

EngineName = Literal["auto", "sequential", "stacked", "processes", "ray"]
"""The values of `engine` in an experiment: one of ENGINES, or auto: the machine decides."""

ENGINES = ByName("engine", "fedlens.engines", {"sequential stacked processes ray": OWN})
"""Each is made from: the network, the training examples, the devices of the workers, other example
sets to evaluate, and how workers on other machines open images from disk (None: images are sent).
"""

SCHEDULES = ByName(
    "schedule",
    "fedlens.config",
    {"constant exponential step cosine polynomial piecewise warm-up": "schedules"},
)

ALGORITHMS = ByName(
    "algorithm",
    "fedlens.algorithms",
    {
        "fedavg lambda-sum fedprox fedavgm fedir fedvc lastfc fedns liadmm admm": OWN,
        "ceadmm": "admm",
        "celiadmm": "liadmm",
        "fedadmm": "admm",
        "fedadam fedyogi fedadagrad": "fedopt",
        "scaffold fednova feddyn median trimmed-mean krum geometric-median": OWN,
        "mda caf dnc": "by_distance",
        "bulyan meamed fltrust sign-guard norm-bound centred-clipping bucketing nnm": OWN,
        "qfedavg": OWN,
        "fedbn fedper fedrep fedbabu lg-fedavg": "own_layers",
        "ditto apfl pfedme per-fedavg": OWN,
        "moon fedala fedproto fine-tune local-only fedcm": OWN,
        "clip quantize top-k sign powersgd eden": OWN,
        "download": "quantize",
        "fedbuff fedasync": OWN,
    },
    schedules=SCHEDULES,
)

DEFENCES = frozenset(
    (
        *("median", "trimmed-mean", "krum", "geometric-median", "mda", "caf", "dnc", "bulyan"),
        *("meamed", "fltrust", "sign-guard", "norm-bound", "centred-clipping"),
        *("bucketing", "nnm"),  # before others
    )
)
"""The algorithms that are meant against hostile clients."""

MODELS = ByName(
    "model",
    "fedlens.models",
    {
        "alexnet alexnet-32": "alexnet",
        "byzfl-cnn": "small",
        "efficientnet-lite0": OWN,
        "fedns-cnn fedrep-cnn hsu-cnn lenet5 linear mcmahan-cnn": "small",
        "mobilenetv2": OWN,
        "opacus-cnn pfl-cnn": "small",
        "resnet18": OWN,
        "simple-cnn tanh-cnn tanh-vgg": "small",
        "vgg11": OWN,
    },
    libraries={"timm": "timm"},
)

LOSSES = ByName(
    "loss",
    "fedlens.algorithm.pieces",
    {"cross_entropy binary_cross_entropy focal double_softmax squared_error": "losses"},
)

OPTIMIZERS = ByName("optimizer", "fedlens.algorithm.pieces", {"sgd adam adamw": "optimizers"})

ANNEALS = ByName("anneal", "fedlens.algorithm.pieces", {"cosine linear": "anneal"})
"""How a learning rate may fall in the course of a client's round."""

METRICS = ByName(
    "metric",
    "fedlens.evaluation",
    {"balanced_accuracy kappa auroc average_precision ece": "metrics"},
)
"""Metrics that are measured only if `evaluate.metrics` names them."""

DEVICES = ByName("devices", "fedlens.rounds", {"alike synthetic trace": "devices"})

ATTACKS = ByName(
    "attack",
    "fedlens.attacks",
    {
        "sign-flip gaussian free-rider scale ipm alie min-max min-sum": "attack",
        "optimal-ipm optimal-alie mimic": "attack",
        "label-flip backdoor edge-case": "attack",
    },
)
"""What hostile clients do."""

MECHANISMS = ByName("mechanism", "fedlens.privacy", {"gaussian banded tree": "mechanisms"})
"""How the noise of the rounds of a private run goes together."""

CLIPS = ByName("clip", "fedlens.privacy", {"adaptive": "mechanisms"})
"""Norms of a private run that are no fixed number."""

PLAIN_PARTITIONS = ByName(
    "partition",
    "fedlens.data.partitions",
    {
        "iid proportions quantity-dirichlet power-law shards slices classes": "dealing",
        "dirichlet dirichlet-per-class": "dealing",
        "natural s2 published": "found",
        "fresh drawn": "by_draw",
    },
)
"""Partitions that only assign examples to clients, and change no example."""

PARTITIONS = ByName(
    "partition",
    "fedlens.data.partitions",
    {**PLAIN_PARTITIONS.modules, "noisy-labels shifted": "altered"},
    automatic="auto",
)

DATASETS = ByName(
    "dataset",
    "fedlens.data",
    {
        "fashion-mnist-mini fashion-mnist mnist cifar10 cifar100": "published",
        "tiny-imagenet": "folders",
        "femnist omniglot": "handwriting",
        "inaturalist-user-120k inaturalist-geo-30k inaturalist-geo-3k": "store",
        "inaturalist-geo-1k inaturalist-geo-100 landmarks-user-160k": "store",
        "folder": "folders",
        "csv": "csv_files",
        "npz": "numpy_files",
        "hugging-face": OWN,
        "at-sites": OWN,
    },
)

OWN_CLIENTS = {
    "femnist": "writer",
    "omniglot": "drawer",
    "inaturalist-user-120k": "user",
    "inaturalist-geo-30k": "cell",
    "inaturalist-geo-3k": "cell",
    "inaturalist-geo-1k": "cell",
    "inaturalist-geo-100": "cell",
    "landmarks-user-160k": "user",
}
"""The data sets that come with clients of their own, and the column that names them."""

ITEMS = (  # a paper, a module in the folder of its recipes, and the tables and figures there
    ("fedavg-cifar10", "setting", "headline figure12 figure13 figure14 figure16 figure17 figure18"),
    ("fedavg-cifar10", "setting", "architectures fedprox samples"),
    ("hsu2020", "distributions", "table1"),
    ("hsu2020", "tables", "table2 table3 table4 table5"),
    ("hsu2020", "distributions", "figure1 figure2 figure3"),
    ("hsu2020", "cifar", "figure4 figure4-pilot"),
    ("hsu2020", "tables", "figure5 figure6 figure7"),
    ("hsu2020", "cifar", "figure8"),
    ("hsu2020", "tables", "figure9"),
    ("hsu2020", "distributions", "figure10"),
    ("hsu2020", "tables", "composed"),
    ("fedns", "setting", "table1 table2 table3 figure1 figure2 figure3"),
    ("ghaemi", "algorithms", "centralised fedavg fedprox liadmm fedadmm"),
    ("ghaemi", "why_liadmm_fails", "why-liadmm-fails"),
    ("ghaemi", "algorithms", "samples"),
    ("dp", "central", "cifar10-dp-sgd fashion-mnist mnist pfl-cifar10"),
    ("dp", "methods", "methods"),
    ("personal", "boards", "pfllib-dir fedrep moon"),
    ("personal", "map", "map"),
    ("attacks", "bucketing", "bucketing"),
    ("attacks", "heat_map", "byzfl-heat-map"),
    ("attacks", "methods", "methods"),
    ("findings", "items", "double-softmax step-size lost-data liadmm fedns virtual-clients"),
    ("findings", "items", "fedns-network server-step communication importance traffic"),
)
RECIPES = ByName(
    "recipe",
    "fedlens.recipes",
    {
        f"{paper}/{item}": f"{paper.replace('-', '_')}.{module}"
        for paper, module, items in ITEMS
        for item in items.split()
    },
)

KINDS: dict[str, ByName] = {
    "algorithms": ALGORITHMS,
    "models": MODELS,
    "partitions": PARTITIONS,
    "devices": DEVICES,
    "attacks": ATTACKS,
    "engines": ENGINES,
    "losses": LOSSES,
    "metrics": METRICS,
    "optimizers": OPTIMIZERS,
    "schedules": SCHEDULES,
    "mechanisms": MECHANISMS,
    "clips": CLIPS,
    "anneals": ANNEALS,
    "datasets": DATASETS,
    "recipes": RECIPES,
}
"""What `fedlens list` lists."""

REPORTED = "reported"
OUTCOMES = (
    *(REPORTED, "surplus", "late", "unavailable"),
    *("absent", "dropped", "nan", "infinite", "huge", "malformed"),  # `reports.Faults`
    *("raised", "refused", "stale", "foreign"),  # of sites: see docs/fleet.md
)
"""The possible outcomes for a client that is asked to train. `surplus`: enough were faster."""

BY_CLIENT = "client_accuracy"
"""The accuracies of all clients, in the records of runs with few."""

TRUST = "trust"
"""How much each client of a round counts, in the records of runs whose server weighs clients."""

RECORD_FIELDS = (
    *("round", "seconds", "evaluation_seconds", "train_loss", "examples"),
    *("batches", "batches_total", "clients", "bytes_up", "bytes_down"),
    *(
        BY_CLIENT,
        TRUST,
        "lr",
        "clock",
        "failed",
        "failed_before",
        "attempts",
        "staleness",
        "workers_lost",
        "epsilon",
    ),
)
"""The fields of a record besides measures of the model and of the algorithm, and besides scheduled
numbers, whose names are their keys, with a dot (`server.lr`)."""

MEASURE_PREFIXES = (
    *("test_", "validation_", "train_", "client_accuracy_"),
    *("relative_accuracy", "backdoor_"),
)
"""How the names of the model's measures begin."""


NO_NAMES = ("path", "weights", "device")  # keys whose text may have a colon


def own_names(tables: Any, key: str = "") -> list[str]:
    """The names `module:function` in the plain tables of an experiment, wherever they are."""
    if isinstance(tables, Mapping):
        parts = [(part, key if inner == "name" else inner) for inner, part in tables.items()]
        return [name for part, inner in parts for name in own_names(part, inner)]
    if isinstance(tables, (list, tuple)):
        return [name for part in tables for name in own_names(part, key)]
    is_text = isinstance(tables, str) and ":" in tables and not tables.startswith("<")
    of_library = key == "model" and tables in MODELS
    return [tables] if is_text and key not in NO_NAMES and not of_library else []


def refuse_taken(scalars: Iterable[str]) -> None:
    """Refuse names of an algorithm's scalars that are used for something else."""
    for name in scalars:
        if name == "loss" or name in RECORD_FIELDS:
            raise ValueError(f"the scalar {name!r} is recorded already: choose another name")
        if name.startswith(MEASURE_PREFIXES) or "." in name:
            what = "a setting" if "." in name else "a measure of the model"
            raise ValueError(f"the scalar {name!r} has the name of {what}: choose another name")
