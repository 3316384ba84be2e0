"""What is looked at when couplings are built: types, shapes, finiteness, lengths."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "check_absent",
    "check_count",
    "check_finite",
    "check_floating",
    "check_lengths",
    "check_strength",
    "describe",
]


def check_floating(name: str, tensor: object) -> None:
    """``TypeError`` unless the argument is a real floating-point tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a torch tensor, not {type(tensor).__name__}: use torch.as_tensor"
        )
    if not tensor.is_floating_point():
        raise TypeError(
            f"{name} has dtype {tensor.dtype}: couplings are real floating-point numbers; use "
            f"{name}.to(torch.float64) or torch.float32"
        )


def check_finite(name: str, tensor: Tensor) -> None:
    """``ValueError`` that names the first entry that is not finite."""
    finite = tensor.isfinite()
    if bool(finite.all()):
        return
    index = tuple(int(i) for i in (~finite).nonzero()[0])
    raise ValueError(
        f"{name}{list(index)} = {tensor[index].detach().item()}: couplings must be finite; "
        "replace the value, or mark its site as absent with a mask"
    )


def check_absent(
    absent: Tensor, num_spins: int, batch_shape: torch.Size, device: torch.device
) -> Tensor:
    """A mask ``(..., N)`` that broadcasts with the batch axes of the couplings, on their device."""
    if not isinstance(absent, Tensor) or absent.dtype != torch.bool:
        kind = absent.dtype if isinstance(absent, Tensor) else type(absent).__name__
        raise TypeError(
            f"the mask of absent sites must be a boolean tensor (True = absent), not {kind}"
        )
    batch = absent.shape[:-1]
    fits = all(
        a == b or 1 in (a, b) for a, b in zip(reversed(batch), reversed(batch_shape), strict=False)
    )
    if absent.ndim < 1 or absent.shape[-1] != num_spins or not fits:
        raise ValueError(
            f"the mask of absent sites has shape {tuple(absent.shape)}: it must be "
            f"(..., {num_spins}), one entry per site, and its leading axes must broadcast with the "
            f"batch shape {tuple(batch_shape)} of the couplings"
        )
    return absent.to(device)


def check_count(name: str, value: int, minimum: int) -> int:
    """A whole number of at least ``minimum``."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be a whole number") from None
    if count < minimum:
        raise ValueError(f"{name}={count} must be at least {minimum}")
    return count


def describe(strength: Tensor) -> str:
    """The number, or the shape where there are many."""
    if strength.ndim == 0:
        return f"{strength.detach().item():g}"
    return f"tensor{tuple(strength.shape)}"


def check_strength(
    strength: float | Tensor, dtype: torch.dtype | None, device: torch.device | str | None
) -> Tensor:
    """A finite number as a tensor; a tensor keeps its gradient."""
    if isinstance(strength, Tensor):
        check_floating("strength", strength)
        tensor = strength.to(dtype=dtype, device=device)
    elif isinstance(strength, (int, float)) and not isinstance(strength, bool):
        dtype = torch.get_default_dtype() if dtype is None else dtype
        tensor = torch.tensor(float(strength), dtype=dtype, device=device)
    else:
        raise TypeError(f"strength={strength!r} must be a number or a tensor")
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"strength={describe(tensor)} must be finite")
    return tensor


def check_lengths(
    names: Sequence[str], shape: Sequence[int], periodic: bool | Sequence[bool]
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Lengths and wrap-around of the directions of a lattice, called by the caller's names."""
    lengths = tuple(check_count(name, n, 1) for name, n in zip(names, shape, strict=True))
    if isinstance(periodic, Sequence):
        wraps = tuple(bool(wrap) for wrap in periodic)
    else:
        wraps = (bool(periodic),) * len(lengths)
    if len(wraps) != len(lengths):
        raise ValueError(
            f"periodic={wraps} has {len(wraps)} entries for {len(lengths)} directions: give one "
            "bool, or one a direction"
        )
    for name, length, wrap in zip(names, lengths, wraps, strict=True):
        if wrap and length < 3:
            raise ValueError(
                f"{name}={length} is too short for a periodic direction: below length 3 the "
                "wrap-around bonds coincide with others, or bind a site to itself; use a length of "
                "at least 3, or an open direction (with twice the strength, if doubled bonds are "
                "meant)"
            )
    return lengths, wraps
