"""The score of a block: an identity with the physics, and what it tells apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spinformer.equilibrium.field_density import FieldDensity
from spinformer.equilibrium.mean_field import MeanField
from spinformer.nn import EnergyDescentBlock, FreeEnergyBlock
from spinformer.nn.score import field_score
from spinformer.spins.couplings import chain
from spinformer.spins.site import Sphere

VARIANCE = 2.0


def planted_block(j: Tensor, **options: Any) -> FreeEnergyBlock:
    """One head of dimension 4 with these couplings."""
    block = FreeEnergyBlock(
        4, 1, couplings="fixed", num_spins=len(j), dtype=torch.float64, tolerance=1e-9, **options
    )
    with torch.no_grad():
        block.self_attn.weight.copy_(j)
    return block


def auc(inside: Tensor, outside: Tensor) -> float:
    return float((inside[:, None] > outside).double().mean())


def test_score_of_fixed_couplings_is_that_of_the_field_density() -> None:
    j = chain(5, strength=0.1, dtype=torch.float64).to_dense()
    block = planted_block(j, beta=1.3)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    expected = FieldDensity(j, Sphere(4), VARIANCE, 1.3, MeanField()).score(x)
    assert torch.allclose(field_score(block, x, VARIANCE), expected, rtol=1e-9, atol=1e-9)
    assert torch.allclose(
        field_score(block, x, VARIANCE, per_token=True), expected / 5, rtol=1e-9, atol=1e-9
    )
    assert field_score(block, x[0], VARIANCE).shape == ()


@pytest.mark.parametrize("approximation", ["mean_field", "steepest_descent"])
def test_score_adds_up_over_heads(approximation: Any) -> None:
    block = FreeEnergyBlock(
        8, 2, approximation, "symmetric", dtype=torch.float64, tolerance=1e-10, beta=0.7
    )
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    _, report = block(x, return_report=True)
    # Of plain numbers the law would be one in float32.
    zero = torch.zeros((), dtype=torch.float64)
    normal = torch.distributions.Normal(zero, math.sqrt(VARIANCE))
    expected = normal.log_prob(x).sum((-1, -2)) - 0.7 * report.free_energy.sum(-1)
    assert torch.allclose(field_score(block, x, VARIANCE), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.stochastic
@pytest.mark.parametrize("approximation", ["mean_field", "steepest_descent"])
def test_score_tells_planted_fields_from_others_of_the_same_lengths(
    approximation: Any, generator: torch.Generator
) -> None:
    """Fields of spins on a chain against the same fields with the sites out of order.

    Every site has the same law by itself, so that no score of single tokens can tell: the length
    of x has area 1/2 exactly, within 4 sigma = 4 / sqrt(6 n). A block with the couplings of the
    other order must prefer the other fields, as strongly.
    """
    n, count, sites = 6, 600, Sphere(4)
    j = chain(n, strength=0.7, dtype=torch.float64).to_dense()
    order = torch.tensor([0, 3, 1, 4, 2, 5])
    density = FieldDensity(j, sites, VARIANCE)
    inside = density.sample(count, generator=generator)
    outside = density.sample(count, generator=generator)[:, order]
    sigma = 1 / math.sqrt(6 * count)
    length = auc(-inside.square().sum((1, 2)), -outside.square().sum((1, 2)))
    assert abs(length - 0.5) < 4 * sigma

    def scores(couplings: Tensor) -> tuple[Tensor, Tensor]:
        block = planted_block(couplings, approximation=approximation)
        return field_score(block, inside, VARIANCE), field_score(block, outside, VARIANCE)

    own, other = scores(j), scores(j[order][:, order])
    found = auc(*own)
    assert found > 0.5 + 4 * sigma
    assert abs(auc(*other) - (1 - found)) < 4 * math.sqrt(2) * sigma
    assert abs(auc(*scores(torch.zeros_like(j))) - 0.5) < 4 * sigma
    # Who knows both laws does better than who knows one: the ratio of densities is the best test.
    assert auc(own[0] - other[0], own[1] - other[1]) > found + 0.1


def test_absent_tokens_do_not_count() -> None:
    block = FreeEnergyBlock(8, 2, couplings="symmetric", dtype=torch.float64, tolerance=1e-10)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    padded = torch.cat([x, torch.full((1, 3, 8), torch.nan, dtype=torch.float64)], 1)
    mask = torch.arange(8)[None] >= 5
    for per_token in (False, True):
        alone = field_score(block, x, VARIANCE, per_token=per_token)
        beside = field_score(
            block, padded, VARIANCE, src_key_padding_mask=mask, per_token=per_token
        )
        assert torch.allclose(alone, beside, rtol=1e-9, atol=1e-9)
    nothing = field_score(
        block, x, VARIANCE, src_key_padding_mask=torch.ones(1, 5, dtype=torch.bool), per_token=True
    )
    assert float(nothing.detach()) == 0


def test_a_broken_sequence_stays_in_its_row_and_the_score_trains() -> None:
    block = FreeEnergyBlock(8, 2, couplings="symmetric", tolerance=1e-6)
    x = torch.randn(3, 5, 8)
    x[1, 2, 3] = torch.nan
    score = field_score(block, x, VARIANCE)
    assert score.isnan().tolist() == [False, True, False]
    score[[0, 2]].sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in block.parameters())
    assert block.log_beta.grad is not None and float(block.log_beta.grad.abs().min()) > 0


def test_batch_second_is_the_transpose() -> None:
    options: dict[str, Any] = {"couplings": "symmetric", "dtype": torch.float64}
    first = FreeEnergyBlock(8, 2, **options)
    second = FreeEnergyBlock(8, 2, batch_first=False, **options)
    second.load_state_dict(first.state_dict())
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    found = field_score(second, x.transpose(0, 1), VARIANCE)
    assert torch.allclose(found, field_score(first, x, VARIANCE), rtol=1e-12, atol=1e-12)


def test_it_says_what_has_no_score() -> None:
    x = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="couplings='symmetric' or 'fixed'"):
        field_score(FreeEnergyBlock(8, 2), x, 1.0)
    with pytest.raises(ValueError, match="stream='plain' or 'field'"):
        field_score(
            FreeEnergyBlock(8, 2, couplings="symmetric", stream="magnetization"), x / 100, 1.0
        )
    with pytest.raises(TypeError, match="EnergyDescentBlock"):
        field_score(EnergyDescentBlock(8, 2), x, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="variance=0"):
        field_score(FreeEnergyBlock(8, 2, couplings="symmetric"), x, 0.0)
