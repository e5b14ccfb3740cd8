"""Linear layers whose clients never get weights of their own.

With gradient descent from a common start w0, a client's weights after t steps are

    w_t = w0 - lr * sum over its examples so far of decay^(later steps) * d x' - drift terms,

where x is the layer's input for an example and d the gradient of the loss by the layer's output.
So with the rows of X and D being these examples, and F the diagonal of the decays,

    w_t x = w0 x - lr * D' F (X x),

and the round's whole update is the one product -lr * D' F X over all clients, each weighed by its
share. That is exact. It holds for every `LocalStep` that contracts: plain descent (decay = 1),
FedProx's pull (decay = 1 - lr * mu), and a drift that is the same in every step (ADMM's dual),
which each client then has a matrix of. An upload that is more than the difference gets weights that
are multiplied out at the end. It pays where a client sees few examples and the matrix is large. Of
a sweep, each experiment has its own start and its own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm
from fedlens.client import ClientProgram
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
from fedlens.engines.recording import BLOCK, LONG
from fedlens.network.factors import Factors
from fedlens.network.layout import Layout
from fedlens.network.network import Network
from fedlens.network.stacked.products import drifted, faded, wide_product
from fedlens.pieces.combine import WeightedSum
from fedlens.pieces.upload import difference
from fedlens.slots import Combine, LocalStep
from fedlens.trees import map_tensors
from fedlens.work import ClientInputs, Shared, Work

WORTH_IT = 2  # how many times smaller the matrix may be than the factors: its copies cost more
LARGE = 10**8  # weights of an experiment's clients whose step keeps a GPU as busy as its launch

INPUTS, GRADS = ".inputs", ".grads"  # names of factors in an upload: the weight's, and one of these


def factorable(network: Network, program: ClientProgram, work: Work) -> tuple[str, ...]:
    """The weights that are better not given to clients, by name; none if that does not hold."""
    if not all(map(_holds, program.algorithms)) or not _is_regular(work):
        return ()
    _, steps, batch = work.plan.index.shape
    names = []
    for name, layer in network.row_layers.items():
        out, features = layer.out_features, layer.in_features
        if steps * batch * (out + features) <= WORTH_IT * out * features:
            names.append(f"{name}.weight")
    return tuple(names)


def faster_one_by_one(network: Network, program: ClientProgram, work: Work) -> bool:
    """Whether experiments with large matrices should not train side by side.

    Side by side, clients that take more steps than others could not be factored: those that are
    left are of several experiments, in any order.
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
    if algorithm.pace is not None and algorithm.pace.since == "now":
        return False  # factors tell how far a client is from the model that it started from
    decay = step.decay
    assert not isinstance(decay, Tensor), "each algorithm of a sweep has its own numbers"
    # A weight of examples that looks at the model must find all of it.
    return 0 < decay <= 1 and not any(weight.reads_model for weight in weights)


def _is_regular(work: Work) -> bool:
    """Whether each experiment has as many clients, and all of them stay in its place."""
    if len(work.cohort_sizes) == 1:
        return work.group is None  # else versions of the model, of which some clients started
    if len(work.spans) == 1:
        return True
    counts, steps = {end - first for _, first, end in work.spans}, work.plan.steps
    return len(counts) == 1 and bool((steps == steps[0]).all())


class FactoredForm:
    """How clients hold the weights of some linear layers: as factors (`client.WeightForm`)."""

    def __init__(self, network: Network, program: ClientProgram, names: tuple[str, ...]) -> None:
        self.network, self.names = network, names
        # Where only the sum of the differences is asked for, no client's own is ever made.
        self.sums_uploads = not program.guarded and all(
            isinstance(one.combine, WeightedSum) and one.upload is difference and not one.channel
            for one in program.algorithms
        )
        self.channels = {n: network.flattened_channels(n.removesuffix(".weight")) for n in names}
        self.batch = 0
        self.server: Tree = {}  # [G, ...] w0, in the same memory: a recorded step reads it there

    def program(self, program: ClientProgram) -> ClientProgram:
        """The same program for clients whose weights are in this form."""
        each = tuple(map(self._amended, program.each))
        return replace(program, algorithm=self._amended(program.algorithm), each=each, form=self)

    def _amended(self, algorithm: Algorithm) -> Algorithm:
        combine = algorithm.combine
        if not self.sums_uploads:
            return algorithm
        assert isinstance(combine, WeightedSum)
        return replace(algorithm, upload=SendFactors(self), combine=MultiplyFactors(combine, self))

    def send(self, shared: Shared, work: Work) -> Shared:
        """What clients get instead of the whole model: all but these weights."""
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
        if steps > LONG:  # few shapes, each of which comes again and can be recorded
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
        """Clients with the weights that their factors come to."""
        assert local.factored is not None
        params, anchor = dict(local.params), dict(local.anchor)
        exact = local.factored.exact
        for name in self.names:
            inputs, grads = self.factors(local, name, exact)
            dtype = torch.promote_types(grads.dtype, torch.float32)
            product = wide_product(grads.mT, inputs, dtype)
            anchor[name] = local.exact[name].to(dtype)
            params[name] = anchor[name] + self.in_order(name, product)
            if step.drift is not None and exact.drift_times is not None:
                times = exact.drift_times.gather(1, local.steps[:, None]).to(dtype)
                params[name].addcmul_(step.drift(local, name), times[:, :, None])
        return replace(local, params=params, anchor=anchor, factored=None)

    def factors(self, local: Local, name: str, numbers: StepNumbers) -> tuple[Tensor, Tensor]:
        """X, and D with each row times what its step did to the weights in the end."""
        assert local.factored is not None
        inputs, grads, _ = local.factored.layers[name]
        left = faded(grads, self.batch, local.steps, numbers.log_decay)
        return inputs, _times(grads, -numbers.lr[:, None] * left)

    def by_pixel(self, name: str, matrices: Tensor) -> Tensor:
        """Matrices [..., out, features], or [..., out, pixels, channels] of flattened images."""
        channels = self.channels[name]
        if channels is None:
            return matrices
        return matrices.reshape(*matrices.shape[:-1], channels, -1).transpose(-1, -2)

    def in_order(self, name: str, product: Tensor) -> Tensor:
        """A product of factors [..., out, features] with the features as the layer has them."""
        channels = self.channels[name]
        if channels is None:
            return product
        return product.reshape(*product.shape[:-1], -1, channels).transpose(-1, -2).flatten(-2)


def _by_client(number: Number, local: Local) -> Tensor:  # [C] float64
    like = local.steps
    return torch.as_tensor(number, dtype=torch.float64, device=like.device).expand(len(like))


@dataclass(frozen=True)
class SendFactors:
    """upload: the difference of what a client has, and the factors of what it has not."""

    form: FactoredForm

    def __call__(self, local: Local) -> Upload:
        assert local.factored is not None
        upload, form = difference(local), self.form
        update = dict(upload.update)
        for name in form.names:
            inputs, grads = form.factors(local, name, local.factored.numbers)
            update |= {name + INPUTS: inputs, name + GRADS: grads}
        return replace(upload, update=update)


def _times(grads: Tensor, weights: Tensor) -> Tensor:
    """Gradients [C, n, out] times weights [C, n], which are not rounded to their dtype before."""
    wide = torch.promote_types(grads.dtype, torch.float32)
    return (grads * weights.to(wide)[:, :, None]).to(grads.dtype)


@dataclass(frozen=True)
class MultiplyFactors(Combine):
    """combine: the weighted sum, and the product of the factors, which is one."""

    inner: WeightedSum
    form: FactoredForm
    linear: ClassVar[bool] = True

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        factors = {name + part for name in self.form.names for part in (INPUTS, GRADS)}
        rest = {name: u for name, u in updates.items() if name not in factors}
        combined = self.inner(rest, shares, cohort, layout)
        for name in self.form.names:
            x, d = updates[name + INPUTS], updates[name + GRADS]
            weighed = _times(d, shares[:, None].expand(d.shape[:2])).flatten(0, 1)
            product = wide_product(weighed.mT[None], x.flatten(0, 1)[None], torch.float32)
            combined[name] = self.form.in_order(name, product[0]).double()
        return combined
