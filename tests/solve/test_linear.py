"""Batches of linear equations and eigenvalues: against LAPACK, and each system by itself."""

import pytest
import torch

from spinformer.solve.linear import (
    eigenvalues,
    solve_each,
    symmetric_eigenvalues,
    symmetric_spectrum,
)
from spinformer.solve.positive import positive_factor

F64 = torch.float64


@pytest.fixture
def matrices(generator):
    return torch.randn(2, 3, 4, 4, generator=generator, dtype=F64)


def test_each_system_is_solved(matrices, generator):
    right = torch.randn(2, 3, 4, 2, generator=generator, dtype=F64)
    torch.testing.assert_close(matrices @ solve_each(matrices, right), right)
    torch.testing.assert_close(
        solve_each(matrices[0, 0], right[0, 0]), solve_each(matrices, right)[0, 0]
    )
    assert solve_each(matrices[:0], right[:0]).shape == (0, 3, 4, 2)


def test_a_matrix_that_is_not_finite_has_no_eigenvalues_and_spoils_none(matrices):
    """LAPACK refuses, or prints and fails, for a whole batch."""
    symmetric = matrices + matrices.mT
    for broken in (torch.nan, torch.inf):
        for matrix, function, reference in (
            (symmetric, symmetric_eigenvalues, torch.linalg.eigvalsh),
            (symmetric, lambda m: symmetric_spectrum(m)[0], torch.linalg.eigvalsh),
            (
                matrices,
                lambda m: eigenvalues(m).abs().sum(-1),
                lambda m: torch.linalg.eigvals(m).abs().sum(-1),
            ),
        ):
            spoiled = matrix.clone()
            spoiled[1, 0, 2, 2] = broken
            found, expected = function(spoiled), reference(matrix)
            assert found[1, 0].isnan().all()
            rest = torch.ones(2, 3, dtype=torch.bool)
            rest[1, 0] = False
            torch.testing.assert_close(found[rest], expected[rest])
    values, vectors = symmetric_spectrum(symmetric)
    torch.testing.assert_close((vectors * values[..., None, :]) @ vectors.mT, symmetric)


def test_a_matrix_without_a_factor_gets_nan_and_spoils_none():
    """What rounding broke is made good for; a diagonal that has underflowed to zero can't be."""
    sound = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=F64)
    factor = positive_factor(torch.stack([sound, torch.zeros(2, 2, dtype=F64)]))
    torch.testing.assert_close(factor[0], torch.linalg.cholesky(sound), rtol=0, atol=0)
    assert factor[1].isnan().all()
