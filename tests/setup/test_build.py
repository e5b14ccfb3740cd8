import json
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.engines import Processes, Sequential, Stacked
from fedlens.setup import build, partition
from fedlens.setup.devices import automatic_engine

OWN = """
    from dataclasses import replace

    import torch
    from torch import nn

    import fedlens as fl
    from fedlens.algorithm.pieces import Constant

    def stripes(source, *, num_examples: int = 40) -> fl.Dataset:
        labels = torch.arange(num_examples) % 2
        images = torch.zeros(num_examples, 1, 4, 4) + labels.view(-1, 1, 1, 1)
        part = fl.Examples(images, labels)
        return fl.Dataset("stripes", part, part, ("dark", "light"))

    class Net(nn.Module):
        def __init__(self, shape, num_classes, *, width: int = 3):
            super().__init__()
            self.inner = nn.Linear(16, width)
            self.outer = nn.Linear(width, num_classes)

        def forward(self, x):
            return self.outer(self.inner(x.flatten(1)).relu())

    def halves(pool, *, swap: bool = False):
        parts = torch.arange(len(pool.examples)).chunk(pool.num_clients)
        return fl.Holdings.of(list(reversed(parts)) if swap else list(parts))

    @fl.paper
    def slowly(base: fl.Algorithm, share: float = 0.5) -> fl.Algorithm:
        return replace(base, weigh=Constant(share))

    def five(*handed):
        return 5

    def too_few(pool):
        return fl.Holdings.of([torch.arange(3)])
"""


@pytest.fixture
def own_code(tmp_path):
    """An experiment file whose parts are functions of the module `own_code` beside it."""
    (tmp_path / "own_code.py").write_text(textwrap.dedent(OWN))
    content = {
        "dataset": {"name": "own_code:stripes", "num_examples": 20},
        "model": {"name": "own_code:Net", "width": 5},
        "rounds": 2,
        "engine": "sequential",
        "clients": {"count": 2, "partition": {"name": "own_code:halves", "swap": True}},
        "algorithm": [{"name": "own_code:slowly", "share": 0.25}],
    }
    file = tmp_path / "own.json"
    file.write_text(json.dumps(content))
    yield file
    sys.modules.pop("own_code", None)


def test_data_models_partitions_and_algorithms_of_ones_own_stand_beside_the_experiment(own_code):
    before = list(sys.path)
    experiment = fl.Experiment.read(own_code)
    assert sys.path == before
    setup = build(experiment)
    assert len(setup.dataset.train) == 20
    assert setup.network.params["inner.weight"].shape == (5, 16)
    assert setup.federation.everyone(0).members(0).tolist() == list(range(10, 20))
    assert getattr(setup.program.algorithm.weigh, "share", None) == 0.25
    own_code.with_suffix(".toml").write_text(experiment.toml())
    assert fl.Experiment.read(own_code.with_suffix(".toml")) == experiment


def test_a_run_of_ones_own_code_is_resumed_from_anywhere(own_code, tmp_path):
    def stop(_record: object) -> None:
        raise KeyboardInterrupt

    whole = fl.run(fl.Experiment.read(own_code), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fl.run(fl.Experiment.read(own_code), tmp_path / "run", watch=stop)
    sys.modules.pop("own_code")
    result = fl.resume(tmp_path / "run")
    assert result.status == "finished"
    assert all(torch.equal(whole.model[name], t) for name, t in result.model.items())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dataset=own_code:five", "dataset 'own_code:five' gave int: it must return Dataset"),
        ("model=own_code:five", "model 'own_code:five' gave int: it must return Module"),
        ("model=own_code:stripes", "stripes does not take the 2 arguments it is handed"),
        ("clients.partition=own_code:five", "gave int: it must return Holdings"),
        ("clients.partition=own_code:too_few", "made 1 clients: set clients.count to 1"),
        ("algorithm=own_code:five", "is not a paper: put @paper of fedlens on the line above it"),
        ("algorithm.own_code:slowly.shore=3", "no option 'shore': did you mean 'share'?"),
        ("algorithm=own_code:slow", "cannot be imported (module 'own_code' has no attribute"),
    ],
)
def test_a_function_of_ones_own_that_gives_something_else_is_named(own_code, override, message):
    with pytest.raises(ValueError) as refused:
        build(fl.Experiment.read(own_code, [override]))
    assert message in str(refused.value)


def toy(num_examples: int = 24, num_classes: int = 3, test: int = 6) -> fl.Dataset:
    """Images of 2x4x4 whose brightness is their label."""
    labels = torch.arange(num_examples) % num_classes
    images = torch.rand(num_examples, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    examples = fl.Examples(images + labels.view(-1, 1, 1, 1), labels)
    part = examples.take(torch.arange(test))
    return fl.Dataset("toy", examples, part, tuple("abcdefgh"[:num_classes]))


def flat(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, outputs))


class Spare(nn.Module):
    """A model with a layer that nothing goes through."""

    def __init__(self, spare: nn.Module) -> None:
        super().__init__()
        self.used, self.spare = flat(), spare

    def forward(self, images: torch.Tensor) -> Any:
        return self.used(images)


def described(**changes: Any) -> fl.Experiment:
    plain: dict[str, Any] = {"dataset": toy(), "model": flat(), "rounds": 1, "engine": "sequential"}
    return fl.Experiment(**plain | {"clients": fl.Clients(count=4)} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": {"count": 25}}, "25 clients but 24 examples: choose no more clients than"),
        ({"outputs": 2}, "outputs is 2, but toy has 3 classes: choose 3 or more"),
        ({"outputs": 7}, "3 outputs an image, but outputs is 7: give it 7 outputs"),
        ({"model": flat(2)}, "the model gives 2 outputs an image, but toy has 3 classes"),
        ({"model": flat(5)}, "toy has 3 classes: give it 3 outputs, or set outputs = 5"),
        ({"model": nn.Linear(9, 3)}, "the model cannot take images of toy, (2, 4, 4) ("),
        (
            {"model": nn.Sequential(nn.Conv2d(3, 4, 1), nn.LazyLinear(3))},
            "the model cannot take images of (2, 4, 4) (",
        ),
        (
            {"model": nn.Sequential(nn.LazyBatchNorm2d(), flat())},
            "they have seen images: call it once, as model(torch.zeros(2, 2, 4, 4))",
        ),
        (
            {"model": Spare(nn.LazyLinear(5))},
            "layer 'spare' (LazyLinear) saw no images, from which it would take its size: use it",
        ),
        ({"model": nn.Conv2d(2, 3, 1)}, "outputs an image, but toy has 3 classes"),
        ({"norm": "local"}, 'norm is "local", but the model has no such layers'),
        ({"device": "tpu"}, "device is 'tpu': choose auto, cpu or cuda"),
        ({"device": "mps"}, 'device is "mps", but updates are added up in float64'),
        ({"device": "meta"}, "device is 'meta': choose auto, cpu or cuda"),
        ({"dataset": toy(test=0)}, "toy has no test examples: leave it out of evaluate.on"),
        ({"clients": {"partition": {"name": "dirichlet", "alpha": -1}}}, "alpha is -1"),
        ({"clients": {"partition": {"name": "dirichlet", "alpha": float("nan")}}}, "alpha is nan"),
        ({"algorithm": {"name": "fedprox", "mu": -1}}, "fedprox: mu is -1"),
        ({"algorithm": {"name": "fedavgm", "momentum": float("nan")}}, "momentum is nan"),
        (
            {"algorithm": {"name": "fedbuff", "buffer": 5}, "local": {"reset": False}},
            "a round takes 5 updates, but of clients that remember something each sends one",
        ),
    ],
)
def test_what_does_not_fit_together_is_found_before_any_training(changes, message):
    with pytest.raises(ValueError) as refused:
        build(described(**changes))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no GPU"):
        build(described(device="cuda"))


def test_the_engine_is_the_one_named_or_the_one_that_fits():
    kinds = {"sequential": Sequential, "stacked": Stacked, "processes": Processes}
    for name, kind in kinds.items():
        assert type(build(described(engine=name)).engine) is kind
    assert automatic_engine(torch.device("cuda"), 10) == "stacked"
    assert automatic_engine(torch.device("cpu"), 1) == "sequential"


def test_validation_is_a_seeded_share_of_train_that_no_client_holds():
    def parts(**changes: Any) -> tuple[set[float], set[float]]:
        on = fl.Evaluate(on=("test", "validation"), validation=0.25)
        setup = build(described(evaluate=on, **changes))
        examples, apart = setup.federation.examples, setup.parts["validation"].read(slice(None))
        held = examples.read(setup.federation.everyone(0).index)
        assert len(examples) == len(held)
        train, rest = ({float(image.sum()) for image in images} for images in (held, apart))
        return train, rest

    everything = {float(image.sum()) for image in toy().train.images}
    train, validation = parts(seed=1)
    assert (len(train), len(validation)) == (18, 6)
    assert train | validation == everything
    assert parts(seed=1)[1] == validation
    assert parts(seed=2)[1] != validation
    fixed = fl.Clients(count=4, seed=1)
    assert parts(seed=2, clients=fixed)[1] == validation


def test_validation_and_train_share_the_images_of_the_data_set():
    data = toy()
    on = fl.Evaluate(on=("train", "validation"), validation=0.25)
    setup = build(described(dataset=data, evaluate=on))
    whole = (setup.federation.examples, setup.parts["train"], setup.parts["validation"])
    assert all(part.images is data.train.images for part in whole)


def images_in_order(pool):
    examples = pool.examples
    assert len(examples.images) == len(examples) == 18
    assert torch.equal(examples.images.mean((1, 2, 3)).floor().long().clamp(0, 2), examples.labels)
    return fl.Holdings.of([torch.arange(18)])


@pytest.mark.parametrize("over", [{}, {"name": "noisy-labels", "high": 0.0}])
def test_a_partition_of_ones_own_sees_the_images_that_clients_may_hold(over):
    mine = f"{__name__}:images_in_order"
    own = {"count": 1, "partition": over | {"of": mine} if over else mine}
    setup = build(described(clients=own, evaluate={"on": "validation", "validation": 0.25}))
    assert setup.federation.everyone(0).sizes.tolist() == [18]


def test_without_validation_nothing_is_set_apart():
    assert len(build(described()).federation.examples) == 24


def test_clients_of_a_column_need_test_examples_to_be_tested_on():
    owners = {"owner": np.array(["a", "b"] * 12)}
    train, none = toy().train, torch.arange(0)
    own = fl.Examples(train.images, train.labels, owners)
    dataset = fl.Dataset("toy", own, own.take(none), tuple("abc"))
    clients = {"partition": {"name": "natural", "column": "owner"}}
    with pytest.raises(ValueError, match="no test"):
        build(described(dataset=dataset, clients=clients))


def test_clients_are_tested_on_a_share_of_their_own_examples():
    everyone = partition(described())[2]
    setup = build(described(clients=fl.Clients(count=4, holdout=0.34)))
    kept = setup.federation.everyone(0)
    assert kept.sizes.tolist() == [4, 4, 4, 4]
    assert setup.client_tests is not None
    part, held_out = setup.client_tests
    assert (part, held_out.sizes.tolist()) == ("train", [2, 2, 2, 2])
    for client in range(4):
        both = {*kept.members(client).tolist(), *held_out.members(client).tolist()}
        assert both == set(everyone.members(client).tolist())
    assert build(described()).client_tests is None


def test_one_seed_gives_one_model_and_leaves_torchs_own_random_numbers_alone():
    def weights(seed: int) -> torch.Tensor:
        experiment = fl.Experiment(toy(), fl.Named("linear"), rounds=1, seed=seed)
        return build(experiment).network.params["fc.weight"]

    torch.default_generator.manual_seed(5)
    state = torch.random.get_rng_state()
    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_description_reaches_the_algorithm():
    setup = build(
        described(
            clients=fl.Clients(count=4, per_round=0.5),
            local=fl.LocalTraining(3, 5, 0.7, 0.8, 0.01, reset=False),
            server=fl.Server(lr=0.3),
            augment=fl.Augment(flip=True),
        )
    )
    made: Any = setup.program.algorithm
    assert made.select.count == 2
    assert (made.draw.count, made.draw.batch_size) == (3, 5)
    assert (made.solve.lr, made.solve.momentum, made.solve.weight_decay) == (0.7, 0.8, 0.01)
    assert made.advance.lr == 0.3
    assert not made.reset
    assert setup.program.augment and setup.program.augment.flip


class Restless(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(784, 10)

    def forward(self, x):
        return self.head(torch.nn.functional.dropout(x.flatten(1), 0.5, self.training))


def test_a_model_that_draws_its_own_random_numbers_is_refused():
    experiment = fl.Experiment(fl.Named("fashion-mnist-mini"), Restless(), rounds=1)
    with pytest.raises(ValueError, match=r"nn\.Dropout"):
        build(experiment)


def lazy(shape, num_classes):
    norm = nn.LazyBatchNorm2d()
    return nn.Sequential(norm, nn.Flatten(), nn.Dropout(0.5), nn.LazyLinear(num_classes))


@pytest.mark.parametrize("named", [True, False])
def test_layers_without_sizes_take_them_from_the_images_and_weights_by_the_seed(named):
    given = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    model = "tests.setup.test_build:lazy" if named else given
    one, same, other = (build(described(model=model, seed=s)).network for s in (0, 0, 1))
    weight = "3.weight" if named else "1.weight"
    assert one.params[weight].shape == (3, 32)
    assert torch.equal(one.params[weight], same.params[weight])
    assert not torch.equal(one.params[weight], other.params[weight])
    assert all(bool((t == 0).all()) for name, t in one.buffers.items() if "mean" in name)
    assert isinstance(given[1], nn.LazyLinear), "what the user gave stays as it is"


def test_a_model_with_layers_without_sizes_is_trained_and_loaded(tmp_path):
    whole = torch.randint(256, (24, 2, 4, 4), dtype=torch.uint8)
    examples = fl.Examples(whole, torch.arange(24) % 3)
    images = fl.Dataset("bytes", examples, examples, ("a", "b", "c"), (0.5, 0.5), (0.3, 0.3))
    made = [nn.Sequential(nn.Flatten(), nn.LazyLinear(3)) for _ in range(2)]
    result = fl.run(described(dataset=images, model=made[0]), tmp_path / "run")
    answers = fl.load(tmp_path / "run", made[1])(whole).argmax(1)
    right = (answers == examples.labels).double().mean()
    assert float(right) == pytest.approx(result.final["test_accuracy"])


@pytest.mark.parametrize("pixel", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_refused(pixel):
    images = torch.zeros(8, 1, 4, 4)
    images[3, 0, 1, 2] = pixel
    labels = torch.arange(8) % 2
    for train, test in ((images, torch.zeros(8, 1, 4, 4)), (torch.zeros(8, 1, 4, 4), images)):
        dataset = fl.Dataset(
            "own", fl.Examples(train, labels), fl.Examples(test, labels), ("a", "b")
        )
        with pytest.raises(ValueError, match="finite"):
            build(fl.Experiment(dataset=dataset, model="linear", rounds=1))


def test_an_image_that_is_not_finite_and_was_left_out_does_no_harm():
    images = torch.zeros(8, 1, 4, 4)
    images[3] = float("nan")
    whole = fl.Examples(images, torch.arange(8) % 2)
    for rows, is_refused in (([0, 1, 2, 4], False), ([0, 1, 2, 3], True)):
        part = whole.take(torch.tensor(rows))
        dataset = fl.Dataset("own", part, part, ("a", "b"))
        experiment = fl.Experiment(
            dataset=dataset, model="linear", rounds=1, clients=fl.Clients(count=2)
        )
        if is_refused:
            with pytest.raises(ValueError, match="finite"):
                build(experiment)
        else:
            build(experiment)
