"""Linear layers whose clients never get weights of their own.

With gradient descent from a common start w0, a client's weights are w0 - lr * sum of d x' over the
examples it has seen, d being the slope of the loss at the layer's output and x its input. So

    w x = w0 x - lr * D' (X x),

where the rows of X and D are these examples; and the round's whole update is the one product
-lr * D' X over all clients, each weighed by its share. That is exact. It holds for descent along
the plain gradient, also with a pull towards the start (FedProx), under which what a step did fades
by a factor with every further one, and for uploads that are differences; anything else needs the
weights themselves. It pays where a client sees few examples and the matrix is large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedlens.algorithm import Algorithm
from fedlens.client import ClientProgram
from fedlens.core import Cohort, Local, Tree, Upload
from fedlens.layout import Layout
from fedlens.network import Network
from fedlens.pieces.combine import WeightedSum
from fedlens.pieces.upload import difference
from fedlens.products import Factors, wide_product
from fedlens.work import Part, Shared, Work

WORTH_IT = 2  # how many times smaller the matrix may be than the factors: its copies cost more

INPUTS, SLOPES, TAKEN = ".inputs", ".slopes", ".steps taken"


def factorable(network: Network, program: ClientProgram, work: Work) -> tuple[str, ...]:
    """The weights that are better not given to clients, by name; none if that does not hold."""
    algorithm = program.algorithm
    if work.group is not None or not _holds(algorithm):
        return ()
    _, steps, batch = work.plan.index.shape
    names = []
    for name, layer in network.module.named_modules():
        if isinstance(layer, nn.Linear) and network.takes_rows(name):
            out, features = layer.out_features, layer.in_features
            if steps * batch * (out + features) <= WORTH_IT * out * features:
                names.append(f"{name}.weight")
    return tuple(names)


def _holds(algorithm: Algorithm) -> bool:
    step = algorithm.contraction
    descends = step is not None and 0 < step[1] <= 1
    return descends and algorithm.upload is difference and not algorithm.memory and algorithm.reset


class Factored:
    """A program as it is for clients without these weights."""

    def __init__(self, network: Network, program: ClientProgram, names: tuple[str, ...]) -> None:
        self.network, self.names = network, names
        algorithm = program.algorithm
        assert algorithm.contraction is not None
        self.lr, self.decay = algorithm.contraction
        combine = algorithm.combine
        if isinstance(combine, WeightedSum):
            send = SendFactors(self, multiplied=False)
            amended = replace(algorithm, upload=send, combine=MultiplyFactors(combine, names))
        else:
            amended = replace(algorithm, upload=SendFactors(self, multiplied=True))
        self.program = replace(program, algorithm=amended)
        self.batch = 0
        self.start: Tree = {}  # w0, always in the same memory: a recorded step reads it there

    def send(self, shared: Shared, work: Work) -> Shared:
        """What clients get instead: no weights, and room for their factors."""
        _, steps, self.batch = work.plan.index.shape
        params, buffers, exact = dict(shared.params), dict(shared.buffers), dict(shared.exact)
        for name in self.names:
            weight = params.pop(name)[0]
            exact.pop(name)
            if name not in self.start:
                self.start[name] = torch.empty_like(weight, dtype=self.network.compute)
            self.start[name].copy_(weight)
            out, features = weight.shape
            room = self.start[name].new_zeros
            buffers[name + INPUTS] = room(1, steps * self.batch, features)
            buffers[name + SLOPES] = room(1, steps * self.batch, out)
            buffers[name + TAKEN] = torch.zeros(1, dtype=torch.int64, device=weight.device)
        return Shared(params, buffers, exact, shared.told)

    def factors(self, name: str, buffers: Tree) -> Factors:
        inputs, slopes, taken = (buffers[name + part] for part in OF_FACTORS)
        start = self.start[name]
        return Factors(start, inputs, slopes, taken, self.batch, self.lr, self.decay)

    def apply(
        self, params: Tree, buffers: Tree, images: Tensor, keys: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tree]:
        factors: dict[str, Any] = {name: self.factors(name, buffers) for name in self.names}
        own = {name: b for name, b in buffers.items() if not name.endswith(OF_FACTORS)}
        logits, moved = self.network.stacked(params | factors, own, images, keys, mask)
        for name in self.names:
            buffers[name + TAKEN] += 1
        return logits, buffers | moved

    def receive(self, parts: list[Part]) -> list[Part]:
        """Without what this form alone counts."""
        return [
            part._replace(
                counters={n: c for n, c in part.counters.items() if not n.endswith(OF_FACTORS)}
            )
            for part in parts
        ]


OF_FACTORS = (INPUTS, SLOPES, TAKEN)


@dataclass(frozen=True)
class SendFactors:
    """upload: the difference of what a client has, and the factors of what it has not.

    They are `multiplied` where every client's own update is asked for, not only their sum.
    """

    form: Factored
    multiplied: bool

    def __call__(self, local: Local) -> Upload:
        plain = {n: b for n, b in local.buffers.items() if not n.endswith(OF_FACTORS)}
        upload = difference(replace(local, buffers=plain))
        update = dict(upload.update)
        for name in self.form.names:
            factors = self.form.factors(name, local.buffers)
            faded = -factors.lr * factors.weights(local.steps).to(factors.slopes)
            slopes = factors.slopes * faded[:, :, None]
            if self.multiplied:
                update[name] = wide_product(slopes.mT, factors.inputs, torch.float32).double()
            else:
                update |= {name + INPUTS: factors.inputs, name + SLOPES: slopes}
        return replace(upload, update=update)


@dataclass(frozen=True)
class MultiplyFactors:
    """combine: the weighted sum, and the product of the factors, which is one."""

    inner: WeightedSum
    names: tuple[str, ...]
    linear: ClassVar[bool] = True
    uses_shares: ClassVar[bool] = True

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        rest = {name: u for name, u in updates.items() if not name.endswith(OF_FACTORS)}
        combined = self.inner(rest, shares, cohort, layout)
        for name in self.names:
            x, d = updates[name + INPUTS], updates[name + SLOPES]
            weighed = (d * shares.to(d)[:, None, None]).flatten(0, 1)
            product = wide_product(weighed.mT[None], x.flatten(0, 1)[None], torch.float32)
            combined[name] = product[0].double()
        return combined
