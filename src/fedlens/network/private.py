"""Sums of clipped gradients of single examples, for C clients, without a loop over examples.

Layers note their input x and, in the backward pass, the gradient dy by their result. The gradient
of example i by the weights of a layer is the sum over its T rows (pixels) of dy_t x_t', so

    ||g_i||^2 = sum over t, s of (dy_t . dy_s) (x_t . x_s)      (Goodfellow 2015; Li et al. 2022)

needs no g_i ("ghost norm"), and the sum of the g_i times their factors is one product of all rows,
with each dy_t scaled. So no weight's gradient is computed in the backward pass, and no second
backward pass is needed (Bu et al., "Differentially Private Optimization on Large Model at Small
Cost", 2023). Where g_i is smaller than dy, or the ghost norm costs more, g_i is computed: a part of
the batch at a time if it is large.

Layers of other types, those called twice in a forward pass, and modules that cannot be read layer
by layer have each g_i computed by `torch.func.vmap`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fedlens.core import Tree, keys, per_row
from fedlens.network.functional import LayeredModel, MappedModel, Model, is_frozen
from fedlens.network.ops import convolve, tells_of_images
from fedlens.network.stacked.epilogue import Epilogue
from fedlens.network.stacked.layers import Activations, Form, LayerInput, followed, sides_of
from fedlens.network.stacked.products import apply, padded, wide_product

AT_ONCE = {"cpu": 2**22, "cuda": 2**26}  # numbers of the largest tensor of a part of a batch
MOST_IMAGES = 2**16 - 1  # that one launch of a kernel takes as clients
KEPT = {"cpu": 2**22, "cuda": 2**25}  # of a layer's gradients that are computed once


Tensors = Sequence[Tensor]


class Gradients(Protocol):
    """The gradients of C x B examples by some parameters."""

    def squared(self) -> Tensor:  # [C, B]
        """The squared norm of each example's gradient."""
        ...

    def weighted(self, factors: Tensor) -> Tree:  # [C, B] -> [C, ...]
        """The sum over each client's examples of factor times gradient."""
        ...


@dataclass(frozen=True)
class Held:
    """Gradients in memory, [C, B, ...] by the parameters' names."""

    tree: Tree

    def squared(self) -> Tensor:
        return sum_of(squares(g) for g in self.tree.values())

    def weighted(self, factors: Tensor) -> Tree:
        return {name: weighted_sum(g, factors) for name, g in self.tree.items()}

    def plus(self, other: Held) -> Held:
        return type(self)({name: g + other.tree[name] for name, g in self.tree.items()})


class HeldKernels(Held):
    """Of a convolution, its weights as [C, B, h, w, channels, out]."""

    def weighted(self, factors: Tensor) -> Tree:
        found = super().weighted(factors)
        return found | {"weight": found["weight"].permute(0, 4, 3, 1, 2)}


@dataclass(frozen=True)
class OfRows:
    """Of a linear layer with rows x [C, B, n] and dy [C, B, m]."""

    layer: nn.Linear
    names: frozenset[str]
    x: Tensor
    dy: Tensor
    is_small: ClassVar[bool] = False

    def squared(self) -> Tensor:
        by_bias = self.dy.square().sum(2)
        by_weight = by_bias * self.x.square().sum(2)
        return sum_of({"weight": by_weight, "bias": by_bias}[name] for name in self.names)

    def weighted(self, factors: Tensor) -> Tree:
        dy = self.dy * factors[:, :, None]
        found = {}
        if "weight" in self.names:
            found["weight"] = torch.bmm(dy.mT, self.x)
        return found | ({"bias": dy.sum(1)} if "bias" in self.names else {})

    def each(self) -> Held:
        found = {"weight": self.dy[..., None] * self.x[:, :, None], "bias": self.dy}
        return Held({name: found[name] for name in self.names})


@dataclass(frozen=True)
class OfImages:
    """Of a convolution with images x [C, B, channels, H, W] and dy [C, B, out, H', W'].

    On a GPU these may be in bfloat16: it multiplies such numbers, and sums in float32, without
    error. What is scaled is scaled in float32, so that what is clipped is what is summed.
    """

    layer: nn.Conv2d
    names: frozenset[str]
    x: Tensor
    dy: Tensor

    @property
    def rows(self) -> int:
        return self.dy.shape[3:].numel()

    @property
    def width(self) -> int:
        return self.layer.weight[0].numel()  # of a row: the pixels under a kernel

    @property
    def is_small(self) -> bool:
        """Whether an example's gradient has at most as many numbers as its dy."""
        return self.width <= self.rows

    @property
    def is_kept(self) -> bool:
        """Whether the gradients are kept from the norms to the sum, and so computed once."""
        size = self.layer.weight.numel() * self.dy.shape[:2].numel()
        return size <= KEPT[self.dy.device.type]

    @cached_property
    def each_weight(self) -> Tensor:  # [C, B, groups, outs, width]
        return torch.cat([_product(dy.mT, x) for x, dy in self._parts(0)], 1)

    @cached_property
    def each_bias(self) -> Tensor:  # [C, B, out]
        return self.dy.sum((3, 4), dtype=_wide(self.dy))

    def squared(self) -> Tensor:
        found = []
        if "bias" in self.names:
            found.append(squares(self.each_bias))
        if "weight" in self.names and self.is_kept:
            found.append(squares(self.each_weight))
        elif "weight" in self.names:
            outs = self.dy.shape[2] // self.layer.groups
            by_rows = self.rows * (self.width + outs) < self.width * outs
            parts = []
            for x, dy in self._parts(self.rows if by_rows else outs):
                if by_rows:
                    one = (_product(x, x.mT) * _product(dy, dy.mT)).sum((2, 3, 4))
                else:
                    one = squares(_product(dy.mT, x))
                parts.append(one)
            found.append(torch.cat(parts, 1))
        return sum_of(found)

    def weighted(self, factors: Tensor) -> Tree:
        found: Tree = {}
        if "bias" in self.names:
            found["bias"] = weighted_sum(self.each_bias, factors)
        if "weight" in self.names and self.is_kept:
            found["weight"] = self._kernels(weighted_sum(self.each_weight, factors))
            return found
        dy = wider(self.dy) * factors[:, :, None, None, None]
        if "weight" in self.names and len(dy) == 1:
            left, right, top, bottom = sides_of(self.layer)
            images, pad = wider(self.x[0]), (top, left)
            if (left, top) != (right, bottom):
                images, pad = F.pad(images, (left, right, top, bottom)), (0, 0)
            layer, weight = self.layer, dy.new_empty(self.layer.weight.shape)  # read for its shape
            rest = layer.stride, pad, layer.dilation, False, (0, 0), layer.groups
            only = [False, True, False]
            given = dy[0].contiguous(memory_format=_format(images)), images, weight
            found["weight"] = torch.ops.aten.convolution_backward(*given, None, *rest, only)[1][
                None
            ]
        elif "weight" in self.names:
            total: Any = 0.0
            for x, rows in self._parts(0, dy):  # [C, b, groups, T, ...]
                x, rows = (t.transpose(1, 2).flatten(2, 3) for t in (wider(x), rows))
                total = total + rows.mT @ x
            found["weight"] = self._kernels(total)
        return found

    def each(self) -> Held:
        found: Tree = {"bias": self.each_bias} if "bias" in self.names else {}
        if "weight" in self.names:
            found["weight"] = self._kernels(self.each_weight)
        return Held(found)

    def _parts(self, more: int, dy: Tensor | None = None) -> Iterable[tuple[Tensor, Tensor]]:
        """Patches [C, b, groups, T, width] and dy [C, b, groups, T, outs], b examples at a time.

        `more` is how many numbers are made from each row of an example besides.
        """
        dy, groups = self.dy if dy is None else dy, self.layer.groups
        outs = dy.shape[2] // groups
        each = len(dy) * groups * self.rows * (self.width + more)
        size = max(AT_ONCE[dy.device.type] // each, 1)
        for first in range(0, dy.shape[1], size):
            some = slice(first, first + size)
            rows = dy[:, some].flatten(3).view(len(dy), -1, groups, outs, self.rows).mT
            yield self._patches(self.x[:, some]), rows

    def _patches(self, x: Tensor) -> Tensor:
        images = padded(x.flatten(0, 1), sides_of(self.layer))  # [N, H, W, channels]
        count, tall, wide, channels = images.shape
        (height, width), (down, right) = self.layer.kernel_size, self.layer.stride
        under, beside = self.layer.dilation
        row = wide * channels
        groups = self.layer.groups
        shape = (count, *self.dy.shape[3:], height, width, groups, channels // groups)
        strides = (tall * row, down * row, right * channels, under * row, beside * channels)
        view = images.as_strided(shape, (*strides, channels // groups, 1))
        view = view.permute(0, 5, 1, 2, 3, 4, 6)  # [N, groups, H', W', h, w, channels of a group]
        return view.reshape(*x.shape[:2], groups, self.rows, -1)

    def _kernels(self, found: Tensor) -> Tensor:
        """[..., groups, outs, h * w * channels] as [..., out, channels, h, w]."""
        kernels = found.flatten(-3, -2)
        return kernels.view(*kernels.shape[:-1], *self.layer.kernel_size, -1).movedim(-1, -3)


def _format(images: Tensor) -> torch.memory_format:
    last = images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _of_group_norm(layer: nn.GroupNorm, names: frozenset[str], x: Tensor, dy: Tensor) -> Held:
    """Of group normalisation of images x [C, B, channels, H, W]."""
    found = {}
    if "weight" in names:
        normal = F.group_norm(x.flatten(0, 1), layer.num_groups, eps=layer.eps)
        found["weight"] = (normal.view(x.shape) * dy).sum((3, 4))
    if "bias" in names:
        found["bias"] = dy.sum((3, 4))
    return Held(found)


class _Tap(torch.autograd.Function):
    """The identity, which notes the gradient of its result."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, _: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        ctx.note = note
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        ctx.note(dy)
        return dy, None, None


@dataclass
class Notes:
    """What the layers of a model noted in one forward and backward pass."""

    trained: Tree  # [C, ...] the parameters that have a gradient
    alive: Tensor  # [] requires a gradient, so that every layer has a backward pass
    calls: Counter[str] = field(default_factory=Counter)
    found: dict[str, Gradients] = field(default_factory=dict)  # by the layer's name

    def run(self, form: Form, layer: nn.Module, x: Activations, given: LayerInput) -> Activations:
        """Run a layer whose parameters have no gradients, and note those of each example."""
        own = {full.removeprefix(f"{given.name}."): full for full in given.held}
        names = frozenset(name for name, full in own.items() if full in self.trained)
        if not names:
            return form(layer, x, given)
        bare = given._replace(
            held={name: t.detach() for name, t in given.held.items()},
            epilogue=Epilogue(),
        )
        self.calls[given.name] += 1
        if self._is_tapped_inside(form, layer, x, names):
            return self._tapped_inside(layer, x, given, names)
        tensors = {name: t.to(wider(t)) for name, t in bare.cast().own.items()}

        def one(tree: Tree, row: Tensor) -> Tensor:
            y: Tensor = functional_call(layer, tree, (row[None],))
            return y[0]

        def note(dy: Tensor) -> None:
            own = [x.by_client(), y.now(dy).by_client()]
            kind: Any = None
            if form.applies(layer, x):
                kind = {nn.Linear: OfRows, nn.Conv2d: OfImages}.get(type(layer))
            exact = kind is OfImages and dy.is_cuda  # as they are
            wide = own if exact else [*map(wider, own)]
            if kind is not None:
                made = kind(layer, names, *wide)
                repeated = self.calls[given.name] > 1
                self._add(given.name, made.each() if repeated or made.is_small else made)
            elif isinstance(layer, nn.GroupNorm) and x.is_images:
                self._add(given.name, _of_group_norm(layer, names, *wide))
            else:
                mine = {name: tensors[name] for name in names}
                self._add(given.name, _mapped_gradients(one, mine, tensors, wide[:1], wide[1]))

        y = self._forward(form, layer, x, bare)
        tapped = apply(_Tap, y.tensor, self.alive, note)
        return y.now(followed(tapped, given.epilogue))

    def _is_tapped_inside(
        self, form: Form, layer: nn.Module, x: Activations, names: frozenset[str]
    ) -> bool:
        """Whether a kernel computes the gradients of a convolution's images, which are small."""
        return (
            isinstance(layer, nn.Conv2d)
            and form.applies(layer, x)
            and tells_of_images(x.tensor)
            and "weight" in names
            and (layer.groups, layer.dilation) == (1, (1, 1))
            and len(x.tensor) <= min(MOST_IMAGES, KEPT["cuda"] // layer.weight.numel())
        )

    def _tapped_inside(
        self, layer: Any, x: Activations, given: LayerInput, names: frozenset[str]
    ) -> Activations:
        def note(dw: Tensor, db: Tensor | None) -> None:
            each = {"weight": dw} if db is None else {"weight": dw, "bias": db}
            tree = {n: each[n].view(x.clients, -1, *each[n].shape[1:]) for n in names}
            self._add(given.name, HeldKernels(tree))

        own, follows = given.own, given.epilogue
        y = convolve(
            x.tensor,
            own["weight"].detach(),
            own["bias"].detach() if "bias" in own else None,
            sides_of(layer),
            layer.stride,
            relu=follows.relu,
            pool=follows.pool,
            mask=follows.mask,
            tap=(self.alive, note),
        )
        return x.now(y)

    def _forward(
        self, form: Form, layer: nn.Module, x: Activations, given: LayerInput
    ) -> Activations:
        plain = isinstance(layer, nn.Conv2d) and form.applies(layer, x)
        if not (plain and x.clients == 1 and x.tensor.device.type == "cpu"):
            return form(layer, x, given)
        assert isinstance(layer, nn.Conv2d)
        own = given.cast().own  # PyTorch's own convolution is the fastest for one client
        geometry: Any = layer.stride, layer.padding, layer.dilation, layer.groups
        bias = own["bias"][0] if "bias" in own else None
        return x.now(F.conv2d(x.tensor, own["weight"][0], bias, *geometry))

    def _add(self, name: str, made: Any) -> None:
        before: Any = self.found.get(name)
        self.found[name] = made if before is None else before.plus(made)

    def clipped_sums(self, losses: Tensor, mask: Tensor, clip: Any) -> Tree:  # [C, B] each
        """The sum over each client's examples of its gradient, shortened to `clip` if longer."""
        total = torch.where(mask > 0, losses, 0).sum()
        torch.autograd.grad(total, [self.alive], allow_unused=True)
        with torch.no_grad():
            squared = sum_of(one.squared() for one in self.found.values())
            factors = clip_factors(squared, clip) * (mask > 0)
            sums: Tree = {}
            for name in list(self.found):
                own = self.found.pop(name).weighted(factors)
                prefix = f"{name}." if name else ""
                sums |= {prefix + key: g for key, g in own.items()}
            return {n: _like(p, sums[n]) for n, p in self.trained.items() if n in sums}


def _like(p: Tensor, g: Tensor) -> Tensor:
    """In the dtype and the memory layout of a parameter: a step on others takes longer."""
    g = g.to(p)
    return g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)


def clip_factors(squared: Tensor, clip: Any) -> Tensor:  # [C, B]
    """By which gradients of these squared norms are shortened; 1 for one of 0, not 0 / 0."""
    factors = (per_row(clip, squared) / squared.sqrt()).clamp(max=1)
    return torch.where(squared > 0, factors, 1.0)


def squares(g: Tensor) -> Tensor:  # [C, B, ...] -> [C, B]
    norms: Tensor = torch.linalg.vector_norm(g.flatten(2), dim=2)
    return norms.square()


def weighted_sum(g: Tensor, factors: Tensor) -> Tensor:  # [C, B, ...], [C, B] -> [C, ...]
    return torch.bmm(factors.to(g)[:, None], g.flatten(2)).view(len(g), *g.shape[2:])


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    total: Any = sum(tensors)
    found: Tensor = total
    return found


def wider(t: Tensor) -> Tensor:
    """In float32 at least: what is clipped must be what is summed."""
    return t.to(_wide(t))


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _product(a: Tensor, b: Tensor) -> Tensor:  # [C, B, groups, n, k], [C, B, groups, k, m]
    found = wide_product(a.flatten(0, 2), b.flatten(0, 2), _wide(a))
    return found.view(*a.shape[:3], *found.shape[1:])


Run = Callable[..., Tensor]  # of one example: (parameters, its inputs) -> its result


def _mapped_gradients(run: Run, own: Tree, rest: Tree, inputs: Tensors, dy: Tensor) -> Held:
    """Of any function, whose gradient of each example is computed; `rest` has none."""
    size = dy.shape[1]

    def of_one(own: Tree, rest: Tree, grad: Tensor, *inputs: Tensor) -> Tree:
        y, back, *_ = vjp(lambda tree: run(rest | tree, *inputs), own)
        found: Tree = back(grad.to(y))[0]
        return found

    # One vmap over all examples: some operations have wrong gradients under two.
    each: Any = [{n: t.repeat_interleave(size, 0) for n, t in tree.items()} for tree in (own, rest)]
    with torch.enable_grad():
        flat = vmap(of_one)(*each, *(t.flatten(0, 1) for t in (dy, *inputs)))
    return Held({name: g.view(-1, size, *g.shape[1:]) for name, g in flat.items()})


@dataclass(frozen=True)
class PrivateModel:
    """A model in training whose gradients are clipped example by example."""

    model: LayeredModel | MappedModel
    takes_steps: ClassVar[bool] = False

    def normalise(self, images: Tensor) -> Tensor:
        return self.model.normalise(images)

    def __call__(
        self, params: Tree, images: Tensor, client_keys: Tensor, mask: Tensor
    ) -> tuple[Tensor, Notes]:
        """The logits [C, B, L], and the notes of the layers."""
        notes = Notes(params, torch.zeros((), device=mask.device, requires_grad=True))
        if isinstance(self.model, LayeredModel):
            given = params, images, client_keys, mask
            return self.model.logits(*given, training=True, run=notes.run), notes
        return self._mapped(notes, images, client_keys, mask), notes

    def _mapped(self, notes: Notes, images: Tensor, client_keys: Tensor, mask: Tensor) -> Tensor:
        """The whole module as one layer, which is called with one example at a time."""
        assert isinstance(self.model, MappedModel)
        module, params = self.model.module, notes.trained
        images = self.model.normalise(images)
        rows = keys.fold(client_keys[:, None], torch.arange(images.shape[1], device=mask.device))
        whole = torch.ones(0, device=mask.device)

        def of_one(own: Tree, image: Tensor, key: Tensor) -> Tensor:
            return module(own, image[None], key, whole, training=True)[0]

        bare = {name: p.detach() for name, p in params.items()}
        logits = vmap(vmap(of_one, (None, 0, 0)))(bare, images, rows)

        def note(dy: Tensor) -> None:
            notes.found[""] = _mapped_gradients(of_one, bare, {}, (images, rows), dy)

        return apply(_Tap, logits, notes.alive, note)


def private_model(model: object, module: nn.Module) -> PrivateModel:
    """`model` as a private one; a ValueError if `module` mixes the examples of a batch."""
    for name, layer in module.named_modules():
        mixes = isinstance(layer, _BatchNorm) or getattr(layer, "track_running_stats", False)
        if mixes and not is_frozen(layer):
            raise ValueError(
                f"privacy of examples: {name} ({type(layer).__name__}) mixes the examples of a "
                'batch, so that no gradient is of one example alone: set norm = "group"'
            )
    assert isinstance(model, LayeredModel | MappedModel)
    return PrivateModel(model)


AnyModel = Model | PrivateModel
