"""Classifiers that differ only in their block, and the sizes that give them equal counts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from simulations.data import IMAGE_SIZE, PATCH_SIZE, PATCHES, Dataset
from spinformer.diagnostics import rank_residual
from spinformer.errors import SpinformerError, check_choice
from spinformer.nn import (
    BlockReport,
    Encoder,
    EnergyDescentBlock,
    FreeEnergyBlock,
    TransformerBlock,
)

BlockFactory = Callable[[int, int, int, int], nn.Module]
"""``factory(d_model, nhead, width, num_spins)``: one block with ``width`` hidden units."""


class ParameterMatchError(SpinformerError):
    """No width (or depth) brings a model to the reference number of parameters."""


# The blocks that are compared: this is the place to edit one or to add another. Whatever a factory
# says is part of the identity of a run (see `recipe`): edit it, and its runs are done again.


def _plain(d_model: int, nhead: int, width: int, num_spins: int) -> nn.Module:
    return TransformerBlock(d_model, nhead, dim_feedforward=width)


def _mean_field(d_model: int, nhead: int, width: int, num_spins: int) -> nn.Module:
    return FreeEnergyBlock(
        d_model, nhead, approximation="mean_field", couplings="softmax", dim_feedforward=width
    )


def _mean_field_mixed(d_model: int, nhead: int, width: int, num_spins: int) -> nn.Module:
    return FreeEnergyBlock(
        d_model,
        nhead,
        approximation="mean_field",
        couplings="softmax",
        heads="mixed",
        dim_feedforward=width,
    )


def _steepest_descent(d_model: int, nhead: int, width: int, num_spins: int) -> nn.Module:
    return FreeEnergyBlock(
        d_model,
        nhead,
        approximation="steepest_descent",
        couplings="symmetric",
        dim_feedforward=width,
    )


def _energy_descent(d_model: int, nhead: int, width: int, num_spins: int) -> nn.Module:
    return EnergyDescentBlock(
        d_model,
        nhead,
        data_term=None,
        feedforward="memory",
        dim_feedforward=width,
        feedforward_step=1.0,
    )


BLOCKS: dict[str, BlockFactory] = {
    "plain": _plain,
    "mean_field": _mean_field,
    "mean_field_mixed": _mean_field_mixed,
    "steepest_descent": _steepest_descent,
    "energy_descent": _energy_descent,
}


# Those of other studies: `compare` does not train them.


def _mean_field_symmetric(d_model: int, nhead: int, width: int, num_spins: int) -> nn.Module:
    return FreeEnergyBlock(
        d_model, nhead, approximation="mean_field", couplings="symmetric", dim_feedforward=width
    )


def _mean_field_total(d_model: int, nhead: int, width: int, num_spins: int) -> nn.Module:
    return FreeEnergyBlock(
        d_model,
        nhead,
        approximation="mean_field",
        couplings="symmetric",
        derivative="total",
        dim_feedforward=width,
    )


def _steepest_descent_total(d_model: int, nhead: int, width: int, num_spins: int) -> nn.Module:
    return FreeEnergyBlock(
        d_model,
        nhead,
        approximation="steepest_descent",
        couplings="symmetric",
        derivative="total",
        dim_feedforward=width,
    )


OTHERS: dict[str, BlockFactory] = {
    "mean_field_symmetric": _mean_field_symmetric,
    "mean_field_total": _mean_field_total,
    "steepest_descent_total": _steepest_descent_total,
}


def block_factory(name: str) -> BlockFactory:
    """The factory of a block by its name in tables and figures."""
    known = BLOCKS | OTHERS
    return known[check_choice("block", name, tuple(known))]


def recipe(name: str) -> str:
    """The source of a factory: it says what a block's name stood for when a run was made."""
    return inspect.getsource(block_factory(name))


@dataclass(frozen=True)
class Size:
    """Hidden units of a block (what may differ between blocks), and number of blocks."""

    width: int
    layers: int


@dataclass(frozen=True)
class Shape:
    """What all models of a task share.

    Attributes:
        d_model: dimension of a token inside the model.
        nhead: heads of every block.
        reference: the size of the plain model, which sets the number of parameters.
        dropout: share of the entries of the embedded tokens set to zero in training.
    """

    d_model: int
    nhead: int
    reference: Size
    dropout: float = 0.0


@dataclass(frozen=True)
class Batch:
    """One batch on its way into a classifier.

    Attributes:
        inputs: ``(B, N)`` word numbers, or ``(B, 28, 28)`` images, standardized.
        absent: ``(B, N)`` bool, True where there is no token; None if all are there.
        labels: ``(B,)``.
    """

    inputs: Tensor
    absent: Tensor | None
    labels: Tensor


@dataclass(frozen=True)
class Trace:
    """A forward pass seen from inside: the logits, each block's report, and the rank along depth.

    Attributes:
        logits: ``(B, classes)``.
        reports: one a block.
        rank: ``(layers + 1, B)`` relative rank residual of the tokens before the first block and
            after each.
        tokens: N, absent ones counted.
    """

    logits: Tensor
    reports: list[BlockReport]
    rank: Tensor
    tokens: int


class Classifier(nn.Module):
    """Tokens (frozen vectors or patches) -> linear map -> blocks -> mean over tokens -> labels.

    Everything but the blocks is the same for all: learned positions, a layer norm of the embedded
    tokens, another one before the mean over the tokens that are there, a linear head.

    Args:
        block: name in :data:`BLOCKS` or :data:`OTHERS`.
        shape: what the models of a task share.
        size: width and number of the blocks.
        classes: number of labels.
        positions: the largest number of tokens.
        vectors: ``(words, dim)`` word vectors, kept fixed; None for images, cut into patches.
    """

    vectors: Tensor | None

    def __init__(
        self,
        block: str,
        shape: Shape,
        size: Size,
        classes: int,
        positions: int,
        vectors: Tensor | None = None,
    ) -> None:
        super().__init__()
        # Not in the state: the table comes from the data and would dwarf the trained parameters.
        self.register_buffer("vectors", vectors, persistent=False)
        inputs = PATCH_SIZE**2 if vectors is None else vectors.shape[1]
        self.dropout = shape.dropout
        self.embed = nn.Linear(inputs, shape.d_model)
        self.positions = nn.Parameter(torch.empty(positions, shape.d_model))
        # Patches look alike wherever they lie: with the small positions that suffice for words, a
        # model spends its first hundreds of steps on telling them apart.
        nn.init.normal_(self.positions, std=0.5 if vectors is None else 0.02)
        self.norm_in = nn.LayerNorm(shape.d_model)
        self.encoder = Encoder(
            block_factory(block)(shape.d_model, shape.nhead, size.width, positions), size.layers
        )
        self.norm_out = nn.LayerNorm(shape.d_model)
        self.head = nn.Linear(shape.d_model, classes)

    @classmethod
    def build(
        cls, block: str, shape: Shape, size: Size, dataset: Dataset, generator: torch.Generator
    ) -> Classifier:
        """A model for a data set; its initial parameters depend on ``generator`` only."""
        vectors = None if dataset.vectors is None else torch.from_numpy(dataset.vectors)
        # Modules draw their initial parameters from the global state, which is put back.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            return cls(block, shape, size, dataset.classes, tokens_of(dataset), vectors)

    def tokens(self, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        """Embedded tokens ``(B, N, d_model)``; with a generator, dropout is applied."""
        raw = patches(batch.inputs) if self.vectors is None else self.vectors[batch.inputs]
        x = self.norm_in(self.embed(raw) + self.positions[: raw.shape[1]])
        if generator is not None and self.dropout > 0.0:
            # torch's own dropout takes no generator.
            kept = torch.rand(x.shape, generator=generator) >= self.dropout
            x = x * (kept / (1.0 - self.dropout))
        return x

    def classify(self, x: Tensor, absent: Tensor | None) -> Tensor:
        """Logits ``(B, classes)`` from the last block's tokens."""
        x = self.norm_out(x)
        if absent is None:
            return self.head(x.mean(dim=1))
        present = (~absent).to(x.dtype).unsqueeze(-1)
        return self.head((x * present).sum(dim=1) / present.sum(dim=1))

    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        """Logits ``(B, classes)``; pass a generator in training, for the dropout."""
        x = self.encoder(self.tokens(batch, generator), src_key_padding_mask=batch.absent)
        return self.classify(x, batch.absent)

    def trace(self, batch: Batch) -> Trace:
        """The same forward pass with what each block reports, and the tokens after each block."""
        x = self.tokens(batch)
        states = [x]

        def keep(module: nn.Module, inputs: Any, output: tuple[Tensor, BlockReport]) -> None:
            states.append(output[0])

        # Tied layers are one module many times: it takes one hook.
        hooks = [layer.register_forward_hook(keep) for layer in set(self.encoder.layers)]
        try:
            x, reports = self.encoder(x, src_key_padding_mask=batch.absent, return_report=True)
        finally:
            for hook in hooks:
                hook.remove()
        rank = torch.stack([rank_residual(state, batch.absent) for state in states])
        return Trace(self.classify(x, batch.absent), reports, rank, x.shape[1])


def patches(images: Tensor) -> Tensor:
    """``(B, 28, 28)`` to ``(B, 16, 49)``: a row of the result is one 7 x 7 patch, row by row."""
    side = IMAGE_SIZE // PATCH_SIZE
    cut = images.reshape(-1, side, PATCH_SIZE, side, PATCH_SIZE).transpose(2, 3)
    return cut.reshape(-1, PATCHES, PATCH_SIZE**2)


def tokens_of(dataset: Dataset) -> int:
    """The largest number of tokens of an example."""
    return PATCHES if dataset.vectors is None else dataset.train.inputs.shape[1]


def count_parameters(model: nn.Module) -> int:
    """Number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def match_size(
    block: str,
    shape: Shape,
    count: Callable[[str, Size], int],
    tolerance: float = 0.05,
) -> Size:
    """The size at which a block's model has as many parameters as the plain one.

    The number of layers is that of the plain model; the width of the block's hidden layer is solved
    for.

    Args:
        block: name in :data:`BLOCKS` or :data:`OTHERS`.
        shape: its ``reference`` is the size of the plain model.
        count: ``count(block, size)``, the parameters of a model, not falling with the width.
        tolerance: largest relative difference.

    Raises:
        ParameterMatchError: if no width comes that close.
    """
    target = count("plain", shape.reference)
    if block == "plain":
        return shape.reference

    def at(width: int) -> int:
        return count(block, Size(width, shape.reference.layers))

    # Bracket the target by doubling, then halve: the count does not fall as the width grows.
    low, high = 1, 2
    while at(high) < target:
        low, high = high, 2 * high
        if at(high) == at(low):
            break  # the block takes no notice of the width
    while high - low > 1:
        middle = (low + high) // 2
        if at(middle) < target:
            low = middle
        else:
            high = middle
    best = min(low, high, key=lambda width: abs(at(width) - target))
    reached = at(best)
    if abs(reached - target) > tolerance * target:
        raise ParameterMatchError(
            f"the model with block {block!r} has {reached} parameters at best (width {best}), and "
            f"the plain model has {target}: they differ by {abs(reached - target) / target:.1%}, "
            f"more than {tolerance:.0%}. Change d_model or the reference size "
            f"({shape.reference.layers} layers of width {shape.reference.width}), or the block's "
            "factory in simulations/models.py."
        )
    return Size(best, shape.reference.layers)
