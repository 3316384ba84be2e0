r"""A spin system: who is coupled to whom, in which field, how warm, and what one spin is.

.. math::
    E(S) = -\tfrac12 \sum_{i \ne j} S_i \cdot J_{ij} S_j - \sum_i h_i \cdot S_i

This is the only place where the energy and the force are written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spinformer.errors import strict_options
from spinformer.spins.couplings import Couplings, Dense, MatrixValued
from spinformer.spins.site import SiteLaw, to_sphere

__all__ = ["SpinSystem"]


@strict_options
class SpinSystem:
    r"""N coupled vector spins in external fields, or a batch of such systems.

    Args:
        couplings: ``J`` as a tensor ``(..., N, N)`` (scalar) or ``(..., N, N, D, D)``
            (matrix-valued), or a :class:`~spinformer.spins.couplings.Couplings`. The diagonal is
            ignored.
            ``J_ij > 0`` is ferromagnetic.
        field: external fields ``h`` (..., N, D). Every leading axis is an independent system.
        beta: inverse temperature (k_B = 1), a number or a tensor ``(...)``, positive. It multiplies
            the whole energy once. Its axes line up with the leading axes of ``field`` from the
            right: ``(B,)`` is one for each of B systems, ``(B, 1)`` would make B x B systems.
        site: the law of one spin: ``Ising()``, ``Sphere(dim)``, ``LargeDSphere(dim)`` or
            ``Gaussian(dim)``.
        mask: bool ``(..., N)``, True = this site is not there. It neither gives nor receives,
            whatever its field and couplings hold (NaN included).
        symmetrize: replace ``J`` by ``(J + J^T) / 2``, all of it that an energy sees. Without it
            an asymmetric ``J`` is kept, and free energies refuse it.
        check_finite: look for NaN and infinity in what is given. Turn off to let a batch carry
            broken systems; they stay in their own rows.

    Attributes:
        couplings, field, beta, site, mask: as given, checked, with absent sites cleared.
        batch_shape: the common leading axes; ``field`` and ``beta`` are expanded to them.
        present: bool ``(..., N)``, or None without a mask.

    Raises:
        TypeError: something is not a floating-point tensor, or dtypes differ.
        ValueError: shapes that do not fit, a value that is not finite, or ``beta <= 0``.
    """

    def __init__(
        self,
        couplings: Tensor | Couplings,
        field: Tensor,
        beta: float | Tensor = 1.0,
        site: SiteLaw | None = None,
        *,
        mask: Tensor | None = None,
        symmetrize: bool = False,
        check_finite: bool = True,
    ) -> None:
        self._given: dict[str, Any] = {
            "couplings": couplings,
            "field": field,
            "beta": beta,
            "site": site,
            "mask": mask,
            "symmetrize": symmetrize,
            "check_finite": check_finite,
        }
        if isinstance(beta, SiteLaw):
            raise TypeError(f"beta={beta!r} is a site law: pass it by its name, site={beta!r}")
        if not isinstance(site, SiteLaw):
            raise TypeError(
                f"site={site!r} is no site law: pass Ising(), Sphere(dim), LargeDSphere(dim) or "
                "Gaussian(dim)"
            )
        _check_field(field)
        site.check_components(field)
        self.site = site
        num_spins = field.shape[-2]

        if mask is not None and (
            not isinstance(mask, Tensor)
            or mask.dtype != torch.bool
            or mask.ndim < 1
            or mask.shape[-1] != num_spins
        ):
            described = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else mask
            raise ValueError(
                f"mask is {described}: pass a bool tensor (..., {num_spins}), True = absent"
            )

        if isinstance(couplings, Tensor):
            couplings = _wrap(couplings, field, mask, check_finite)
        elif isinstance(couplings, Couplings):
            couplings = couplings if mask is None else couplings.mask(mask)
        else:
            raise TypeError(
                f"couplings must be a tensor or Couplings, not {type(couplings).__name__}"
            )
        if couplings.num_spins != num_spins:
            raise ValueError(
                f"couplings are between {couplings.num_spins} spins, field has shape "
                f"{tuple(field.shape)}, which is {num_spins} spins: the two must agree"
            )
        if couplings.dtype != field.dtype:
            raise TypeError(
                f"couplings are {couplings.dtype} and field is {field.dtype}: convert one, for "
                f"example field.to({couplings.dtype})"
            )
        if couplings.dim is not None and couplings.dim != site.dim:
            raise ValueError(
                f"couplings act on spins of dimension {couplings.dim}, site={site!r} has dim="
                f"{site.dim}: the two must agree"
            )
        self.couplings: Couplings = couplings.symmetrize() if symmetrize else couplings

        beta = torch.as_tensor(beta, dtype=field.dtype, device=field.device)
        try:
            shapes = [field.shape[:-2], self.couplings.batch_shape, beta.shape]
            if mask is not None:
                shapes.append(mask.shape[:-1])
            self.batch_shape = torch.broadcast_shapes(*shapes)
        except RuntimeError as error:
            raise ValueError(
                f"leading axes do not broadcast: field {tuple(field.shape[:-2])}, couplings "
                f"{tuple(self.couplings.batch_shape)}, beta {tuple(beta.shape)}"
                + ("" if mask is None else f", mask {tuple(mask.shape[:-1])}")
            ) from error
        self.mask = None if mask is None else mask.expand(*self.batch_shape, num_spins)
        self.present = None if self.mask is None else ~self.mask
        field = field.expand(*self.batch_shape, *field.shape[-2:])
        if self.mask is not None:
            field = torch.where(self.mask[..., None], torch.zeros_like(field), field)
        _check_beta(beta, check_finite)
        if check_finite:
            _check_finite(field)
        self.field = field
        self.beta = beta.expand(self.batch_shape)

    @property
    def num_spins(self) -> int:
        """Number of sites N, absent ones included."""
        return self.field.shape[-2]

    @property
    def dim(self) -> int:
        """Number of components D."""
        return self.field.shape[-1]

    @property
    def num_present(self) -> Tensor:
        """Number of sites that are there, ``(...)``, in the dtype of the field."""
        if self.present is None:
            return torch.full_like(self.beta, float(self.num_spins))
        return self.present.sum(-1).to(self.field.dtype)

    def force(self, spins: Tensor) -> Tensor:
        r""":math:`H_i = h_i + \sum_{j\ne i} J_{ij} S_j`, the local field, shape (..., N, D).

        It is :math:`-\partial E/\partial S_i` for symmetric ``J``.
        """
        return self.field + self.couplings.apply(self._spins(spins))

    def energy(self, spins: Tensor) -> Tensor:
        """E(S), the total over the sites of each system, ``(...)``, for spins (..., N, D)."""
        spins = self._spins(spins)
        pairs = (spins * self.couplings.apply(spins)).sum((-2, -1))
        return -pairs / 2 - (self.field * spins).sum((-2, -1))

    def starting_spins(self, initial: Tensor, leading: Sequence[int] | None = None) -> Tensor:
        """A configuration that a user gives to start from, checked: a copy, (*leading, N, D).

        Spins are put exactly on their sphere, absent ones at zero.

        Args:
            initial: spins, broadcastable to the answer.
            leading: leading axes of the answer. None: those of ``initial`` and the system.

        Raises:
            TypeError: not a tensor of the system's dtype.
            ValueError: a shape that does not broadcast, or spins that are not finite or off the
                site's length by more than 1e-3 of it.
        """
        if not isinstance(initial, Tensor):
            raise TypeError(f"initial must be a tensor of spins, not {initial!r}")
        if initial.dtype != self.field.dtype:
            raise TypeError(
                f"initial is {initial.dtype}, the system {self.field.dtype}: convert it, for "
                f"example initial.to({self.field.dtype})"
            )
        spin = self.field.shape[-2:]
        wanted = (*leading, *spin) if leading is not None else self.field.shape
        try:
            shape = wanted if leading is not None else torch.broadcast_shapes(initial.shape, wanted)
            spins = initial.detach().expand(shape).clone()
        except RuntimeError as error:
            raise ValueError(
                f"initial has shape {tuple(initial.shape)}: it must broadcast to spins of shape "
                f"{tuple(wanted)}"
            ) from error
        if self.mask is not None:
            spins = spins.masked_fill(self.mask[..., None], 0.0)
        radius = self.site.radius
        length = spins.norm(dim=-1)
        wrong = ~length.isfinite() if radius is None else ~((length / radius - 1).abs() <= 1e-3)
        if self.mask is not None:
            wrong = wrong & ~self.mask
        if bool(wrong.any()):
            index = tuple(wrong.nonzero()[0].tolist())
            wants = "must be finite" if radius is None else f"have length {radius:g}; scale them"
            raise ValueError(
                f"initial{list(index)} has length {float(length[index]):.6g}: spins of "
                f"{self.site!r} {wants}"
            )
        return spins if radius is None else to_sphere(spins, radius)

    def _spins(self, spins: Tensor) -> Tensor:
        if spins.shape[-2:] != self.field.shape[-2:]:
            raise ValueError(
                f"spins have shape {tuple(spins.shape)}: this system has spins of shape (..., "
                f"{self.num_spins}, {self.dim})"
            )
        return spins if self.mask is None else torch.where(self.mask[..., None], 0.0, spins)

    def isolated(self, lost: Tensor | None = None) -> tuple[SpinSystem, Tensor | None]:
        """The system with the broken members of the batch made free, and which those are.

        A member is broken if its couplings, fields or beta hold NaN or infinity. It gets no field
        and beta = 1, which keeps it from spoiling the gradients of tensors that it shares with
        others, and couplings of zero, unless a sound member shares them. None if none is broken.

        Args:
            lost: further members to take for broken (...) bool, as those whose beta J overflows.
        """
        couplings = self.couplings
        # Zero times NaN or infinity is NaN, whatever kind of couplings it is in. Couplings that
        # systems share are looked at, and cleared, once for all of those.
        silent = self.field.new_zeros(*couplings.batch_shape, *self.field.shape[-2:])
        sound = torch.isfinite(couplings.apply(silent)).all(-1).all(-1)
        sound = sound & torch.isfinite(self.field).all(-1).all(-1) & torch.isfinite(self.beta)
        if lost is not None:
            sound = sound & ~lost
        if bool(sound.all()):
            return self, None
        # One factor may be shared where another is not: a number that no sound member has is
        # cleared by itself, and what else a broken member is made of by taking its sites away.
        tensors = (torch.where(torch.isfinite(t), t, 0.0) for t in couplings.tensors())
        couplings = couplings.with_tensors(*tensors)
        unused = sound.long().sum_to_size(couplings.batch_shape) == 0
        if bool(unused.any()):
            couplings = couplings.mask(
                unused[..., None].expand(*couplings.batch_shape, self.num_spins)
            )
        return (
            SpinSystem(
                couplings,
                torch.where(sound[..., None, None], self.field, 0.0),
                torch.where(sound, self.beta, 1.0),
                self.site,
                mask=self.mask,
            ),
            ~sound,
        )

    def require_symmetric(self, what: str) -> None:
        """Raise ``ValueError`` unless ``J`` is symmetric, naming what needed it."""
        if not self.couplings.is_symmetric:
            raise ValueError(
                f"{what} needs symmetric couplings, J_ij = J_ji: an asymmetric J has no energy and "
                "no free energy. Pass SpinSystem(..., symmetrize=True) to use (J + J^T) / 2, or "
                "MeanField() or ParallelDynamics() for its nonequilibrium steady state"
            )

    def replace(self, **changes: Any) -> SpinSystem:
        """A system made of the same arguments, but for some."""
        return SpinSystem(**(self._given | changes))

    def __repr__(self) -> str:
        batch = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else ""
        return f"SpinSystem(N={self.num_spins}, site={self.site!r}, {self.couplings!r}{batch})"


def _check_field(field: Tensor) -> None:
    if isinstance(field, Tensor) and field.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"field is {field.dtype}: spin systems are solved in float32 or float64; convert it, "
            "and the answer back"
        )
    if not isinstance(field, Tensor) or not field.is_floating_point():
        kind = field.dtype if isinstance(field, Tensor) else type(field).__name__
        raise TypeError(f"field is {kind}: pass a real floating-point tensor (..., N, D)")
    if field.ndim < 2:
        raise ValueError(
            f"field has shape {tuple(field.shape)}: it must be (..., N, D); Ising fields of shape "
            "(..., N) need field.unsqueeze(-1)"
        )


def _wrap(matrix: Tensor, field: Tensor, mask: Tensor | None, check: bool) -> Couplings:
    num_spins, dim = field.shape[-2:]
    sites = (num_spins, num_spins)
    blocks = matrix.ndim >= 4 and matrix.shape[-4:-2] == sites and matrix.shape[-2:] == (dim, dim)
    if blocks and dim == num_spins:
        raise ValueError(
            f"couplings of shape {tuple(matrix.shape)} with N = D = {dim} can be read in two ways: "
            "pass couplings.Dense(J) for scalar or couplings.MatrixValued(J) for matrix-valued ones"
        )
    if blocks:
        return MatrixValued(matrix, check=check, mask=mask)
    return Dense(matrix, check=check, mask=mask)


def _check_finite(field: Tensor) -> None:
    if not bool(torch.isfinite(field).all()):
        index = tuple((~torch.isfinite(field)).nonzero()[0].tolist())
        raise ValueError(
            f"field{list(index)} = {float(field[index])}: fields must be finite; replace the "
            "value, mark its site as absent with mask, or pass check_finite=False"
        )


def _check_beta(beta: Tensor, check_finite: bool) -> None:
    if bool((beta <= 0).any()) or (check_finite and not bool(torch.isfinite(beta).all())):
        raise ValueError(
            f"beta={beta.detach().flatten().tolist()[:4]}: inverse temperatures must be positive "
            "and finite"
        )
