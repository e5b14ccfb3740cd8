"""Tries the user's own model, loss and algorithm on a few examples, to find errors before a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from fedlens.algorithm.pieces import Uniformly
from fedlens.algorithm.pieces.losses import Loss, LossWith
from fedlens.config.consent import mistake_of, place_of, place_of_error
from fedlens.config.experiment import Experiment
from fedlens.core.federation import Dataset, Federation
from fedlens.engines import Sequential
from fedlens.network.functional import MappedModel, Model
from fedlens.network.network import Network
from fedlens.rounds import begin, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.storage.reading import reason

CLIENTS, EXAMPLES, BATCH = 2, 2, 3
ROUNDS = 2  # the second round is the first with memory of an earlier one

logger = logging.getLogger(__name__)


def _draws(work: Callable[[], None]) -> bool:
    """Whether `work` draws from torch's generator, which is set back; what it draws has no key."""
    before = torch.get_rng_state()
    work()
    has_drawn = not torch.equal(before, torch.get_rng_state())
    if has_drawn:
        torch.set_rng_state(before)
    return has_drawn


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def cannot_take(images: str, error: Exception) -> ValueError:
    of_shapes = isinstance(error, RuntimeError)  # torch raises it where shapes do not fit
    return ValueError(
        ("" if of_shapes else mistake_of(error))
        or f"the model cannot take {images} ({_first_line(error)}): choose a model for such "
        "images or, where the data set takes a size, another size"
    )


def try_network(network: Network, dataset: Dataset, outputs: int | None) -> None:
    """Run one forward pass, to detect a model that does not fit the data."""
    part = dataset.train if len(dataset.train) else dataset.test
    try:
        logits = network.predict(network.initial, {}, part.images[:2])
    except ValueError:
        raise
    except Exception as error:  # a module of the user's own may raise anything
        raise cannot_take(f"images of {dataset.name}, {dataset.shape}", error) from error
    wanted, shape = outputs or dataset.num_classes, tuple(logits.shape[1:])
    if shape != (wanted,):
        has = f"{dataset.name} has {wanted} classes" if outputs is None else f"outputs is {outputs}"
        more = len(shape) == 1 and shape[0] > dataset.num_classes
        gives = "×".join(map(str, shape))
        raise ValueError(
            f"the model gives {gives} outputs an image, but {has}: give it {wanted} outputs"
            + f", or set outputs = {shape[0]}" * more
        )
    _try_training(network, part.images[:2])


def _try_training(network: Network, images: torch.Tensor) -> None:
    """Run one pass as in training, to detect random draws that do not depend on a key."""
    drew: list[nn.Module] = []
    try:
        with _watching_for_draws(drew):
            has_drawn = _draws(lambda: _train_once(network, network.single, images))
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"the model cannot be trained: {_first_line(error)}") from error
    if has_drawn:
        raise ValueError(
            f"the model draws random numbers by itself{_where(network, drew)}, so that no run "
            f"could be repeated: {_remedy(drew)}"
        )


def stacking_fails(network: Network, images: torch.Tensor) -> str:
    """Why clients of this model cannot be trained side by side; "" if they can.

    A model that is run layer by layer can: its forward pass has no unknown operations.
    """
    if not isinstance(network.stacked, MappedModel):
        return ""
    try:
        _train_once(network, network.stacked, images)
    except Exception as error:  # torch.func.vmap may refuse any operation
        where = place_of_error(error).partition(": ")[0]
        why = reason(error).partition(". ")[0]  # the rest asks for a bug report
        return f"{where}: {why}" if where else why
    return ""


def _train_once(network: Network, model: Model, images: torch.Tensor) -> None:
    """Run one forward pass of one client, as in training."""
    buffers = {name: t[None] for name, t in network.buffers.items()}  # copies: it moves them
    params = {name: t[None] for name, t in network.initial.items() if name not in buffers}
    key = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        model(params, buffers, images[None], key, torch.ones(1, len(images)))


@contextmanager
def _watching_for_draws(drew: list[nn.Module]) -> Iterator[None]:
    """Collect the modules whose forward pass uses torch's generator, the innermost first."""
    states: list[torch.Tensor] = []

    def enter(*_: object) -> None:
        states.append(torch.get_rng_state())

    def leave(module: nn.Module, *_: object) -> None:
        if not torch.equal(states.pop(), torch.get_rng_state()):
            drew.append(module)

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _where(network: Network, drew: list[nn.Module]) -> str:
    if not drew:
        return ""
    kind = type(drew[0]).__name__
    names = [name for name, module in network.named_modules() if module is drew[0] and name]
    return f" in {names[0]} ({kind})" if names else f" in its forward ({kind})"


def _remedy(drew: list[nn.Module]) -> str:
    if drew and isinstance(drew[0], nn.MultiheadAttention):
        return (
            "set the attention's own dropout to 0 (`.self_attn.dropout = 0.0` of a "
            "TransformerEncoderLayer, whose other dropout may stay)"
        )
    return "use nn.Dropout layers in place of torch.nn.functional.dropout and the like"


def try_loss(loss: Loss, name: str, num_outputs: int, num_classes: int) -> None:
    """Call it as training does, on artificial logits [C, B, L]: it must return losses [C, B]."""
    labels = torch.arange(CLIENTS * BATCH).view(CLIENTS, BATCH) % num_classes
    numbers = torch.arange(CLIENTS * BATCH * num_outputs, dtype=torch.float32).sin()
    logits = numbers.view(CLIENTS, BATCH, num_outputs).requires_grad_()
    handed = f"logits [{CLIENTS}, {BATCH}, {num_outputs}] and labels [{CLIENTS}, {BATCH}]"
    try:
        given = loss(logits, labels)
    except Exception as error:  # it may raise anything
        where = place_of_error(error)
        raise ValueError(
            f"loss {name!r} cannot take {handed}, of clients and examples"
            + (f" ({where}): fix it there" if where else f" ({error}): change its parameters")
        ) from error
    if isinstance(given, Tensor) and given.shape == labels.shape and given.requires_grad:
        return
    if not isinstance(given, Tensor):
        found, remedy = type(given).__name__, "return the loss of each example"
    elif given.shape != labels.shape:
        found, remedy = f"a tensor {list(given.shape)}", "return the loss of each example, no mean"
    else:
        found, remedy = "losses without a gradient", "compute them from the logits, attached"
    function = loss.function if isinstance(loss, LossWith) else loss
    raise ValueError(f"loss {name!r}, {place_of(function)}, gave {found} for {handed}: {remedy}")


def try_algorithm(
    experiment: Experiment,
    network: Network,
    program: ClientProgram,
    federation: Federation,
    device: torch.device,
) -> None:
    """Raise an error if the user's own algorithm fails; warn if it draws without a key.

    It may need more clients or examples than a small round has, so it is also run in whole rounds
    before the error is raised.
    """
    own = ", ".join(repr(one.name) for one in experiment.algorithm if ":" in one.name)
    if not own:
        return

    def small_rounds() -> None:
        try:
            _train(_of_few(program), network, federation.shortened(EXAMPLES), device)
        except Exception:  # it may raise anything, and return anything
            try:
                _train(program, network, federation, device)
            except Exception as error:
                raise ValueError(f"algorithm {own}: {_told(error)}") from error

    if _draws(small_rounds):
        logger.warning(
            "algorithm %s draws random numbers by itself, so no run of it can be repeated: draw by "
            "local.key or client_keys",
            own,
            extra={"once": True},
        )


def _of_few(program: ClientProgram) -> ClientProgram:
    select = program.algorithm.select
    if isinstance(select, Uniformly):  # a selection of the user's own is run as it is
        select = Uniformly(min(CLIENTS, select.count))
    return replace(program, algorithm=replace(program.algorithm, select=select))


def _train(
    program: ClientProgram, network: Network, federation: Federation, device: torch.device
) -> None:
    engine = Sequential(network, federation.examples)
    state = begin(network, program, federation, device)
    for _ in range(ROUNDS):
        state, _ = run_round(program, federation, engine, state, seed=0)


def _told(error: Exception) -> str:
    if isinstance(error, ValueError):
        return str(error)
    if where := place_of_error(error):
        return f"{where}: fix it there"
    what = f"{type(error).__name__}: {reason(error)}"
    return f"a round fails by what it returns ({what}): docs/extend.md says what each part returns"
