"""Products of matrix-valued couplings with states: one matrix product, and no copy of J."""

import pytest
import torch

import spinformer as sf
from spinformer.spins.couplings import Dense, MatrixValued
from spinformer.spins.couplings.stored import block_matrix_product

N, D = 4, 3


@pytest.mark.parametrize(
    ("couplings", "states"),
    [
        ((), ()),
        ((), (5,)),
        ((), (2, 5)),
        ((1,), (5, 1)),
        ((2,), (2,)),
        ((2,), (5, 2)),
        ((2,), (5, 1)),
        ((2,), ()),
        ((1, 2), (5, 2)),
        ((1, 2), (2,)),
        ((5, 1), (5, 2)),
        ((5, 2), (2,)),
        ((5, 2), (3, 5, 2)),
        ((1, 1), ()),
        ((0,), (0,)),
        ((), (0,)),
    ],
)
def test_leading_axes_broadcast(couplings, states):
    matrix = torch.randn(*couplings, N * D, N * D, dtype=torch.float64)
    state = torch.randn(*states, N, D, dtype=torch.float64)
    expected = (matrix @ state.flatten(-2).unsqueeze(-1)).squeeze(-1).unflatten(-1, (N, D))
    torch.testing.assert_close(block_matrix_product(matrix, state), expected)


def test_shared_couplings_are_not_copied_for_each_system():
    """The largest tensor of a product with 64 states is J itself."""
    matrix = torch.randn(N * D * 8, N * D * 8)
    state = torch.randn(64, N * 8, D)
    with torch.profiler.profile(profile_memory=True) as profile:
        block_matrix_product(matrix, state)
        block_matrix_product(matrix.expand(2, -1, -1).clone()[:1], state)
    allocated = max(event.self_cpu_memory_usage for event in profile.key_averages())
    assert allocated <= 4 * max(2 * matrix.numel(), 4 * state.numel())


@pytest.mark.parametrize("kind", [Dense, MatrixValued])
def test_own_tensors_come_back_as_the_same_couplings(kind):
    """What a solve does in every iteration removes nothing again; other tensors are cleared."""
    shape = (N, N) if kind is Dense else (N, N, D, D)
    couplings = kind(torch.randn(shape, dtype=torch.float64))
    assert couplings.with_tensors(*couplings.tensors()) is couplings
    (matrix,) = couplings.tensors()
    other = couplings.with_tensors(matrix + 1.0)
    assert other is not couplings
    assert (other.to_dense()[range(N), range(N)] == 0).all()


def test_mean_field_is_the_iteration_written_by_sites():
    tensor = torch.randn(N, N, D, D, dtype=torch.float64) / 8
    field = torch.randn(5, N, D, dtype=torch.float64)
    site = sf.Sphere(D)
    m = sf.MeanField().solve(sf.SpinSystem(MatrixValued(tensor), field, 1.0, site)).magnetization
    for i in range(N):
        force = sum(m[:, j] @ tensor[i, j].mT for j in range(N) if j != i)
        # The residual of the solve is at most 1e-10.
        expected = site.mean(field[:, i] + force)
        torch.testing.assert_close(m[:, i], expected, rtol=0, atol=1e-9)
