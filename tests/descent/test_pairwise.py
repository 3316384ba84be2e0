"""Attention as descent: the right statements on random systems, and where the printed one fails."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from spinformer.descent import RHOS, GraphEnergy, PairwiseEnergy, Rho, pairwise

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


def rise(energy: PairwiseEnergy, Y: torch.Tensor, size: float) -> torch.Tensor:
    """Relative to the size of the sums that are compared."""
    before = energy.energy(Y)
    after = energy.energy(energy.step(Y, size))
    return (after - before) / (1 + before.abs() + Y.square().sum((-2, -1)))


def softmax_beta(Y: torch.Tensor) -> torch.Tensor:
    squares = Y.square().sum(-1)
    return (Y @ Y.mT - squares.unsqueeze(-2) / 2).softmax(-1)


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("size", [0.3, 1.0, 1.9])
@pytest.mark.parametrize("data_weight", [0.0, 1.0])
def test_never_rises_below_the_bound(rho, size, data_weight, generator):
    for n in range(1, 8):
        for d in (1, 2, 4):
            Y = random_systems(200, n, d, generator)
            data = torch.randn(Y.shape, generator=generator, dtype=Y.dtype)
            energy = PairwiseEnergy(rho, data_weight=data_weight, data=data)
            assert size <= energy.step_bound()
            assert rise(energy, Y, size).max() <= ROUNDING


def test_rises_above_the_bound(generator):
    Y = random_systems(2000, 4, 2, generator)
    # descent.md counts 41,461 of 100,800 at a = 2.5.
    assert (rise(PairwiseEnergy(), Y, 2.5) > ROUNDING).sum() > 200


@pytest.mark.parametrize("rho", RHOS)
def test_gradient_is_the_derivative(rho, generator):
    weights = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    Y = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    data = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    energy = PairwiseEnergy(rho, weights, data_weight=0.7, data=data)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    (by_autograd,) = torch.autograd.grad(energy.energy(Y, mask).sum(), Y)
    torch.testing.assert_close(energy.gradient(Y, mask), by_autograd)
    assert torch.autograd.gradcheck(lambda y: energy.step(y, 1.0, mask), (Y,))
    assert torch.autograd.gradgradcheck(lambda y: energy.energy(y, mask), (Y,))


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
    energy = PairwiseEnergy(data_weight=1.0, data=X)
    W = energy.kernel(Y).weights.squeeze(-3)
    expected = (2 * W @ Y + X) / (2 * W.sum(-1, keepdim=True) + 1)
    torch.testing.assert_close(energy.step(Y), expected)


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
        Y = random_systems(300, 5, d, generator)
        data = torch.randn(Y.shape, generator=generator, dtype=Y.dtype)
        energy = PairwiseEnergy(rho, weights, data_weight=data_weight, data=data)
        assert rise(energy, Y, size).max() <= ROUNDING


@pytest.mark.parametrize("width", [2, 1])
@pytest.mark.parametrize("data_weight", [0.0, 0.5])
def test_orthonormal_heads_decouple(width, data_weight, generator):
    """Each head is normalized alone: in its coordinates, the step of one head."""
    Q = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    Q = Q.reshape(6, 3, 2).permute(1, 0, 2)[..., :width]
    scales = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    Y = random_systems(300, 5, 6, generator)
    X = torch.randn(Y.shape, generator=generator, dtype=Y.dtype)
    energy = PairwiseEnergy(
        "exp", Q * scales[:, None, None], data_weight=data_weight, data=X, orthonormal=True
    )
    for size in (0.5, 1.0, 1.9):
        assert rise(energy, Y, size).max() <= ROUNDING
    moved = energy.step(Y)
    for frame, scale in zip(Q, scales, strict=True):
        alone = PairwiseEnergy(
            "exp", data_weight=data_weight / float(scale) ** 2, data=scale * X @ frame
        )
        expected = alone.step(scale * Y @ frame) / scale
        torch.testing.assert_close(moved @ frame, expected)
    # What no head sees goes to the data in one step, if there are any.
    unseen = torch.eye(6, dtype=torch.float64) - sum(frame @ frame.mT for frame in Q)
    torch.testing.assert_close(moved @ unseen, (X if data_weight else Y) @ unseen)


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
        energy = PairwiseEnergy(graph=graph)
        assert energy.step_bound() == 1.0
        Y = random_systems(400, 5, 2, generator)
        assert rise(energy, Y, 1.0).max() <= ROUNDING


def test_asymmetric_graph_has_a_step_but_no_energy(generator):
    Y = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    energy = PairwiseEnergy(graph=causal)
    for function in (energy.energy, energy.gradient, energy.curvature):
        with pytest.raises(ValueError, match="graph is not symmetric"):
            function(Y)
    with pytest.raises(ValueError, match="graph is not symmetric"):
        energy.hessian_bounds(4)
    moved = energy.step(Y)
    torch.testing.assert_close(moved[0], Y[0])
    jacobian = torch.autograd.functional.jacobian(energy.step, Y)
    future = torch.ones(4, 4).triu(1).bool()
    assert (jacobian.permute(0, 2, 1, 3)[future] == 0).all()


@pytest.mark.parametrize("weights", [None, "tall"])
@pytest.mark.parametrize("data_weight", [0.0, 1.0])
def test_absent_tokens_vanish(weights, data_weight, generator):
    if weights is not None:
        weights = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64)
    Y, X = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    mask = torch.tensor([False, True, False, False, True, False])
    Y[mask] = torch.nan
    X[mask] = torch.inf
    Y.requires_grad_(True)
    energy = PairwiseEnergy("exp", weights, data_weight=data_weight, data=X)
    alone = PairwiseEnergy("exp", weights, data_weight=data_weight, data=X[~mask])
    total = energy.energy(Y, mask)
    torch.testing.assert_close(total, alone.energy(Y[~mask]))
    moved = energy.step(Y, 1.0, mask)
    torch.testing.assert_close(moved[~mask], alone.step(Y[~mask]))
    assert (moved[mask] == 0).all()
    assert (energy.gradient(Y, mask)[mask] == 0).all()
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


# -- the plain softmax, spheres, one square head ------------------------------------------------


def sphere(Y: torch.Tensor, radius: float = 1.0) -> torch.Tensor:
    return radius * torch.nn.functional.normalize(Y, dim=-1)


def risen(energy: PairwiseEnergy, Y: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    rise = energy.energy(moved) - energy.energy(Y)
    return rise > ROUNDING * (1 + energy.energy(Y).abs() + Y.square().sum((-2, -1)))


def test_plain_softmax_step(generator):
    Y = torch.tensor([[1.4716], [-0.0117], [-2.3644]], dtype=torch.float64)
    energy = PairwiseEnergy()
    assert energy.energy(energy.plain_softmax_step(Y)) - energy.energy(Y) == pytest.approx(
        0.0115, abs=5e-5
    )
    Y = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    plain = (Y @ Y.mT).softmax(-1) @ Y
    torch.testing.assert_close(energy.plain_softmax_step(Y, 0.3), 0.7 * Y + 0.3 * plain)
    W = torch.randn(1, 4, 4, generator=generator, dtype=torch.float64)
    plain = (Y @ W[0] @ W[0].mT @ Y.mT).softmax(-1) @ Y
    torch.testing.assert_close(PairwiseEnergy(weights=W).plain_softmax_step(Y), plain)
    # The data term has no part in it.
    pulled = PairwiseEnergy(data_weight=2.0)
    torch.testing.assert_close(pulled.plain_softmax_step(Y), energy.plain_softmax_step(Y))
    unit = sphere(Y, 1.7)
    torch.testing.assert_close(energy.plain_softmax_step(unit), energy.step(unit))


def test_plain_softmax_step_of_heads_and_masks(generator):
    Q = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    Q = Q[:, :4].reshape(6, 2, 2).permute(1, 0, 2)
    energy = PairwiseEnergy(weights=Q * 1.3, orthonormal=True)
    Y = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    expected = Y.clone()
    for frame in Q:
        part = Y @ frame
        expected += ((1.69 * part @ part.mT).softmax(-1) @ part - part) @ frame.mT
    torch.testing.assert_close(energy.plain_softmax_step(Y), expected)
    mask = torch.tensor([False, True, False, False, True])
    moved = energy.plain_softmax_step(Y.masked_fill(mask[:, None], torch.nan), 1.0, mask)
    torch.testing.assert_close(moved[~mask], energy.plain_softmax_step(Y[~mask]))
    assert (moved[mask] == 0).all()
    causal = PairwiseEnergy(graph=torch.ones(5, 5).tril(-1))
    moved = causal.plain_softmax_step(Y)
    torch.testing.assert_close(moved[:2], Y[[0, 0]])
    logits = (Y @ Y.mT).masked_fill(torch.ones(5, 5).triu().bool(), -torch.inf)
    torch.testing.assert_close(moved[1:], logits[1:].softmax(-1) @ Y)


def test_plain_softmax_rises_at_random(generator):
    """descent.md counts 789 of 100,800 for E_rho, and 0 for the re-weighted softmax."""
    energy = PairwiseEnergy()
    Y = torch.cat([random_systems(5000, 4, 1, generator) for _ in range(2)])
    assert risen(energy, Y, energy.plain_softmax_step(Y)).sum() > 20
    assert not risen(energy, Y, energy.step(Y)).any()


@pytest.mark.parametrize("rho", RHOS)
def test_sphere_steps_descend(rho, generator):
    """From any norms, each token its own; common ones are the plain softmax, renormalized."""
    energy = PairwiseEnergy(rho)
    for n, d in ((2, 2), (3, 1), (5, 2), (8, 3)):
        Y = random_systems(1000, n, d, generator)
        for size in (0.4, 1.0):
            moved = energy.sphere_step(Y, size=size)
            assert not risen(energy, Y, moved).any()
            torch.testing.assert_close(moved.norm(dim=-1), Y.norm(dim=-1))
        for radius in (0.5, 1.0, 3.0):
            state = sphere(Y, radius)
            for _ in range(5):
                moved = energy.sphere_step(state, radius)
                if rho == "exp":
                    plain = (state @ state.mT).softmax(-1) @ state
                    torch.testing.assert_close(moved, sphere(plain, radius))
                assert not risen(energy, state, moved).any()
                state = moved


def test_renormalized_softmax_needs_a_common_norm(generator):
    """With tokens of several norms it is the kernel that descends, not the plain softmax."""
    energy = PairwiseEnergy()
    Y = random_systems(5000, 4, 2, generator)
    plain = energy.plain_softmax_step(Y)
    renormalized = plain * Y.norm(dim=-1, keepdim=True) / plain.norm(dim=-1, keepdim=True)
    assert risen(energy, Y, renormalized).sum() > 20
    assert not risen(energy, Y, energy.sphere_step(Y)).any()


def test_sphere_step_with_data_and_heads(generator):
    Q = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    Q = Q.reshape(6, 3, 2).permute(1, 0, 2)
    for width in (2, 1):
        frames = Q[..., :width]
        Y, X = torch.stack([random_systems(500, 5, 6, generator) for _ in range(2)])
        scales = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)[:, None, None]
        energy = PairwiseEnergy("exp", scales * frames, data_weight=0.5, data=X, orthonormal=True)
        moved = energy.sphere_step(Y)
        assert not risen(energy, Y, moved).any()
        for frame in frames:
            torch.testing.assert_close((moved @ frame).norm(dim=-1), (Y @ frame).norm(dim=-1))
        on_unit = energy.sphere_step(Y, torch.ones(3, 1, dtype=torch.float64)) @ frames[0]
        torch.testing.assert_close(on_unit.norm(dim=-1), torch.ones(500, 5, dtype=torch.float64))


def test_sphere_step_on_a_path_can_rise():
    """Both ends go to the middle, which leaps to the other side: the kernel is indefinite."""
    angles = torch.deg2rad(torch.tensor([0.0, 265.0, 170.0], dtype=torch.float64))
    Y = torch.stack([angles.cos(), angles.sin()], -1)
    path = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]]).bool()
    energy = PairwiseEnergy(graph=path)
    rise = energy.energy(energy.sphere_step(Y)) - energy.energy(Y)
    assert rise == pytest.approx(0.9, abs=0.1)
    assert energy.energy(energy.sphere_step(Y, size=0.5)) < energy.energy(Y)


def test_sphere_steps_on_graphs_descend_at_half(generator):
    M = torch.rand(3000, 1, 5, 5, generator=generator) < 0.5
    energy = PairwiseEnergy(graph=M | M.mT)
    Y = random_systems(3000, 5, 2, generator)
    assert risen(energy, Y, energy.sphere_step(Y)).any()
    assert not risen(energy, Y, energy.sphere_step(Y, size=0.5)).any()


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("data_weight", [0.0, 0.5])
def test_one_square_head_is_attention(rho, data_weight, generator):
    """Where W_1 is square the step acts on whole tokens, as softmax(Y W W^T Y^T) Y does."""
    for scale in (0.3, 1.0):
        W = scale * torch.randn(1, 4, 4, generator=generator, dtype=torch.float64)
        Y = random_systems(500, 5, 4, generator)
        X = torch.randn(Y.shape, generator=generator, dtype=Y.dtype)
        energy = PairwiseEnergy(rho, W, data_weight=data_weight, data=X)
        for size in (0.5, 1.0, 1.9):
            assert rise(energy, Y, size).max() <= ROUNDING
        kernel = energy.kernel(Y)
        if data_weight == 0:
            torch.testing.assert_close(energy.step(Y), kernel.attention.squeeze(-3) @ Y)
        else:
            # (2 D_i W W^T + lambda) z_i = sum_j 2 W_ij y_j W W^T + lambda x_i, token by token.
            metric = W[0] @ W[0].mT
            eye = torch.eye(4, dtype=torch.float64)
            system = 2 * kernel.degree.squeeze(-2)[..., None, None] * metric + data_weight * eye
            right = 2 * kernel.weights.squeeze(-3) @ Y @ metric + data_weight * X
            torch.testing.assert_close(energy.step(Y), torch.linalg.solve(system, right))


def test_attention_of_one_square_head_between_spheres_can_rise(generator):
    """Its metric is not that of the spheres: whole tokens then take the shared diagonal."""
    W = torch.randn(1, 3, 3, generator=generator, dtype=torch.float64)
    energy = PairwiseEnergy(weights=W)
    Y = sphere(random_systems(5000, 5, 3, generator))
    assert risen(energy, Y, sphere(energy.step(Y))).any()
    assert not risen(energy, Y, energy.sphere_step(Y)).any()


def test_hessian_bound_is_attained():
    """All tokens equal: every pair curves by rho'(0), the complete graph's Laplacian by n."""
    Y = torch.zeros(4, 2, dtype=torch.float64)
    energy = PairwiseEnergy("log2p")
    hessian = torch.autograd.functional.hessian(energy.energy, Y).reshape(8, 8)
    _, upper = energy.hessian_bounds(4)
    torch.testing.assert_close(upper, torch.linalg.eigvalsh(hessian)[-1])
    # Two tokens at z = 3/2 curve down by 2 exp(-3/2) a direction, twice for the ordered pairs.
    Y = torch.tensor([[0.0], [3.0**0.5]], dtype=torch.float64)
    energy = PairwiseEnergy()
    hessian = torch.autograd.functional.hessian(energy.energy, Y).reshape(2, 2)
    lower, _ = energy.hessian_bounds(2)
    torch.testing.assert_close(lower, torch.linalg.eigvalsh(hessian)[0])
    assert energy.hessian_bounds(1) == (0, 0)
    assert (
        PairwiseEnergy(Rho(torch.log1p, lambda z: 1 / (1 + z))).hessian_bounds(2)[0] == -torch.inf
    )


def test_hessian_bound_of_a_graph_a_head():
    """Heads in orthogonal subspaces, one without bonds: the other's is the bound."""
    graph = torch.stack([torch.zeros(3, 3), torch.ones(3, 3)]).double()
    frames = torch.eye(4, dtype=torch.float64).reshape(4, 2, 2).permute(1, 0, 2)
    bounds = PairwiseEnergy("exp", frames, graph=graph).hessian_bounds(3)
    for one, other in zip(bounds, PairwiseEnergy().hessian_bounds(3), strict=True):
        torch.testing.assert_close(one, other)


def test_errors_of_the_plain_softmax():
    Y = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="rho is not 'exp'"):
        PairwiseEnergy("log1p").plain_softmax_step(Y)
    with pytest.raises(ValueError, match=r"weights has shape \(2, 4, 2\) and orthonormal=False"):
        PairwiseEnergy(weights=torch.zeros(2, 4, 2)).plain_softmax_step(Y)


# -- weights and bonds --------------------------------------------------------------------------


@pytest.mark.parametrize("weight", ["identity", "orthogonal", "twice", "singular"])
def test_derivatives_of_one_square_head_with_equal_singular_values(weight, generator):
    """As it is initialised: the eigenvectors of its step have no derivative, the step has."""
    W = torch.eye(3, dtype=torch.float64)
    if weight == "orthogonal":
        W = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    elif weight != "identity":
        W = torch.diag(torch.tensor([1.0, 1.0, 2.0 if weight == "twice" else 0.0]).double())
    Y, X = torch.randn(2, 2, 4, 3, generator=generator, dtype=torch.float64)
    strength = torch.tensor(0.3, dtype=torch.float64)
    mask = torch.tensor([[False] * 4, [False, True, False, False]])

    def moved(W, Y, X, strength):
        return PairwiseEnergy(weights=W[None], data_weight=strength, data=X).step(Y, 0.9, mask)

    inputs = [x.clone().requires_grad_() for x in (W, Y, X, strength)]
    assert torch.autograd.gradcheck(moved, inputs)
    assert torch.autograd.gradgradcheck(moved, inputs)


@pytest.mark.parametrize("orthonormal", [False, True])
@pytest.mark.parametrize("data_weight", [0.0, 0.4])
def test_derivatives_with_respect_to_the_weights(orthonormal, data_weight, generator):
    W = torch.randn(2, 4, 2, generator=generator, dtype=torch.float64)
    if orthonormal:
        W = 1.3 * torch.linalg.qr(W.permute(1, 0, 2).flatten(1))[0].unflatten(1, (2, 2))
        W = W.permute(1, 0, 2)
    Y, X = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)

    def moved(W):
        energy = PairwiseEnergy("exp", W, data_weight=data_weight, data=X, orthonormal=orthonormal)
        return energy.step(Y), energy.curvature(Y), energy.energy(Y)

    assert torch.autograd.gradcheck(moved, (W.requires_grad_(),))


@pytest.mark.parametrize("data_weight", [0.0, 0.4])
def test_a_head_of_zeros_changes_nothing(data_weight, generator):
    W = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    W[1] = 0
    Y = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    energy = PairwiseEnergy("exp", W.requires_grad_(), data_weight=data_weight)
    moved = energy.step(Y)
    torch.testing.assert_close(
        moved, PairwiseEnergy("exp", W[::2], data_weight=data_weight).step(Y)
    )
    (slope,) = torch.autograd.grad(moved.sum() + energy.curvature(Y).sum(), W)
    assert slope.isfinite().all()


def test_bonds_of_absent_tokens_change_nothing(generator):
    """Neither NaN nor asymmetry among them."""
    M = torch.rand(5, 5, generator=generator, dtype=torch.float64)
    M = M + M.mT
    mask = torch.tensor([False, True, False, False, True])
    spoilt = M.clone()
    spoilt[1], spoilt[2, 4] = torch.nan, 7.0
    Y = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)

    def everything(graph):
        energy = PairwiseEnergy(graph=graph)
        values = (energy.energy, energy.gradient, energy.curvature, energy.sphere_step)
        found = [f(Y, mask=mask) for f in values]
        found += [energy.step(Y, 0.7, mask), energy.plain_softmax_step(Y, 0.7, mask)]
        return [*found, *torch.autograd.grad(sum(x.sum() for x in found), Y)]

    for one, other in zip(everything(spoilt), everything(M), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    with pytest.raises(ValueError, match="graph is not symmetric"):
        PairwiseEnergy(graph=spoilt).energy(Y)
    # All bonds that count are there: the kernel is positive semi-definite, system by system.
    full = torch.ones(2, 1, 5, 5).masked_fill(mask | mask[:, None], 0.0)
    full[1, 0, 0, 2] = full[1, 0, 2, 0] = 0
    curved = PairwiseEnergy(graph=full).curvature(Y, mask)
    torch.testing.assert_close(curved[0], PairwiseEnergy().curvature(Y, mask))
    degree = PairwiseEnergy(graph=full[1]).kernel(Y, mask).degree
    torch.testing.assert_close(curved[1], 4 * degree.squeeze(-2))
    # Of several systems, one with a NaN is no trouble to the others.
    broken = M.clone()
    broken[0, 2] = broken[2, 0] = torch.nan
    two = PairwiseEnergy(graph=torch.stack([M, broken]).unsqueeze(1)).energy(Y)
    torch.testing.assert_close(two[0], PairwiseEnergy(graph=M).energy(Y))
    assert two[1].isnan()


def test_symmetry_is_looked_up_once(monkeypatch):
    """The answer comes from the device, which would wait for it at every call."""
    seen, is_symmetric = [], pairwise._is_symmetric
    monkeypatch.setattr(pairwise, "_is_symmetric", lambda g: seen.append(0) or is_symmetric(g))
    energy, Y = PairwiseEnergy(graph=torch.ones(3, 3)), torch.zeros(3, 2)
    energy.step(Y)
    assert not seen
    energy.energy(Y), energy.gradient(Y), energy.curvature(Y), energy.hessian_bounds(3)
    assert len(seen) == 1


def test_digits_on_a_graph(generator):
    Y = torch.randn(20, 8, 3, generator=generator)
    edges = torch.triu_indices(8, 8, 1)
    for offset in (0.0, 30.0, 300.0):
        far = Y + offset
        dense, exact = (
            PairwiseEnergy(graph=torch.ones(8, 8)).kernel(y).weights for y in (far, far.double())
        )
        # Rounding of the squares, |y|^2 = 3 offset^2, and of sums of three of them.
        error = (dense - exact).abs().max()
        assert error <= 4 * torch.finfo(torch.float32).eps * (10 + 3 * offset**2)
        sparse = GraphEnergy(edges).weights(far)
        torch.testing.assert_close(
            sparse, exact.squeeze(-3)[:, edges[0], edges[1]].float(), rtol=1e-4, atol=1e-6
        )


def test_data_alone_weigh_one(generator):
    Y, data = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    expected = PairwiseEnergy(data_weight=1.0, data=data).energy(Y)
    assert torch.equal(PairwiseEnergy(data=data).energy(Y), expected)
    assert PairwiseEnergy().data_weight == 0
