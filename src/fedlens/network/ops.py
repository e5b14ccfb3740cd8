"""Training operations with a plain form and a Triton form; this module chooses which one runs.

A Triton form needs a GPU, an installed Triton, and any dtype but float64 (`_takes_triton`). In
addition each operation requires:

    normalise                                bytes
    dropout                                  images or rows, and a share other than 0 and 1
    mean_cross_entropy                       nothing more
    group_norm, batch_norm                   a skip connection, if any, of the same shape and dtype
    batch_norm                               contiguous running statistics, if any
    convolve_channels                        nothing more
    convolve, linear, factored_linear        bfloat16
    linear                                   at most LINEAR_ROWS rows and LINEAR_WEIGHTS weights,
                                             with the features contiguous in memory
    factored_linear                          at most FACTORED_ROWS rows
    noisy_mean, normals, shorten_            nothing more: also float64
    sgd_, local_step_                        float32 tensors with the same strides; one kernel
                                             launch updates STEP_TENSORS of them

Everything else runs the plain form: PyTorch's own operations, on any device. Both forms compute the
same up to rounding. Only `network/kernels` imports Triton, and it is imported only when it runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from threading import Thread

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core import Number, Tree, keys, per_row
from fedlens.core.trees import moved
from fedlens.network.layers import LANES, WHOLE, Running, keyed_dropout
from fedlens.network.pool import Windows
from fedlens.network.stacked import products
from fedlens.network.stacked.epilogue import Epilogue, KeyedMask
from fedlens.network.stacked.products import Factors, Padding, Tap, apply

LINEAR_ROWS = 64  # of a client's batch: above this, or
LINEAR_WEIGHTS = 2**18  # of a client's matrix, cuBLAS is faster
FACTORED_ROWS = 128  # of a client's batch: the most that one program can hold
STEP_TENSORS = 16  # that one kernel launch updates
LARGE_ROWS = 2**24  # numbers: fewer are not worth the seconds in which a kernel is compiled
MOST_ROWS = 128  # what kernels of columns have room for


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _takes_triton(x: Tensor) -> bool:
    return x.is_cuda and x.dtype is not torch.float64 and has_triton()


def _multiplies_in_triton(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and _takes_triton(x)


@cache
def loading_triton() -> Thread:
    """The thread that loads Triton, started once, while the main thread can read data."""
    thread = Thread(target=_load_triton, name="load-triton", daemon=True)
    thread.start()
    return thread


def _load_triton() -> None:
    from fedlens.network.kernels import launch

    launch.prepare()


def compile_ahead(run: Callable[[], object]) -> None:
    """Call `run` with kernel launches disabled, then compile its kernels in parallel."""
    if has_triton():
        loading_triton().join()
        from fedlens.network.kernels import launch

        with launch.compiled_at_the_end():
            run()


def normalise(
    images: Tensor,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    dtype: torch.dtype,
) -> Tensor:
    """Bytes as (x / 255 - mean) / std, channel by channel, in `dtype`; floats as they are.

    `images` is [..., channels, H, W]. The default mean is 0, the default std is 1.
    """
    if images.is_floating_point():
        return images.to(dtype)
    channels = images.shape[-3]
    mean = tuple(mean) if mean is not None else (0.0,) * channels
    std = tuple(std) if std is not None else (1.0,) * channels
    if not len(mean) == len(std) == channels:
        raise ValueError(
            f"images of {channels} channels but {len(mean)} means and {len(std)} stds: "
            "give one for each channel"
        )
    wide = torch.promote_types(dtype, torch.float32)
    scale, shift = _scale_and_shift(mean, std, images.device, wide)
    if _takes_triton(images) and images.dtype is torch.uint8:
        from fedlens.network.kernels import elementwise

        rows = images.flatten(0, -4)
        done = elementwise.normalise(rows, scale.flatten(), shift.flatten(), dtype)
        return done.view(*images.shape[:-3], *done.shape[1:])
    return images.to(wide).mul_(scale).add_(shift).to(dtype)


@lru_cache(maxsize=32)
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[channels, 1, 1] each; cached, because their copy to the device waits for its queued work."""
    m, s = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (mean, std))
    return (1 / (255 * s)).to(device, dtype), (-m / s).to(device, dtype)


def dropout(x: Tensor, mask: KeyedMask, *, channels: bool = False) -> Tensor:
    """`layers.keyed_dropout` for C clients: x is [C, B, channels, H, W] or [C, B, n]."""
    if _takes_triton(x) and x.ndim in (3, 5) and 0 < mask.num_dropped < WHOLE:
        from fedlens.network.kernels import functions

        flat = x.flatten(0, 1) if x.ndim == 5 else x
        return functions.dropout(flat, mask, whole_channels=channels).view(x.shape)
    return keyed_dropout(x, mask.keys, mask.p, mask.layer, call=mask.call, channels=channels)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Padding,
    stride: tuple[int, int] = (1, 1),
    *,
    relu: bool = False,
    pool: Windows | None = None,
    mask: KeyedMask | None = None,
    tap: Tap | None = None,
) -> Tensor:
    """Convolve images [C * B, channels, H, W] with each client's kernels [C, out, channels, h, w].

    Optionally ReLU, max-pooling and then dropout follow. Weights may have a wider dtype than the
    images; their gradients have the dtype of the weights. A `tap` is for
    where `tells_of_images`.
    """
    if _multiplies_in_triton(x):
        from fedlens.network.kernels import functions

        # The kernel hashes four output channels together; otherwise dropout is a separate kernel.
        with_it = mask if mask is None or _drops_by_fours(mask, weight.shape[1]) else None
        operands = x, weight, bias, padding, stride
        y = functions.convolve(*operands, relu=relu, pool=pool, mask=with_it, tap=tap)
        mask = None if with_it is not None else mask
    else:
        y = apply(products.Convolve, x, weight, bias, padding, stride)
        y = F.relu(y) if relu else y
        y = y if pool is None else pool.maxima(y)
    return y if mask is None else dropped_images(y, mask)


def tells_of_images(x: Tensor) -> bool:
    """Whether `convolve` takes a tap."""
    return _multiplies_in_triton(x)


def _drops_by_fours(mask: KeyedMask, outs: int) -> bool:
    return 0 < mask.num_dropped < WHOLE and outs % LANES == 0


def dropped_images(x: Tensor, mask: KeyedMask) -> Tensor:
    """Dropout of images [C * B, channels, H, W]."""
    return dropout(x.view(len(mask.keys), -1, *x.shape[1:]), mask).flatten(0, 1)


def convolve_channels(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: Padding, stride: tuple[int, int]
) -> Tensor:
    """Depthwise convolution of images [C * B, channels, H, W].

    Each channel has its own one of the kernels [C, channels, 1, h, w].
    """
    if _takes_triton(x):
        from fedlens.network.kernels import functions

        return functions.convolve_channels(x, weight, bias, padding, stride)
    return products.grouped_convolve(x, weight, bias, padding, stride, (1, 1), x.shape[1])


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    clients: int,
    groups: int,
    eps: float,
    epilogue: Epilogue,
) -> Tensor:
    """Group norm of images [C * B, channels, H, W], weight and bias [C, channels], and epilogue."""
    if _takes_triton(x) and _fits(epilogue, x):
        from fedlens.network.kernels import norms

        return norms.group_norm(x, weight, bias, clients, groups, eps, epilogue)
    return epilogue(products.group_norm(x, weight, bias, clients, groups, eps))


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor,
    eps: float,
    running: Running | None,
    epilogue: Epilogue,
) -> Tensor | None:
    """A `MaskedBatchNorm` in training, for images [C * B, channels, H, W], and the epilogue.

    Weights and biases are [C, channels], `mask` is [C, B]; `running` is updated in place. None if
    the Triton form cannot run: the caller then runs the layer itself, client by client.
    """
    lies_plainly = running is None or all(t.is_contiguous() for t in running[:3])
    if not (_takes_triton(x) and _fits(epilogue, x) and lies_plainly):
        return None
    from fedlens.network.kernels import norms

    return norms.batch_norm(x, weight, bias, mask, eps, running, epilogue)


def _fits(epilogue: Epilogue, x: Tensor) -> bool:
    """Whether the skip connection, if any, has the shape and dtype of x."""
    around = epilogue.around
    return around is None or (around.shape == x.shape and around.dtype is x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> Tensor:
    """Multiply rows [C, B, n] by each client's matrix [C, out, n]; ReLU is optional."""
    is_small = x.shape[1] <= LINEAR_ROWS and weight.shape[1:].numel() <= LINEAR_WEIGHTS
    if _multiplies_in_triton(x) and is_small and weight.stride(2) == 1:
        from fedlens.network.kernels import functions

        return apply(functions.Linear, x, weight, bias, relu)
    return apply(products.Linear, x, weight, bias, relu)


def factored_linear(x: Tensor, factors: Factors, bias: Tensor | None, *, relu: bool) -> Tensor:
    """`linear` by factors; it stores the step's inputs and, in the backward pass, grads in them."""
    if _multiplies_in_triton(x) and x.shape[1] <= FACTORED_ROWS:
        from fedlens.network.kernels import functions

        return apply(functions.FactoredLinear, x, bias, factors, relu)
    return apply(products.FactoredLinear, x, bias, factors, relu)


def mean_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:  # [C]
    """The weighted mean of the cross-entropies of logits [C, B, L] with labels [C, B]."""
    if _takes_triton(logits):
        from fedlens.network.kernels import functions

        return apply(functions.MeanCrossEntropy, logits, labels, weights)
    rows = logits.to(weights).flatten(0, 1)
    losses = F.cross_entropy(rows, labels.flatten(), reduction="none")
    return weighted_mean(losses.view(labels.shape), weights)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:  # [C, B], [C, B] -> [C]
    # All weights of a batch may be 0 (p(label) is 0 for all of it): the loss is then 0, not NaN.
    total = weights.sum(1).clamp(min=1e-12)
    return (weights * losses).sum(1) / total


def noisy_mean(
    total: Tensor, client_keys: Tensor, number: int, std: Tensor, counts: Tensor
) -> Tensor:  # [C, ...], [C], tensor `number`, [C], [C]
    """(total + std N(0, I)) / count of each client, the noise by its key for this tensor."""
    if total.is_cuda and has_triton():
        from fedlens.network.kernels import private

        return private.noisy_mean(total, client_keys, number, std, counts)
    size = total[0].numel()
    own = keys.fold(client_keys, number)
    words = keys.fold(own[:, None], torch.arange(-(-size // 2), device=total.device))
    normal = keys.pairs_of_normals(words, total.dtype)[:, :size].view(total.shape)
    noisy = normal.mul_(per_row(std.to(total), total)).add_(total)
    return noisy / per_row(counts.to(total), total)


def normals(key: Tensor, count: int, device: torch.device) -> Tensor:
    """`keys.normals` of a key of the host, on a device."""
    if device.type == "cuda" and has_triton():
        from fedlens.network.kernels import private

        return private.normals(int(key), count, device)
    return keys.normals(moved(key, device), count)


def shorten_(rows: Tensor, factors: Tensor) -> None:
    """Multiply rows [C, n] by factors [C] in place; where that is 0 all becomes 0, also NaN."""
    if rows.is_cuda and has_triton():
        from fedlens.network.kernels import private

        private.shorten_(rows, factors)
        return
    rows.mul_(factors[:, None]).nan_to_num_(0.0)


def sgd_(
    params: list[Tensor],
    grads: list[Tensor],
    velocity: list[Tensor],
    lr: Number,
    momentum: Number,
    decay: Number,
    decaying: list[bool],
    *,
    nesterov: bool,
) -> None:
    """d = grad + decay * w;  v = momentum * v + d;  w = w - lr * v, in place, for tensors [C, ...].

    With `nesterov` the last is w - lr * (d + momentum * v). An empty `velocity` means no momentum.
    `decaying` marks the params that decay. Each number may be a tensor [C]. Grads may be
    overwritten.
    """
    numbers = lr, momentum, decay
    if _step_as_they_lie(params, (grads, velocity) if velocity else (grads,), numbers):
        from fedlens.network.kernels import elementwise

        for some in _batches(len(params)):
            elementwise.sgd_(
                params[some], grads[some], velocity[some], *numbers, decaying[some],
                nesterov=nesterov,
            )  # fmt: skip
        return
    if any(decaying):
        fading = [i for i, does in enumerate(decaying) if does]
        _add([grads[i] for i in fading], [params[i] for i in fading], decay)
    if velocity:
        _scale(velocity, momentum)
        _add(velocity, grads, 1.0)
        if nesterov:
            _add(grads, velocity, momentum)
    _add(params, velocity if velocity and not nesterov else grads, lr, sign=-1)


def _add(to: list[Tensor], what: list[Tensor], times: Number, sign: int = 1) -> None:
    """to += sign * times * what."""
    if isinstance(times, Tensor):
        for a, b in zip(to, what, strict=True):
            a.addcmul_(b, torch.as_tensor(per_row(times, b)), value=sign)
    else:
        torch._foreach_add_(to, what, alpha=sign * times)


def _scale(what: list[Tensor], times: Number) -> None:
    if isinstance(times, Tensor):
        for one in what:
            one.mul_(torch.as_tensor(per_row(times, one)))
    else:
        torch._foreach_mul_(what, times)


def local_step_(
    params: Tree, grads: Tree, server: Tree, drift: Tree, lr: Number, decay: Number
) -> None:
    """w = server + decay * (w - server) - lr * (grad + drift), in place, for each w of `params`.

    Params, grads and drift are [C, ...], the server's tensors [1, ...] or [C, ...]. The other trees
    may have more names than `params`; an empty `drift` is 0. `lr` and `decay` may be tensors [C].
    """
    w, g, s = ([tree[name] for name in params] for tree in (params, grads, server))
    d = [drift[name] for name in params] if drift else []
    if _step_as_they_lie(w, (g, d) if d else (g,), (lr, decay), s):
        from fedlens.network.kernels import elementwise

        for some in _batches(len(w)):
            elementwise.local_step_(w[some], g[some], s[some], d[some], lr, decay)
        return
    if isinstance(lr, Tensor) or isinstance(decay, Tensor):
        for i, p in enumerate(w):
            push = (g[i] + d[i] if d else g[i]) * per_row(lr, p)
            p.sub_(s[i]).mul_(per_row(decay, p)).add_(s[i]).sub_(push)
        return
    for p, grad, start in zip(w, g, s, strict=True):
        p.mul_(decay).add_(start, alpha=1 - decay).add_(grad, alpha=-lr)
    for p, more in zip(w, d, strict=bool(d)):
        p.add_(more, alpha=-lr)


def _batches(count: int) -> Iterator[slice]:
    """Slices of `count` tensors, one slice for each kernel launch."""
    for first in range(0, count, STEP_TENSORS):
        yield slice(first, first + STEP_TENSORS)


def _step_as_they_lie(
    to: list[Tensor],
    others: Iterable[list[Tensor]],
    numbers: Iterable[Number],
    server: Sequence[Tensor] = (),
) -> bool:
    """Whether the kernels of `sgd_` and `local_step_` can update these tensors."""
    if not to or not _takes_triton(to[0]):
        return False
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    for a, *rest in zip(to, *others, strict=True):
        # Same strides and dense memory: then an element has the same offset in all of them.
        if not all(t.dtype is torch.float32 and _lies_as(a, t) for t in (a, *rest)):
            return False
        if not _is_dense(a):
            return False
        clients_first = a.stride(0) * len(a) == a.numel()
        for number in tensors:
            fits = number.numel() in (1, len(a)) and number.device == a.device
            if not (clients_first and fits and number.dtype is torch.float32):
                return False
    return all(_lies_as(a[0], s[0]) for a, s in zip(to, server, strict=bool(server)))


def _lies_as(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same strides; the stride of an axis of size 1 does not matter."""
    there = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(step == other for size, step, other in there if size > 1)


def _is_dense(a: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of its axes."""
    order = sorted(range(a.ndim), key=a.stride, reverse=True)
    return a.is_contiguous() or a.permute(order).is_contiguous()


def by_kernels(rows: Tensor) -> bool:
    """Whether kernels look at the columns of updates [C, D], and read them only once."""
    is_large = rows.is_cuda and rows.numel() >= LARGE_ROWS and len(rows) <= MOST_ROWS
    return is_large and has_triton()


def products_of_rows(
    rows: Tensor, origin: Tensor | None = None, needed: Tensor | None = None
) -> Tensor:  # [C, D], [D], [] to [C, C] float64
    """<u_i - o, u_j - o>; they are 0, and nothing is read, if `needed` is False."""
    from fedlens.network.kernels import gram

    return gram.products(rows, origin, needed)


def mean_between(rows: Tensor, cut: int) -> Tensor:  # [C, D] to [D]
    """The mean of each column without its `cut` smallest and `cut` largest values."""
    from fedlens.network.kernels import order

    return order.mean_between(rows, cut)


def mean_around(rows: Tensor, keep: int, near: float) -> Tensor:  # [C, D] to [D]
    """The mean of the `keep` values of each column that are nearest to its median."""
    from fedlens.network.kernels import order

    return order.mean_around(rows, keep, near)
