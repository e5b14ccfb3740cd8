"""What tests of kernels share: tensors of whole numbers, and whether two forms agree on them."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cuda.matmul.allow_tf32 = True
LOOSE = 1e-4 if DEVICE == "cpu" else 2e-2  # a GPU multiplies in tf32 here


def agree(what: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float = LOOSE) -> None:
    worst = (found - expected).norm() / expected.norm().clamp(min=1e-12)
    assert worst < tolerance, f"{what}: off by {worst:.1e}"


def on_one_side(pull: torch.Tensor, found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """A gradient that is 0 where rounding took two results to different sides of a ReLU."""
    return pull * ((found > 0) == (expected > 0))


def whole(*shape: int) -> torch.Tensor:
    """Small whole numbers: products and sums of them are exact, also in tf32."""
    return torch.randint(-3, 4, shape, device=DEVICE).to(torch.get_default_dtype())


def last(images: torch.Tensor) -> torch.Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def compare(
    name: str,
    found: torch.Tensor,
    expected: torch.Tensor,
    leaves: dict[str, torch.Tensor | None],
    tolerance: float,
) -> None:
    """Results, and the gradients of what there is."""
    agree(name, found, expected, tolerance)
    pull = whole(*expected.shape).to(expected.dtype)
    there = {what: leaf for what, leaf in leaves.items() if leaf is not None}
    both = [
        torch.autograd.grad(y, list(there.values()), pull, retain_graph=True)
        for y in (found, expected)
    ]
    for what, one, other in zip(there, *both, strict=True):
        assert one.dtype is other.dtype
        agree(f"{name}, gradient of {what}", one, other, tolerance)
