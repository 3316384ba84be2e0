"""Attention as descent: the right statements on random systems, and where the printed one fails."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from spinformer.descent import RHOS, PairwiseEnergy, Rho

# A sum of up to n^2 terms of size one, in float64, plus a data term of size |Y|^2.
ROUNDING = 64 * torch.finfo(torch.float64).eps


def random_systems(count: int, n: int, d: int, generator: torch.Generator) -> torch.Tensor:
    """Systems at many scales, half of them with a common offset."""
    draw = {"generator": generator, "dtype": torch.float64}
    tokens = torch.randn(count, n, d, **draw)
    scales = torch.tensor([0.1, 0.5, 1.0, 2.0, 5.0], dtype=torch.float64)
    pick = torch.randint(len(scales), (count, 1, 1), generator=generator)
    offset = torch.randn(count, 1, d, **draw) * torch.randint(2, (count, 1, 1), generator=generator)
    return scales[pick] * (tokens + 3 * offset)


def rise(energy: PairwiseEnergy, Y: torch.Tensor, size: float, **options) -> torch.Tensor:
    """Relative to the size of the sums that are compared."""
    before = energy.energy(Y, **options)
    after = energy.energy(energy.step(Y, size, **options), **options)
    return (after - before) / (1 + before.abs() + Y.square().sum((-2, -1)))


def softmax_beta(Y: torch.Tensor) -> torch.Tensor:
    squares = Y.square().sum(-1)
    return (Y @ Y.mT - squares.unsqueeze(-2) / 2).softmax(-1)


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("size", [0.3, 1.0, 1.9])
@pytest.mark.parametrize("data_weight", [0.0, 1.0])
def test_never_rises_below_the_bound(rho, size, data_weight, generator):
    energy = PairwiseEnergy(rho, data_weight=data_weight)
    assert size <= energy.step_bound()
    for n in range(1, 8):
        for d in (1, 2, 4):
            Y = random_systems(200, n, d, generator)
            data = torch.randn(Y.shape, generator=generator, dtype=Y.dtype)
            assert rise(energy, Y, size, data=data).max() <= ROUNDING


def test_rises_above_the_bound(generator):
    Y = random_systems(2000, 4, 2, generator)
    # descent.md counts 41,461 of 100,800 at a = 2.5.
    assert (rise(PairwiseEnergy(), Y, 2.5) > ROUNDING).sum() > 200


@pytest.mark.parametrize("rho", RHOS)
def test_gradient_is_the_derivative(rho, generator):
    weights = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    energy = PairwiseEnergy(rho, weights, data_weight=0.7)
    Y = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    data = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    (by_autograd,) = torch.autograd.grad(energy.energy(Y, mask, data=data).sum(), Y)
    torch.testing.assert_close(energy.gradient(Y, mask, data=data), by_autograd)
    assert torch.autograd.gradcheck(lambda y: energy.step(y, 1.0, mask, data=data), (Y,))
    assert torch.autograd.gradgradcheck(lambda y: energy.energy(y, mask, data=data), (Y,))


def test_the_step_is_attention(generator):
    Y = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    energy = PairwiseEnergy()
    torch.testing.assert_close(energy.kernel(Y).attention.squeeze(-3), softmax_beta(Y))
    torch.testing.assert_close(energy.step(Y), softmax_beta(Y) @ Y)
    torch.testing.assert_close(energy.step(Y, 0.4), 0.6 * Y + 0.4 * softmax_beta(Y) @ Y)
    unit = torch.nn.functional.normalize(Y, dim=-1)
    torch.testing.assert_close(energy.step(unit), (unit @ unit.mT).softmax(-1) @ unit)


def test_the_step_with_data_is_the_residual_formula(generator):
    Y, X = torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64)
    energy = PairwiseEnergy(data_weight=1.0)
    W = energy.kernel(Y).weights.squeeze(-3)
    expected = (2 * W @ Y + X) / (2 * W.sum(-1, keepdim=True) + 1)
    torch.testing.assert_close(energy.step(Y, data=X), expected)


@pytest.mark.parametrize(
    ("rho", "coefficient"),
    [
        ("exp", lambda z: torch.exp(-z)),
        ("log1p", lambda z: 1 / (1 + z)),
        ("log2p", lambda z: 1 / (2 + z)),
    ],
)
def test_kernels(rho, coefficient, generator):
    """At unit norm z = 1 - y_i . y_j: it is log(1 + z) that gives 1 / (2 - y_i . y_j)."""
    unit = torch.nn.functional.normalize(
        torch.randn(5, 3, generator=generator, dtype=torch.float64), dim=-1
    )
    W = PairwiseEnergy(rho).kernel(unit).weights.squeeze(-3)
    torch.testing.assert_close(W, coefficient(1 - unit @ unit.mT))


def test_own_profile(generator):
    """rho(z) = z averages uniformly."""
    energy = PairwiseEnergy(Rho(lambda z: z, torch.ones_like, completely_monotone=True))
    Y = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(energy.step(Y), Y.mean(0).expand(5, 3))


def test_printed_theorem_is_false():
    """Yang, Huang & Wipf (2022), Theorem 3.1: softmax_beta(Y Y^T) Y descends E_rho + |Y|^2 / 2."""
    energy = PairwiseEnergy(data_weight=1.0)
    Y = torch.tensor([[12.0], [12.0], [10.0]], dtype=torch.float64)
    printed = energy.energy(softmax_beta(Y) @ Y) - energy.energy(Y)
    # By hand, with w = exp(-2): the tokens at 12 move to a, the one at 10 to b.
    w = torch.exp(torch.tensor(-2.0, dtype=torch.float64))
    a, b = (24 + 10 * w) / (2 + w), (10 + 24 * w) / (1 + 2 * w)
    by_hand = -4 * (torch.exp(-((a - b) ** 2) / 2) - w) + (2 * a**2 + b**2 - 388) / 2
    torch.testing.assert_close(printed, by_hand)
    assert printed == pytest.approx(0.4626, abs=5e-5)
    assert energy.energy(energy.step(Y)) < energy.energy(Y)
    assert PairwiseEnergy().energy(softmax_beta(Y) @ Y) < PairwiseEnergy().energy(Y)


def test_printed_theorem_fails_at_random(generator):
    energy = PairwiseEnergy(data_weight=1.0)
    Y = random_systems(9000, 4, 1, generator)
    risen = energy.energy(softmax_beta(Y) @ Y) - energy.energy(Y) > ROUNDING * Y.square().sum(
        (-2, -1)
    )
    assert risen.any()
    assert rise(energy, Y, 1.0).max() <= ROUNDING


def test_printed_theorem_holds_for_two_tokens(generator):
    energy = PairwiseEnergy(data_weight=1.0)
    Y = random_systems(3000, 2, 2, generator)
    assert (energy.energy(softmax_beta(Y) @ Y) - energy.energy(Y)).max() <= 1e-10


def test_fixed_points_of_the_printed_step_are_not_stationary():
    """One token, or equal tokens, stay although |Y|^2 / 2 pulls at them; the right step moves."""
    Y = torch.full((3, 2), 1.5, dtype=torch.float64)
    torch.testing.assert_close(softmax_beta(Y) @ Y, Y)
    energy = PairwiseEnergy(data_weight=1.0)
    assert energy.gradient(Y).abs().max() > 1
    assert (energy.step(Y) - Y).abs().max() > 0.1


def test_plain_softmax_can_rise():
    """Away from a common norm the unweighted softmax is another step."""
    Y = torch.tensor([[1.4716], [-0.0117], [-2.3644]], dtype=torch.float64)
    energy = PairwiseEnergy()
    plain = energy.energy((Y @ Y.mT).softmax(-1) @ Y) - energy.energy(Y)
    assert plain == pytest.approx(0.0115, abs=5e-5)
    assert energy.energy(energy.step(Y)) < energy.energy(Y)


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("data_weight", [0.0, 0.5])
@pytest.mark.parametrize("size", [1.0, 1.9])
def test_heads_descend(rho, data_weight, size, generator):
    for heads, d, width in ((1, 3, 3), (2, 4, 2), (4, 4, 2), (3, 2, 5)):
        weights = torch.randn(heads, d, width, generator=generator, dtype=torch.float64)
        energy = PairwiseEnergy(rho, weights, data_weight)
        Y = random_systems(300, 5, d, generator)
        data = torch.randn(Y.shape, generator=generator, dtype=Y.dtype)
        assert rise(energy, Y, size, data=data).max() <= ROUNDING


@pytest.mark.parametrize("width", [2, 1])
@pytest.mark.parametrize("data_weight", [0.0, 0.5])
def test_orthonormal_heads_decouple(width, data_weight, generator):
    """Each head is normalized alone: in its coordinates, the step of one head."""
    Q = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    Q = Q.reshape(6, 3, 2).permute(1, 0, 2)[..., :width]
    scales = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    energy = PairwiseEnergy("exp", Q * scales[:, None, None], data_weight, orthonormal=True)
    Y = random_systems(300, 5, 6, generator)
    X = torch.randn(Y.shape, generator=generator, dtype=Y.dtype)
    for size in (0.5, 1.0, 1.9):
        assert rise(energy, Y, size, data=X).max() <= ROUNDING
    moved = energy.step(Y, data=X)
    for frame, scale in zip(Q, scales, strict=True):
        alone = PairwiseEnergy("exp", data_weight=data_weight / float(scale) ** 2)
        expected = alone.step(scale * Y @ frame, data=scale * X @ frame) / scale
        torch.testing.assert_close(moved @ frame, expected)


def test_shared_diagonal_is_tight_for_orthogonal_heads(generator):
    """Equal kernels in orthogonal subspaces: the joint bound lets each head take its full step."""
    Q = torch.eye(4, dtype=torch.float64).reshape(4, 2, 2).permute(1, 0, 2)
    half = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    Y = torch.cat([half, half], -1)
    full = PairwiseEnergy("exp", Q, orthonormal=True).step(Y)
    torch.testing.assert_close(PairwiseEnergy("exp", Q).step(Y), full)


def test_symmetric_graphs_descend(generator):
    for floating in (False, True):
        M = torch.rand(400, 1, 5, 5, generator=generator, dtype=torch.float64)
        M = (M + M.mT) / 2
        graph = M * (M > 0.5) if floating else M > 0.5
        energy = PairwiseEnergy()
        assert energy.step_bound(graph) == 1.0
        Y = random_systems(400, 5, 2, generator)
        assert rise(energy, Y, 1.0, graph=graph).max() <= ROUNDING


def test_asymmetric_graph_has_a_step_but_no_energy(generator):
    Y = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    energy = PairwiseEnergy()
    for function in (energy.energy, energy.gradient):
        with pytest.raises(ValueError, match="graph is not symmetric"):
            function(Y, graph=causal)
    moved = energy.step(Y, graph=causal)
    torch.testing.assert_close(moved[0], Y[0])
    jacobian = torch.autograd.functional.jacobian(lambda y: energy.step(y, graph=causal), Y)
    future = torch.ones(4, 4).triu(1).bool()
    assert (jacobian.permute(0, 2, 1, 3)[future] == 0).all()


@pytest.mark.parametrize("weights", [None, "tall"])
@pytest.mark.parametrize("data_weight", [0.0, 1.0])
def test_absent_tokens_vanish(weights, data_weight, generator):
    if weights is not None:
        weights = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64)
    energy = PairwiseEnergy("exp", weights, data_weight)
    Y, X = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    mask = torch.tensor([False, True, False, False, True, False])
    Y[mask] = torch.nan
    X[mask] = torch.inf
    Y.requires_grad_(True)
    alone = {"data": X[~mask]}
    total = energy.energy(Y, mask, data=X)
    torch.testing.assert_close(total, energy.energy(Y[~mask], **alone))
    moved = energy.step(Y, 1.0, mask, data=X)
    torch.testing.assert_close(moved[~mask], energy.step(Y[~mask], **alone))
    assert (moved[mask] == 0).all()
    assert (energy.gradient(Y, mask, data=X)[mask] == 0).all()
    (slope,) = torch.autograd.grad(total + moved.sum(), Y)
    assert slope.isfinite().all()
    assert (slope[mask] == 0).all()
    nobody = torch.ones(6, dtype=torch.bool)
    assert energy.energy(Y, nobody) == 0
    assert (energy.step(Y, 1.0, nobody) == 0).all()


def test_large_products_do_not_overflow():
    """beta_j exp(y_i . y_j) overflows in float32 where y_i . y_j > 88."""
    Y = torch.tensor([[40.0, 0.0], [40.0, 1.0], [-40.0, 0.0]])
    moved = PairwiseEnergy().step(Y)
    expected = PairwiseEnergy().step(Y.double())
    torch.testing.assert_close(moved, expected.float())


def test_common_offset_keeps_its_digits():
    Y = torch.randn(5, 3)
    W = PairwiseEnergy().kernel(Y).weights
    # The tokens themselves lose eps * 1e4 in the addition, the exponent twice that times |y|.
    torch.testing.assert_close(PairwiseEnergy().kernel(Y + 1e4).weights, W, rtol=2e-2, atol=2e-2)


@hypothesis.given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**31))
def test_invariances(n, d, seed):
    """Permutations of tokens, rotations and shifts commute with the step; batches don't mix."""
    generator = torch.Generator().manual_seed(seed)
    Y = torch.randn(2, n, d, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    shift = torch.randn(d, generator=generator, dtype=torch.float64)
    order = torch.randperm(n, generator=generator)
    energy = PairwiseEnergy("log1p")
    moved = energy.step(Y)
    torch.testing.assert_close(energy.step(Y[:, order]), moved[:, order])
    torch.testing.assert_close(energy.step(Y @ Q + shift), moved @ Q + shift)
    torch.testing.assert_close(energy.energy(Y @ Q + shift), energy.energy(Y))
    torch.testing.assert_close(energy.step(Y[0]), moved[0])


def test_errors():
    with pytest.raises(ValueError, match=r"weights has shape \(3, 3\)"):
        PairwiseEnergy("exp", torch.eye(3))
    with pytest.raises(ValueError, match=r"data_weight=-1\.0 is negative"):
        PairwiseEnergy(data_weight=-1.0)
    with pytest.raises(ValueError, match="'log1p'"):
        PairwiseEnergy("log1")


def test_empty():
    energy = PairwiseEnergy()
    assert energy.energy(torch.zeros(0, 3, 2)).shape == (0,)
    assert energy.step(torch.zeros(2, 0, 3)).shape == (2, 0, 3)
    assert (energy.energy(torch.zeros(2, 0, 3)) == 0).all()
