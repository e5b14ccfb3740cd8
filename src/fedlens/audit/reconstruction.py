"""Images from one client's upload: gradient inversion (Geiping et al., NeurIPS 2020).

The attacker is the server: it knows the model that a client started from, what the client sent, its
settings and how many examples it has. -update / (lr steps) is about the mean gradient g of the
client's examples, so it looks for images x whose gradient has the direction of g:

    minimise 1 - cos(grad f(x), g) + smoothness TV(x),     x in [0, 1].

Before, it reads the labels off the last layer: the gradient of output c's bias is the mean over the
client's examples of p_c - [y = c] (Zhao et al., 2020).

What hides images is shown by uploads of a client that trains with plain SGD, or DP-SGD, in which
one thing at a time is changed: how many images and steps, the clip, the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedlens.algorithm import Algorithm
from fedlens.algorithm.dp_sgd import protect_examples
from fedlens.algorithm.pieces import Objective, Sgd, Steps
from fedlens.core import Facts, Tree, keys
from fedlens.core.federation import Holdings
from fedlens.core.trees import map_tensors
from fedlens.network.network import Network
from fedlens.rounds import begin
from fedlens.rounds.cohorts import DRAW
from fedlens.rounds.work import Shared, exact_model, work_alone
from fedlens.setup import Setup

ATTACK = keys.purpose("audit reconstruction")
WINDOW = 7  # pixels, of the structural similarity
SIZES = 1, 4  # images of the client whose upload is attacked
STEPS = 400  # of the search
RATE = 0.1  # of Adam, on pixels from 0 to 1
LR = 0.1  # of a client whose training is changed


@dataclass(frozen=True)
class Training:
    """How a client trains whose upload is attacked: on all its images in each step."""

    examples: int = 1
    steps: int = 1
    clip: float | None = None  # of each example's gradient; None: as plain SGD
    noise: float = 0.0  # on their sum, in clips

    def algorithm(self, setup: Setup) -> Algorithm:
        plain = Algorithm(
            draw=Steps(self.examples, self.steps, self.steps, "steps"),
            objective=Objective(setup.program.algorithm.objective.loss),
            solve=Sgd(LR),
        )
        return plain if self.clip is None else protect_examples(plain, self.clip, self.noise)


CHANGED = (
    *(Training(examples=n) for n in (1, 4, 16)),
    *(Training(steps=n) for n in (5, 20)),
    *(Training(examples=4, clip=clip) for clip in (1.0, 0.1)),
    *(Training(clip=1.0, noise=noise) for noise in (0.001, 0.01, 0.1, 1.0)),
)


@dataclass(frozen=True)
class Reconstruction:
    """Images [n, channels, H, W] from 0 to 1 of a client, and what came back for each of them."""

    originals: Tensor
    found: Tensor
    labels: Tensor  # [n]
    found_labels: Tensor  # [n] in the order of `found`
    cosine: float  # between the gradient of what was found and what was sent
    training: Training | None = None  # None: that of the experiment

    @property
    def psnr(self) -> Tensor:  # [n] decibels
        error = (self.originals - self.found).square().flatten(1).mean(1)
        return -10 * error.clamp(min=1e-10).log10()

    @property
    def ssim(self) -> Tensor:  # [n] 1 if equal
        return similarity(self.originals, self.found)

    @property
    def right_labels(self) -> int:
        """How many of the labels were inferred, as a multiset."""
        most = int(max(self.labels.max(), self.found_labels.max())) + 1
        counts = (torch.bincount(one, minlength=most) for one in (self.labels, self.found_labels))
        return int(torch.minimum(*counts).sum())


def reconstructions(
    setup: Setup, client: int, tell: Callable[[int, int], None] | None = None
) -> list[Reconstruction]:
    """Attack uploads of a client with few examples, which trains as in the experiment, and then in
    other ways; `tell` is called with the steps so far."""
    most, step = max(len(_held(setup, client)), 1), count(1)
    tried: list[tuple[int, Training | None]] = [(size, None) for size in SIZES]
    tried = [one for one in [*tried, *((one.examples, one) for one in CHANGED)] if one[0] <= most]

    def told() -> None:
        if tell is not None:
            tell(next(step), len(tried) * STEPS)

    return [reconstruct(setup, client, size, STEPS, told=told, training=how) for size, how in tried]


def reconstruct(
    setup: Setup,
    client: int,
    examples: int,
    steps: int = STEPS,
    smoothness: float = 1e-3,
    told: Callable[[], None] = lambda: None,
    training: Training | None = None,
) -> Reconstruction:
    """Attack the upload of a client that holds only its first few examples, in the first round.

    It trains as in the experiment, or by `training`.
    """
    federation, network = setup.federation, setup.network
    held = _held(setup, client)
    if not 1 <= examples <= len(held):
        raise ValueError(f"examples is {examples}: client {client} has {len(held)}")
    if network.buffers:
        raise ValueError('the attack needs a model without batch norm: set norm = "group"')
    some = held[:examples]
    program = setup.program
    if training is not None:
        program = replace(program, algorithm=training.algorithm(setup))
    sent = _update(replace(setup, program=program), Holdings.of([some]))
    target = {name: -t for name, t in sent.items() if name in network.params}
    images = federation.examples.read(some).cpu()
    originals = images.float() / (1 if images.is_floating_point() else 255)
    labels = labels_in(network, target, examples, originals.shape[1:])
    found, cosine = _search(network, target, labels, originals.shape[1:], steps, smoothness, told)
    order = _matched(originals, found)
    real = federation.labels[some]
    return Reconstruction(originals, found[order], real, labels[order], cosine, training)


def check_client(setup: Setup, client: int) -> None:
    if not 0 <= client < setup.federation.num_clients:
        raise ValueError(f"client is {client}: choose 0 to {setup.federation.num_clients - 1}")


def _held(setup: Setup, client: int) -> Tensor:  # [n]
    """The examples of a client in the first round."""
    check_client(setup, client)
    return setup.federation.holdings(0, torch.tensor([client])).index


def _update(setup: Setup, holdings: Holdings) -> Tree:
    """What the server gets from a client that holds this, in the first round."""
    program = replace(setup.program, uncombined=True)
    state = begin(setup.network, program, setup.federation, setup.device)
    parts: Any = map_tensors((state.params, state.buffers, state.told), lambda t: t[None])
    params, buffers, told = parts
    shared = Shared(params, buffers, exact_model(params | buffers), told)
    key = keys.root(setup.experiment.seed, ATTACK)[None]
    plan = program.algorithm.draw(holdings, keys.fold(key, DRAW))
    counts = setup.federation.label_counts(holdings)
    memory = program.memory(state.params, state.buffers, state.told)
    work = work_alone(plan, key, Facts(holdings.sizes, counts), memory)
    (part,) = setup.engine.map(program, shared, work)
    return {name: t[0].float().cpu() for name, t in part.update.items()}


def labels_in(network: Network, gradient: Tree, examples: int, shape: torch.Size) -> Tensor:  # [n]
    """The labels of a client's examples, as the gradient of the last layer tells them."""
    last = network.layout.last
    name = f"{last}.bias" if f"{last}.bias" in gradient else f"{last}.weight"
    if name not in gradient:
        raise ValueError("the model's last layer is not trained: nothing tells the labels")
    sums = gradient[name].flatten(1).sum(1) if gradient[name].ndim > 1 else gradient[name]
    with torch.no_grad():
        grey = torch.full((1, *shape), 0.5)
        chance = _logits(network, network.params, grey)[0].softmax(0)
    # Scaled so that the class of one example pulls by 1: sum |p - [y]| is 2 (1 - p_y).
    pull = -sums * examples / sums.clamp(max=0).sum().abs().clamp(min=1e-12) * (1 - chance.mean())
    found = []
    for _ in range(examples):
        best = int(pull.argmax())
        found.append(best)
        pull[best] -= 1
    return torch.tensor(found)


def _search(
    network: Network,
    target: Tree,
    labels: Tensor,
    shape: torch.Size,
    steps: int,
    smoothness: float,
    told: Callable[[], None],
) -> tuple[Tensor, float]:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand((len(labels), *shape), generator=draw).requires_grad_()
    params = {name: t.clone().requires_grad_() for name, t in network.params.items()}
    wanted = torch.cat([target[name].flatten() for name in params])
    if not wanted.norm() > 0:
        return x.detach(), 0.0
    solver = torch.optim.Adam([x], RATE)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(solver, steps)
    cosine = torch.zeros(())
    for _ in range(steps):
        loss = F.cross_entropy(_logits(network, params, x), labels)
        grads = torch.autograd.grad(loss, [*params.values()], create_graph=True)
        cosine = F.cosine_similarity(torch.cat([g.flatten() for g in grads]), wanted, dim=0)
        rough = (x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean()) * smoothness
        (x.grad,) = torch.autograd.grad(1 - cosine + rough, [x])
        x.grad.sign_()  # as in the paper: only directions, so that no pixel is left behind
        solver.step()
        decay.step()
        x.data.clamp_(0, 1)
        told()
    return x.detach(), float(cosine.detach())


def _logits(network: Network, params: Tree, images: Tensor) -> Tensor:
    if network.mean is not None and network.std is not None:
        mean, std = (torch.tensor(one)[:, None, None] for one in (network.mean, network.std))
        images = (images - mean) / std
    logits: Tensor = functional_call(network.module, {**network.frozen, **params}, (images,))
    return logits


def _matched(originals: Tensor, found: Tensor) -> Tensor:  # [n]
    """For each original, the image that was found for it; the nearest pairs first."""
    far = torch.cdist(originals.flatten(1), found.flatten(1))
    order = torch.zeros(len(far), dtype=torch.int64)
    for _ in range(len(far)):
        row, column = divmod(int(far.argmin()), len(far))
        order[row] = column
        far[row], far[:, column] = torch.inf, torch.inf
    return order


def similarity(a: Tensor, b: Tensor) -> Tensor:  # [n]
    """The structural similarity (Wang et al., 2004) of images from 0 to 1, by square windows."""
    size = min(WINDOW, *a.shape[2:])

    def mean(t: Tensor) -> Tensor:
        return F.avg_pool2d(t, size, 1)

    x, y = mean(a), mean(b)
    var_a, var_b, both = mean(a * a) - x * x, mean(b * b) - y * y, mean(a * b) - x * y
    alike = (2 * x * y + 1e-4) * (2 * both + 9e-4)
    found = alike / ((x * x + y * y + 1e-4) * (var_a + var_b + 9e-4))
    return found.flatten(1).mean(1)
