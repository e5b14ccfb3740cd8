"""Dropout by key, attention with it, and batch normalisation by mask, in place of PyTorch's own.

PyTorch's dropout takes the next numbers of a random generator, and its batch normalisation counts
padding as examples. The layers here do neither. Besides their input they need a key for the step
or a mask of the batch. They hold these as buffers outside the state dict: a caller substitutes
them through `torch.func.functional_call`, under `vmap` with one for each client.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedlens.core import keys

DROPOUT = keys.purpose("dropout")
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
WHOLE = 2**16  # a dropout probability is a multiple of 1 / WHOLE
LANES = 4  # one 64-bit hash decides for four positions, with 16 bits each


def keyed_dropout(
    x: Tensor, key: Tensor, p: float, layer: int, *, call: int = 0, channels: bool = False
) -> Tensor:
    """`x` [B, ...] with a share `p` of its positions, or of its channels, set to 0.

    The mask is an integer hash of the key, the layer, the row and the position in the row: the
    same for every dtype and device. Positions of images are counted pixel by pixel (channels last),
    the memory layout in training. `p` is rounded to a multiple of 2^-16, and the kept positions are
    scaled to match. `call` distinguishes the calls of one layer. The input of C clients is
    [C, B, ...], with keys [C].
    """
    num_dropped = round(p * WHOLE)
    if num_dropped in (0, WHOLE):
        return x if num_dropped == 0 else x * 0.0
    at = key.ndim  # the axis of the rows
    if x.ndim > at + 2 and not channels:
        pixels = x.movedim(at + 1, -1)
        dropped = keyed_dropout(pixels.flatten(at + 1), key, p, layer, call=call)
        return dropped.view(pixels.shape).movedim(-1, at + 1)
    rows, width = x.shape[at : at + 2]
    counter = torch.arange(rows, device=x.device)[:, None] << 32
    counter = counter | torch.arange(-(-width // LANES), device=x.device)
    hashes = keys.fold(key[..., None, None], dropout_word(layer, call), counter)
    lanes = _lanes(hashes)[..., :width]
    scale = WHOLE / (WHOLE - num_dropped)
    least = num_dropped - 2**15
    # The in-place form, which vmap lacks, gives int16 and not bool, which a CPU converts slowly.
    kept = lanes >= least if is_functorch_wrapped_tensor(lanes) else lanes.ge_(least)
    keep = kept.to(x.dtype).mul_(scale)
    return x * keep.view(*keep.shape, *[1] * (x.ndim - keep.ndim))


def dropout_word(layer: int, call: int) -> int:
    """The word that is folded into a client's key for one call of a layer."""
    return DROPOUT + (layer << 16) + call


def _lanes(hashes: Tensor) -> Tensor:
    """Each hash as four numbers in -2^15..2^15 - 1, the lowest bits first."""
    if not is_functorch_wrapped_tensor(hashes):
        return hashes.view(torch.int16)
    # vmap does not support a view with another dtype.
    return torch.stack([(hashes << (48 - 16 * i)) >> 48 for i in range(LANES)], -1).flatten(-2)


class KeyedDropout(nn.Module):
    """Dropout by key. Each call within a forward pass draws another mask."""

    key: Tensor  # [] int64

    def __init__(self, p: float, layer: int, *, channels: bool = False) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"dropout of {p}: choose a probability in 0..1")
        self.p, self.layer, self.channels = p, layer, channels
        self.calls = 0  # in this forward pass; a hook of `prepare` resets it
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        call, self.calls = self.calls, self.calls + 1
        return keyed_dropout(x, self.key, self.p, self.layer, call=call, channels=self.channels)

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}, channels={self.channels}"


class KeyedAttention(nn.MultiheadAttention):
    """Multi-head attention whose dropout of the attention weights is by key.

    In evaluation, where dropout does nothing, PyTorch's implementation runs.
    """

    def __init__(self, like: nn.MultiheadAttention, layer: int) -> None:
        """A layer that takes over the parameters and settings of `like`."""
        settings = (like.embed_dim, like.num_heads, 0.0, like.in_proj_bias is not None)
        sizes = {"kdim": like.kdim, "vdim": like.vdim, "batch_first": like.batch_first}
        super().__init__(*settings, **sizes, device="meta")  # draws no initial weights
        for name in like._parameters:
            setattr(self, name, getattr(like, name))
        self.out_proj = like.out_proj
        self.drop = KeyedDropout(like.dropout, layer)
        self.train(like.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if not self.training:
            rest = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return super().forward(query, key, value, *rest)
        if query.ndim != 3:
            raise ValueError(f"attention got {query.ndim} axes: give it [batch, length, features]")
        given = [query, key, value]
        if not self.batch_first:
            given = [x.transpose(0, 1) for x in given]
        q, k, v = (
            F.linear(x, weight, bias).reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for x, weight, bias in zip(given, *self._projections(), strict=True)
        )  # [B, heads, L or S, features of a head]
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # [B, heads, L, S]
        if attn_mask is not None:
            if attn_mask.ndim == 3:  # [B * heads, L, S]
                attn_mask = attn_mask.reshape(scores.shape)
            scores = scores + _as_bias(attn_mask, scores.dtype)
        if key_padding_mask is not None:  # [B, S]
            scores = scores + _as_bias(key_padding_mask, scores.dtype)[:, None, None]
        weights = self.drop(scores.softmax(-1))
        out = self.out_proj((weights @ v).transpose(1, 2).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        if not need_weights:
            return out, None
        return out, weights.mean(1) if average_attn_weights else weights

    def _projections(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """The weights and the biases of the projections to queries, keys and values."""
        bias = self.in_proj_bias
        biases = (None, None, None) if bias is None else bias.chunk(3)
        if self.in_proj_weight is not None:
            return self.in_proj_weight.chunk(3), biases
        return (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight), biases


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as a bias of the scores: minus infinity where a boolean mask is True."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


class Running(NamedTuple):
    """The running statistics of a batch normalisation, of C clients."""

    mean: Tensor  # [C, channels]
    var: Tensor  # [C, channels]
    batches: Tensor  # [C] number of batches seen
    momentum: float


class MaskedBatchNorm(_BatchNorm):
    """Batch normalisation, 1d or 2d, that excludes padding from its statistics.

    Its results for the examples of a padded batch, and its running statistics, equal those of
    PyTorch's layer on these examples alone. For padding the result is the bias. A batch of padding
    alone leaves the running statistics unchanged. They are updated in place.
    """

    mask: Tensor  # [B] nonzero for an example, 0 for padding; [0] if there is no padding

    def __init__(self, like: _BatchNorm) -> None:
        """A layer that takes over the parameters, buffers and settings of `like`."""
        settings = (like.eps, like.momentum, like.affine, like.track_running_stats)
        super().__init__(like.num_features, *settings)
        for name in (*like._parameters, *like._buffers):
            setattr(self, name, getattr(like, name))
        self.train(like.training)
        self.register_buffer("mask", torch.ones(0, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != self.num_features:
            shape, wanted = tuple(x.shape), self.num_features
            raise ValueError(f"BatchNorm of {wanted} channels got {shape}: give it [B, {wanted}]")
        mean, var = self.running_mean, self.running_var
        if not self.training and mean is not None:
            return F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)
        if not (self.training and self.track_running_stats):
            mean = var = None
        if len(self.mask) or (mean is not None and self.momentum is None):
            return self._masked(x, tracked=mean is not None)
        if mean is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum or 0.0
        return F.batch_norm(x, mean, var, self.weight, self.bias, True, momentum, self.eps)

    def _masked(self, x: Tensor, tracked: bool) -> Tensor:
        mask = self.mask if len(self.mask) else torch.ones(len(x), device=x.device)
        real = (mask != 0).view(-1, *[1] * (x.ndim - 1))
        channel = (1, -1, *[1] * (x.ndim - 2))
        axes = [0, *range(2, x.ndim)]
        # Padding is replaced by 0, not multiplied by 0: an overflow (inf, NaN) would remain.
        wide = torch.where(real, x.to(torch.promote_types(x.dtype, torch.float32)), 0)
        count = real.sum() * x.shape[2:].numel()
        share = 1 / count.clamp(min=1).to(wide.dtype)
        mean = wide.sum(axes) * share
        centred = (wide - mean.view(channel)) * real
        var = centred.square().sum(axes) * share
        if tracked:
            self._track(mean.detach(), var.detach(), count)
        out = centred * torch.rsqrt(var + self.eps).view(channel)
        if self.weight is not None:
            out = out * self.weight.view(channel)
        if self.bias is not None:
            out = out + self.bias.view(channel)
        return out.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        seen = count > 0
        self.num_batches_tracked.add_(seen)
        if self.momentum is None:
            factor = seen / self.num_batches_tracked.clamp(min=1).to(mean.dtype)
        else:
            factor = seen * torch.full_like(mean, self.momentum)
        unbiased = var * (count / (count - 1).clamp(min=1).to(var.dtype))
        self.running_mean.mul_(1 - factor).add_(mean * factor)
        self.running_var.mul_(1 - factor).add_(unbiased * factor)


class MaskedBatchNormAct(MaskedBatchNorm):
    """`MaskedBatchNorm`, then the dropout and activation of timm's `BatchNormAct2d`; same names."""

    def __init__(self, like: _BatchNorm) -> None:
        super().__init__(like)
        self.drop, self.act = like.get_submodule("drop"), like.get_submodule("act")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.drop(super().forward(x)))
        return out


def prepare(module: nn.Module) -> nn.Module:
    """A copy of `module` with keyed dropout and masked batch normalisation, names unchanged.

    It replaces `nn.Dropout`, `Dropout1d`, `Dropout2d`, `Dropout3d`, `BatchNorm1d`, `BatchNorm2d`,
    timm's `BatchNormAct2d`, and `nn.MultiheadAttention` that has dropout (unless with `add_bias_kv`
    or `add_zero_attn`), at any depth. Everything else stays: other subclasses of these, alpha
    dropout, and dropout that a model calls as a function, which cannot get a key.
    """
    layer = 0

    def replace(m: nn.Module) -> nn.Module:
        nonlocal layer
        if isinstance(m, _BatchNorm) and type(m) in (nn.BatchNorm1d, nn.BatchNorm2d):
            return MaskedBatchNorm(m)
        if isinstance(m, _BatchNorm) and type(m).__name__ == "BatchNormAct2d":
            return MaskedBatchNormAct(m)
        if type(m) is nn.MultiheadAttention and m.dropout and not _adds_a_key(m):
            layer += 1
            return KeyedAttention(m, layer - 1)
        if isinstance(m, _DropoutNd) and type(m) in DROPOUTS:
            layer += 1
            channels = type(m) is not nn.Dropout
            return KeyedDropout(m.p, layer - 1, channels=channels).train(m.training)
        return m

    prepared = replaced(copied(module), replace)
    dropouts = [m for m in prepared.modules() if isinstance(m, KeyedDropout)]
    if dropouts:
        prepared.register_forward_pre_hook(functools.partial(_reset_calls, dropouts))
    return prepared


def copied(module: nn.Module) -> nn.Module:
    """A copy of `module` whose parameters have the memory of its own: nobody writes to it."""
    own = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, own)


def _adds_a_key(attention: nn.MultiheadAttention) -> bool:
    """Whether it attends to keys besides those of its input, which few models do."""
    return attention.bias_k is not None or attention.add_zero_attn


def side_inputs(module: nn.Module) -> tuple[list[str], list[str]]:
    """The names of the buffers to substitute: dropout keys, and batch masks."""
    named = {f"{name}." if name else "": m for name, m in module.named_modules()}
    return (
        [f"{prefix}key" for prefix, m in named.items() if isinstance(m, KeyedDropout)],
        [f"{prefix}mask" for prefix, m in named.items() if isinstance(m, MaskedBatchNorm)],
    )


def group_norm(module: nn.Module) -> nn.Module:
    """A copy of `module` with group normalisation instead of every batch normalisation.

    The number of groups is the largest divisor of the channels that is at most 32 and leaves
    at least four channels a group, else 1. Weights and biases are kept, running statistics are not.
    """

    def replace(m: nn.Module) -> nn.Module:
        if not isinstance(m, _BatchNorm):
            return m
        if type(m) is not MaskedBatchNorm and not type(m).__module__.startswith("torch."):
            raise ValueError(
                f'norm is "group", but {type(m).__name__} of the model does more than normalise: '
                "choose another norm, or a model of plain BatchNorm layers"
            )
        norm = nn.GroupNorm(num_groups(m.num_features), m.num_features, m.eps, m.affine)
        norm.weight, norm.bias = m.weight, m.bias
        return norm.train(m.training)

    return replaced(copied(module), replace)


def num_groups(channels: int) -> int:
    """The largest divisor that is at most 32 and leaves at least four channels a group, else 1."""
    fitting = (g for g in range(min(32, channels // 4), 0, -1) if channels % g == 0)
    return next(fitting, 1)


def replaced(module: nn.Module, replacement: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """`module` with each submodule replaced; a submodule used twice stays shared."""
    new = {m: replacement(m) for m in module.modules()}
    for parent in list(new):
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = new[child]
    return new[module]


def _reset_calls(dropouts: list[KeyedDropout], *_: object) -> None:
    for dropout in dropouts:
        dropout.calls = 0
