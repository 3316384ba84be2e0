r"""A stack of self-attention layers as a sum over paths through its heads.

With its attention matrices held at those of the full forward pass, a self-attention network is
linear in its input. Multiplied out, it is a sum over paths that choose, in every layer, one of the
heads or the skip connection:

.. math::
    \mathrm{SAN}(X) = \sum_{\mathrm{path}} P_\mathrm{path}\, X\, W_\mathrm{path} + \mathrm{bias},
    \qquad P_\mathrm{path} = P_{h_L} \cdots P_{h_1}, \quad W_\mathrm{path} = W_{h_1} \cdots W_{h_L}

where a skip contributes an identity to both products. A path through l heads has length l; with L
layers of H heads there are :math:`\binom{L}{l} H^l` of it.

Source: Dong, Cordonnier & Loukas (2021), theorem 2.1 and section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spinformer.descent.attention import from_heads, to_heads
from spinformer.diagnostics.attention import first_tokens
from spinformer.diagnostics.layer import AttentionLayer, Variant, kept_parts
from spinformer.diagnostics.models import attention_layers
from spinformer.diagnostics.rank import Norm, rank_residual, residual

__all__ = ["Path", "PathDecomposition", "PathSample", "path_decomposition"]

Path = tuple[int | None, ...]
"""The head of every layer, first layer first; None for the skip connection."""


@dataclass(frozen=True, eq=False)
class _Frozen:
    """A layer with everything that is not linear held at its values in one forward pass."""

    layer: AttentionLayer
    skip: bool
    mask: Tensor | None
    weights: Tensor
    attention_scale: Tensor | None
    gates: Tensor | None
    mlp_scale: Tensor | None

    def branch(self, x: Tensor, head: int) -> Tensor:
        """What one head makes of ``x``, ``(..., n, d)``, without biases."""
        value, output = self.layer.value[head], self.layer.output[head]
        return self.weights[..., head, :, :] @ (self._read(x) @ value) @ output

    def branches(self, x: Tensor) -> Tensor:
        """What each head makes of ``x``, ``(H, ..., n, d)``, without biases."""
        values = to_heads(self._read(x), self.layer.value)
        return ((self.weights @ values) @ self.layer.output).movedim(-3, 0)

    def heads(self, x: Tensor, affine: bool = False) -> Tensor:
        """The sum of all heads, ``(..., n, d)``, with their biases if ``affine``."""
        values = to_heads(self._read(x, affine), self.layer.value)
        if affine and self.layer.value_bias is not None:
            values = values + self.layer.value_bias.unsqueeze(-2)
        mixed = from_heads(self.weights @ values, self.layer.output.mT)
        if affine and self.layer.output_bias is not None:
            return mixed + self.layer.output_bias
        return mixed

    def after(self, x: Tensor, affine: bool = False) -> Tensor:
        """What follows the attention, token by token: norms and MLP, linear as they were."""
        layer = self.layer
        if not layer.norm_first and self.attention_scale is not None:
            assert layer.attention_norm is not None
            x = layer.attention_norm.frozen(x, self.attention_scale, affine)
        if self.gates is not None:
            assert layer.mlp is not None
            branch = self._norm_mlp(x, affine) if layer.norm_first else x
            branch = layer.mlp.frozen(branch, self.gates, affine)
            x = x + branch if self.skip else branch
            x = x if layer.norm_first else self._norm_mlp(x, affine)
        return x if self.mask is None else x.masked_fill(self.mask.unsqueeze(-1), 0.0)

    def step(self, x: Tensor, affine: bool = False) -> Tensor:
        """The whole layer."""
        mixed = self.heads(x, affine)
        return self.after(x + mixed if self.skip else mixed, affine)

    def _read(self, x: Tensor, affine: bool = False) -> Tensor:
        """What the attention reads."""
        if not self.layer.norm_first or self.attention_scale is None:
            return x
        assert self.layer.attention_norm is not None
        return self.layer.attention_norm.frozen(x, self.attention_scale, affine)

    def _norm_mlp(self, x: Tensor, affine: bool) -> Tensor:
        if self.mlp_scale is None:
            return x
        assert self.layer.mlp_norm is not None
        return self.layer.mlp_norm.frozen(x, self.mlp_scale, affine)


def _freeze(
    layer: AttentionLayer,
    x: Tensor,
    variant: Variant,
    mask: Tensor | None,
    src_mask: Tensor | None,
    norms: bool | None,
) -> _Frozen:
    """The layer at the tokens ``x`` that enter it."""
    skip, with_mlp, with_norms = kept_parts(variant, norms)
    mlp = layer.mlp if with_mlp else None
    first = layer.attention_norm if with_norms else None
    second = layer.mlp_norm if with_norms and mlp is not None else None
    attention_scale = gates = mlp_scale = None

    read = x
    if first is not None and layer.norm_first:
        attention_scale, read = first.scale(x), first(x)
    weights, mixed = layer.weights(read, mask, src_mask), layer.attend(read, mask, src_mask)
    x = x + mixed if skip else mixed
    if first is not None and not layer.norm_first:
        attention_scale, x = first.scale(x), first(x)
    if mlp is not None:
        read = x
        if second is not None and layer.norm_first:
            mlp_scale, read = second.scale(x), second(x)
        gates = mlp.gates(read)
        if second is not None and not layer.norm_first:
            mlp_scale = second.scale(x + mlp(x) if skip else mlp(x))
    return _Frozen(layer, skip, mask, weights, attention_scale, gates, mlp_scale)


@dataclass(frozen=True, eq=False)
class PathSample:
    """Random paths of one length, drawn uniformly and independently, with replacement.

    Attributes:
        paths: the paths drawn.
        outputs: what each gives, ``(count, ..., n, d)``.
        number: how many paths of this length there are.
    """

    paths: tuple[Path, ...]
    outputs: Tensor
    number: int

    @property
    def total(self) -> Tensor:
        """Unbiased estimate of the sum of all paths of the length, ``(..., n, d)``."""
        return self.number * self.outputs.mean(0)

    @property
    def standard_error(self) -> Tensor:
        """Standard error of every entry of :attr:`total`; NaN for a single path."""
        spread = self.outputs.std(0) if len(self.paths) > 1 else self.outputs[0] * torch.nan
        return self.number * spread / len(self.paths) ** 0.5


class PathDecomposition:
    """The paths of a stack of layers at one input. Made by :func:`path_decomposition`.

    ``result = bias + sum over paths of output(path)``, up to rounding.

    Attributes:
        tokens: what enters the first layer, ``(..., n, d)``.
        mask: which tokens are absent, ``(..., n)`` or None.
        result: what the network gives, ``(..., n, d)``.
        bias: what the biases alone give, ``(..., n, d)``: the linear network at X = 0. Without
            norms and MLPs it is one vector for all tokens.
        heads: H of every layer.
        skips: whether a path may take the skip connection.
    """

    def __init__(self, tokens: Tensor, mask: Tensor | None, frozen: Sequence[_Frozen]) -> None:
        self.tokens = tokens
        self.mask = mask
        self.heads = tuple(step.layer.heads for step in frozen)
        self.skips = frozen[0].skip
        self._frozen = tuple(frozen)
        result, bias = tokens, torch.zeros_like(tokens)
        for step in frozen:
            result, bias = step.step(result, affine=True), step.step(bias, affine=True)
        self.result = result
        self.bias = bias

    def __repr__(self) -> str:
        return (
            f"PathDecomposition(tokens={tuple(self.tokens.shape)}, depth={self.depth}, "
            f"heads={self.heads}, paths={self.count()})"
        )

    @property
    def depth(self) -> int:
        """L, the number of layers."""
        return len(self._frozen)

    def count(self, length: int | None = None) -> int:
        """How many paths have this length, ``C(L, length) H^length``; None: how many in all."""
        return sum(self._counts()) if length is None else self._counts()[self._checked(length)]

    def paths(self, length: int | None = None) -> Iterator[Path]:
        """All paths of this length, or all, one by one."""
        if length is not None:
            self._checked(length)
        choices = [(*range(heads), *((None,) if self.skips else ())) for heads in self.heads]
        for path in itertools.product(*choices):
            if length is None or path_length(path) == length:
                yield path

    def output(self, path: Sequence[int | None]) -> Tensor:
        """``P_path X W_path``, ``(..., n, d)``, without biases. ``O(L (n^2 d_h + n d d_h))``.

        Args:
            path: for every layer, first layer first, a head (0 to H - 1) or None for the skip.

        Raises:
            ValueError: a path of another number of layers, a head that does not exist, or a skip in
                a network without.
        """
        x = self.tokens
        for step, head in zip(self._frozen, self._checked_path(path), strict=True):
            x = step.after(x if head is None else step.branch(x, head))
        return x

    def mixing(self, path: Sequence[int | None]) -> tuple[Tensor, Tensor]:
        """``P_path`` ``(..., n, n)``, rows sum to one, and ``W_path`` ``(d, d)``.

        Raises:
            ValueError: as :meth:`output`, or norms or MLPs, which are no matrices of this form.
        """
        if any(s.attention_scale is not None or s.gates is not None for s in self._frozen):
            raise ValueError("a path through norms or MLPs is not of the form P X W: take output()")
        count, width = self.tokens.shape[-2:]
        mixing = torch.eye(count, dtype=self.tokens.dtype, device=self.tokens.device)
        weight = torch.eye(width, dtype=self.tokens.dtype, device=self.tokens.device)
        for step, head in zip(self._frozen, self._checked_path(path), strict=True):
            if head is not None:
                mixing = step.weights[..., head, :, :] @ mixing
                weight = weight @ step.layer.value[head] @ step.layer.output[head]
        return mixing, weight

    def by_length(self) -> Tensor:
        """The sum of all paths of every length 0 to L, ``(L + 1, ..., n, d)``.

        Exact for any L and H: not by enumeration but by recursion over the layers, at the cost of
        ``L (L + 1) / 2`` layers.
        """
        sums = [self.tokens]
        for step in self._frozen:
            nothing = torch.zeros_like(self.tokens)
            grown = [nothing] + [step.heads(x) for x in sums]
            kept = [*sums, nothing] if self.skips else [nothing] * len(grown)
            sums = [step.after(x + y) for x, y in zip(kept, grown, strict=True)]
        return torch.stack(sums)

    def enumerate(
        self, length: int | None = None, *, limit: int = 100_000
    ) -> tuple[tuple[Path, ...], Tensor]:
        """All paths of this length, or all, with what each gives, ``(paths, ..., n, d)``.

        The order is that of :meth:`paths`.

        Args:
            length: of the paths; None for all lengths.
            limit: the most paths, as memory is that of all outputs.

        Raises:
            ValueError: more paths than ``limit``; :meth:`sample` or :meth:`by_length` do not need
                them all.
        """
        number = self.count(length)
        if number > limit:
            raise ValueError(
                f"there are {number} paths, more than limit={limit}: sample() some of them, or "
                "take their exact sum by_length()"
            )
        prefixes: list[Path] = [()]
        outputs = self.tokens.unsqueeze(0)
        for place, step in enumerate(self._frozen):
            # (H, paths, ...) to (paths, H, ...), the order of the prefixes.
            grown = step.branches(outputs).transpose(0, 1)
            if self.skips:
                grown = torch.cat([grown, outputs.unsqueeze(1)], 1)
            choices: list[int | None] = list(range(self.heads[place]))
            choices += [None] if self.skips else []
            longer: list[Path] = [(*prefix, head) for prefix in prefixes for head in choices]
            left = self.depth - place - 1
            keep = [
                number
                for number, prefix in enumerate(longer)
                if length is None or length - left <= path_length(prefix) <= length
            ]
            prefixes = [longer[number] for number in keep]
            outputs = step.after(grown.flatten(0, 1)[keep])
        return tuple(prefixes), outputs

    def sample(
        self,
        length: int | None,
        count: int,
        generator: torch.Generator | None = None,
    ) -> PathSample:
        """Random paths of this length, or of any, uniformly and with replacement.

        Args:
            length: of the paths; None: uniformly among all paths.
            count: how many, at least 1.
            generator: of the random numbers.

        Raises:
            ValueError: ``count`` below 1, or no path of this length.
        """
        if count < 1:
            raise ValueError(f"count={count}: draw at least one path")
        number = self.count(length)
        if number == 0:
            raise ValueError(f"there is no path of length {length}: all take {self.depth} heads")
        # Paths through the layers from each on, by how many heads they take.
        tails = [self._counts(first) for first in range(self.depth + 1)]
        paths = tuple(self._draw(length, tails, generator) for _ in range(count))
        outputs = torch.stack([self.output(path) for path in paths])
        return PathSample(paths, outputs, number)

    def residuals(self, norm: Norm = "1,inf", *, relative: bool = True) -> Tensor:
        """The rank residual of :meth:`by_length`, ``(L + 1, ...)``.

        Args:
            norm: ``"1,inf"`` or ``"fro"``.
            relative: over the norm of the contribution itself.
        """
        return (rank_residual if relative else residual)(self.by_length(), self.mask, norm)

    def _counts(self, first: int = 0) -> list[int]:
        """Number of paths by length through the layers from ``first`` on."""
        counts = [1]
        for heads in self.heads[first:]:
            kept = [*counts, 0] if self.skips else [0] * (len(counts) + 1)
            counts = [a + heads * b for a, b in zip(kept, [0, *counts], strict=True)]
        return counts

    def _draw(
        self, length: int | None, tails: list[list[int]], generator: torch.Generator | None
    ) -> Path:
        path: list[int | None] = []
        for place, heads in enumerate(self.heads):
            rest = tails[place + 1]
            if length is None:
                through, past = heads * sum(rest), sum(rest) if self.skips else 0
            else:
                left = length - path_length(path)
                through = heads * rest[left - 1] if left > 0 else 0
                past = rest[left] if self.skips and left < len(rest) else 0
            # The draw is exact up to the rounding of the ratio.
            uniform = torch.rand((), generator=generator, dtype=torch.float64).item()
            if uniform < through / (through + past):
                path.append(int(torch.randint(heads, (), generator=generator)))
            else:
                path.append(None)
        return tuple(path)

    def _checked(self, length: int) -> int:
        if not 0 <= length <= self.depth:
            raise ValueError(f"length={length}: paths have 0 to {self.depth} heads")
        return length

    def _checked_path(self, path: Sequence[int | None]) -> Sequence[int | None]:
        if len(path) != self.depth:
            raise ValueError(
                f"path={tuple(path)} has {len(path)} entries for {self.depth} layers: give a head "
                "or None for each"
            )
        for place, (head, heads) in enumerate(zip(path, self.heads, strict=True)):
            if head is None and not self.skips:
                raise ValueError(f"path={tuple(path)} skips layer {place}, which has no skip")
            if head is not None and not 0 <= head < heads:
                raise ValueError(f"head {head} of layer {place} does not exist: it has {heads}")
        return path


def path_length(path: Sequence[int | None]) -> int:
    """How many heads a path takes."""
    return sum(head is not None for head in path)


def path_decomposition(
    model: Any,
    inputs: Any,
    mask: Tensor | None = None,
    *,
    variant: Variant = "attention",
    norms: bool | None = None,
    src_mask: Tensor | None = None,
    biases: bool = True,
) -> PathDecomposition:
    """Split a stack of self-attention layers at one input into its paths.

    The attention matrices are those of the full forward pass through the chosen variant. Without
    norms and MLPs (``variant="attention"``, or ``"no_mlp"`` with ``norms=False`` for a network with
    skips) these are the paths of the paper. Norms and MLPs are taken along as linear maps held at
    their values in that pass (the scale of each token, the ratio of each hidden unit to its
    argument), applied to every path, skips around the MLP included; the sum is then still exactly
    the network's output, but what a single path gives depends on the others through those values.

    Cost: two forward passes, and the memory of all attention matrices, ``O(L H n^2)``.

    Args:
        model: anything that :func:`~spinformer.diagnostics.attention_layers` knows, or a sequence
            of :class:`~spinformer.diagnostics.AttentionLayer`.
        inputs: as in :func:`~spinformer.diagnostics.hidden_states`.
        mask: as in :func:`~spinformer.diagnostics.hidden_states`.
        variant: ``"full"`` and ``"no_mlp"`` have skips, ``"no_skip"`` and ``"attention"`` have not.
        norms: whether norms are kept; None: in all variants but ``"attention"``.
        src_mask: as in :func:`~spinformer.diagnostics.hidden_states`.
        biases: whether the attention keeps its biases.

    Raises:
        TypeError: as :func:`~spinformer.diagnostics.hidden_states`.
        ValueError: as :func:`~spinformer.diagnostics.hidden_states`.

    Source: Dong, Cordonnier & Loukas (2021), theorem 2.1 and section 3.
    """
    layers = attention_layers(model)
    if not biases:
        layers = tuple(layer.without_biases() for layer in layers)
    tokens, mask = first_tokens(model, inputs, mask, src_mask)
    x, frozen = tokens, []
    for layer in layers:
        step = _freeze(layer, x, variant, mask, src_mask, norms)
        x = step.step(x, affine=True)
        frozen.append(step)
    return PathDecomposition(tokens, mask, frozen)
