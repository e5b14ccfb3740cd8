"""Linear layers in factored form: no client has a weight matrix of its own.

With gradient descent from a common start w0, a client's weights after t steps are

    w_t = w0 - lr * sum over its examples so far of decay^(later steps) * d x' - drift terms,

where x is the layer's input for an example and d the gradient of the loss by the layer's output.
So with the rows of X and D being these examples, and F the diagonal of the decays,

    w_t x = w0 x - lr * D' F (X x),

and the update of the whole round is a single product -lr * D' F X over all clients, each weighted
by its share. This is exact. It holds for every `LocalStep` that contracts: plain descent
(decay = 1), FedProx's pull (decay = 1 - lr * mu), and a drift that is the same in every step
(ADMM's dual), for which each client has a matrix. If an upload needs more than the difference, the
weights are multiplied out at the end. Factors are cheaper where a client sees few examples and the
matrix is large. In a sweep, each experiment has its own w0 and its own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm
from fedlens.algorithm.pieces.upload import difference
from fedlens.algorithm.slots import Combine, LocalStep
from fedlens.core import (
    Cohort,
    FactoredWeights,
    LayerFactors,
    Local,
    Number,
    StepNumbers,
    Tree,
    Upload,
)
from fedlens.core.trees import map_tensors
from fedlens.engines.recording import BLOCK, LONG
from fedlens.network.layout import Layout
from fedlens.network.network import Network
from fedlens.network.stacked.products import Factors, drifted, faded, wide_product
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.work import ClientInputs, Shared, Work

WORTH_IT = 2  # how many times larger than the matrix factors may be: copies of it cost more
LARGE = 10**8  # weights of an experiment's clients with which a step takes as long as its launch

INPUTS, GRADS = ".inputs", ".grads"  # suffixes to a weight's name: its factors in an upload


def factorable(network: Network, program: ClientProgram, work: Work) -> tuple[str, ...]:
    """The names of the weights to keep factored; none if the algorithm or work rules that out."""
    if not all(map(_holds, program.algorithms)) or not _is_regular(work):
        return ()
    _, steps, batch = work.plan.index.shape
    names = []
    for name, layer in network.row_layers.items():
        out, features = layer.out_features, layer.in_features
        own = f"{name}.weight" in program.own_names  # factors start from one matrix for all
        if not own and steps * batch * (out + features) <= WORTH_IT * out * features:
            names.append(f"{name}.weight")
    return tuple(names)


def faster_one_by_one(network: Network, program: ClientProgram, work: Work) -> bool:
    """Whether experiments should train one by one because their matrices are large.

    Side by side, clients with different numbers of steps could not be factored: those that still
    train would belong to several experiments, in any order.
    """
    if len(work.spans) == 1 or _is_regular(work):
        return False
    counts = {end - first for _, first, end in work.spans}
    if len(counts) != 1 or work.group is None:
        return False
    (each,) = counts
    names = factorable(network, program, work.rows(slice(each)))
    weights = sum(network.module.get_parameter(name).numel() for name in names)
    return each * weights >= LARGE


def _holds(algorithm: Algorithm) -> bool:
    step, weights = algorithm.local_step, algorithm.objective.weights
    if step is None or not step.contracts or not algorithm.reset:
        return False
    if algorithm.objective.private is not None:
        return False
    if algorithm.pace is not None and algorithm.pace.since == "now":
        return False  # factors give the distance from the model that a client started from
    decay = step.decay
    assert not isinstance(decay, Tensor), "each algorithm of a sweep has its own numbers"
    # An example weight that reads the model needs all of its parameters.
    return 0 < decay <= 1 and not any(weight.reads_model for weight in weights)


def _is_regular(work: Work) -> bool:
    """Whether, in every step, clients form blocks of one size, one block for each experiment."""
    if len(work.cohort_sizes) == 1:
        return work.group is None  # else groups are versions of the model that clients started from
    if len(work.spans) == 1:
        return True
    counts, steps = {end - first for _, first, end in work.spans}, work.plan.steps
    return len(counts) == 1 and bool((steps == steps[0]).all())


class FactoredForm:
    """Stores the clients' weights of some linear layers as factors (a `steps.WeightForm`)."""

    def __init__(self, network: Network, program: ClientProgram, names: tuple[str, ...]) -> None:
        self.network, self.names = network, names
        channels = [one.channel for one in program.algorithms]
        # If only the sum of the differences is needed, no client's own difference is computed; if
        # they are scaled before, it is, but not its weights.
        self.sums_uploads = not (program.measures_norm or program.uncombined) and all(
            one.combine.sums_params
            and one.upload is difference
            and all(step.scales for step in one.channel)
            for one in program.algorithms
        )
        self.are_scaled = any(channels)
        self.channels = {n: network.flattened_channels(n.removesuffix(".weight")) for n in names}
        self.batch = 0
        self.server: Tree = {}  # [G, ...] w0, always in the same memory: recorded steps read it

    def program(self, program: ClientProgram) -> ClientProgram:
        """The same program for clients whose weights are in this form."""
        each = tuple(map(self._amended, program.each))
        return replace(program, algorithm=self._amended(program.algorithm), each=each, form=self)

    def _amended(self, algorithm: Algorithm) -> Algorithm:
        if not self.sums_uploads:
            return algorithm
        combine = MultiplyFactors(algorithm.combine, self)
        return replace(algorithm, upload=SendFactors(self), combine=combine)

    def send(self, shared: Shared, work: Work) -> Shared:
        """What clients are sent: the model without these weights, which `self.server` holds."""
        self.batch = work.plan.index.shape[2]
        groups = [group for group, _, _ in work.spans]
        params, exact = dict(shared.params), dict(shared.exact)
        for name in self.names:
            weight = params.pop(name)
            if self.sums_uploads:
                exact.pop(name)
            weight = weight if len(groups) == len(weight) else weight[groups]
            if name not in self.server:
                self.server[name] = torch.empty_like(weight, dtype=self.network.compute)
            weight = self.by_pixel(name, weight)
            self.server[name].view(weight.shape).copy_(weight)
        return shared._replace(params=params, exact=exact)

    def start(self, local: Local, inputs: ClientInputs, step: LocalStep) -> FactoredWeights:
        clients, (_, steps, batch) = len(local.steps), inputs.plan.index.shape
        if steps > LONG:  # few distinct shapes, which recur and can be recorded
            steps = -(-steps // BLOCK) * BLOCK
        lr, decay = (_by_client(number, local) for number in (step.lr, step.decay))  # [C] float64
        layers = {}
        for name in self.names:
            server = self.server[name]
            _, out, features = server.shape
            drift = None
            if step.drift is not None:
                own = self.by_pixel(name, step.drift(local, name))
                drift = own.to(self.network.compute).flatten(2)
            layers[name] = LayerFactors(
                inputs=server.new_zeros(clients, steps * batch, features),
                grads=server.new_zeros(clients, steps * batch, out),
                drift=drift,
            )
        times = None
        if step.drift is not None:
            times = drifted(torch.arange(steps + 1, device=lr.device), lr, decay)
        exact = StepNumbers(lr, decay.log2(), times)
        wide = torch.promote_types(self.network.compute, torch.float32)
        return FactoredWeights(layers, exact, map_tensors(exact, lambda t: t.to(wide)))

    def weights(self, local: Local, step: Tensor) -> dict[str, Any]:
        assert local.factored is not None
        layers, _, numbers = local.factored
        return {
            name: Factors(
                start=self.server[name],
                inputs=layer.inputs,
                grads=layer.grads,
                step=step,
                batch=self.batch,
                lr=numbers.lr,
                log_decay=numbers.log_decay,
                drift=layer.drift,
                times=numbers.drift_times,
                by_pixel=self.channels[name] is not None,
            )
            for name, layer in layers.items()
        }

    def multiplied_out(self, local: Local, step: LocalStep) -> Local:
        """The clients with full weight matrices, computed from their factors."""
        assert local.factored is not None
        params, anchor = dict(local.params), dict(local.anchor)
        exact = local.factored.exact
        for name in self.names:
            inputs, grads = self.factors(local, name, exact)
            dtype = _wide(grads)
            product = wide_product(grads.mT, inputs, dtype)
            anchor[name] = local.exact[name].to(dtype)
            params[name] = anchor[name] + self.in_order(name, product)
            if step.drift is not None and exact.drift_times is not None:
                times = exact.drift_times.gather(1, local.steps[:, None]).to(dtype)
                params[name].addcmul_(step.drift(local, name), times[:, :, None])
        return replace(local, params=params, anchor=anchor, factored=None)

    def factors(self, local: Local, name: str, numbers: StepNumbers) -> tuple[Tensor, Tensor]:
        """X, and D with each row times -lr and the decays of all later steps."""
        assert local.factored is not None
        inputs, grads, _ = local.factored.layers[name]
        left = faded(grads, self.batch, local.steps, numbers.log_decay)
        return inputs, _times(grads, -numbers.lr[:, None] * left)

    def by_pixel(self, name: str, matrices: Tensor) -> Tensor:
        """Matrices [..., out, features]; of flattened images as [..., out, pixels, channels]."""
        channels = self.channels[name]
        if channels is None:
            return matrices
        return matrices.reshape(*matrices.shape[:-1], channels, -1).transpose(-1, -2)

    def in_order(self, name: str, product: Tensor) -> Tensor:
        """A product of factors [..., out, features], with the features in the layer's order."""
        channels = self.channels[name]
        if channels is None:
            return product
        return product.reshape(*product.shape[:-1], -1, channels).transpose(-1, -2).flatten(-2)


def _by_client(number: Number, local: Local) -> Tensor:  # [C] float64
    like = local.steps
    return torch.as_tensor(number, dtype=torch.float64, device=like.device).expand(len(like))


@dataclass(frozen=True)
class SendFactors:
    """upload: differences of the weights that a client has, and factors of the others, or their
    products, whose features are in the order of the factors."""

    form: FactoredForm

    def __call__(self, local: Local) -> Upload:
        assert local.factored is not None
        upload, form = difference(local), self.form
        update = dict(upload.update)
        for name in form.names:
            inputs, grads = form.factors(local, name, local.factored.numbers)
            if form.are_scaled:
                update[name] = wide_product(grads.mT, inputs, _wide(grads))
            else:
                update |= {name + INPUTS: inputs, name + GRADS: grads}
        return replace(upload, update=update)


def _times(grads: Tensor, weights: Tensor) -> Tensor:
    """Gradients [C, n, out] times weights [C, n], multiplied in float32 or wider, then rounded."""
    return (grads * weights.to(_wide(grads))[:, :, None]).to(grads.dtype)


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


@dataclass(frozen=True)
class MultiplyFactors(Combine):
    """combine: the weighted sum of factored weights is the product of the factors."""

    inner: Combine
    form: FactoredForm
    linear: ClassVar[bool] = True

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        factors = {name + part for name in self.form.names for part in (INPUTS, GRADS)}
        rest = {name: u for name, u in updates.items() if name not in factors}
        combined = self.inner(rest, shares, cohort, layout)
        for name in self.form.names:
            if name in combined:
                product = combined[name]
            else:
                x, d = updates[name + INPUTS], updates[name + GRADS]
                weighed = _times(d, shares[:, None].expand(d.shape[:2])).flatten(0, 1)
                (product,) = wide_product(weighed.mT[None], x.flatten(0, 1)[None], torch.float32)
            combined[name] = self.form.in_order(name, product).double()
        return combined
