"""Exact solutions against a second route: product quadratures, enumerations, dense algebra."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from spinformer.equilibrium import closed_forms
from spinformer.equilibrium.exact import Exact
from spinformer.errors import ConvergenceError
from spinformer.spins.couplings import MatrixValued, chain, cubic, ring
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, Sphere
from spinformer.spins.system import SpinSystem


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def symmetric(*shape: int, seed: int = 0) -> Tensor:
    matrix = normal(*shape, seed=seed)
    return (matrix + matrix.mT) / 2


def bonds(num_spins: int, strengths: dict[tuple[int, int], float]) -> Tensor:
    matrix = torch.zeros(num_spins, num_spins, dtype=torch.float64)
    for (i, j), value in strengths.items():
        matrix[i, j] = matrix[j, i] = value
    return matrix


def grid(dim: int) -> tuple[Tensor, Tensor]:
    """Unit vectors and weights: 48 angles on the circle, 24 latitudes times 48 on the sphere."""
    angle = torch.arange(48, dtype=torch.float64) * (2 * math.pi / 48)
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    if dim == 2:
        return circle, torch.full((48,), 1 / 48, dtype=torch.float64)
    k = torch.arange(1, 24, dtype=torch.float64)
    off = k / torch.sqrt(4 * k**2 - 1)
    z, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    weight = vectors[0] ** 2
    ring_part = torch.sqrt(1 - z**2)[:, None, None] * circle
    axis = z[:, None, None].expand(-1, 48, 1)
    return torch.cat([ring_part, axis], -1).reshape(-1, 3), weight.repeat_interleave(48) / 48


def product_quadrature(system: SpinSystem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log Z, m, <S_1 S_2> and Var(E) of two spins as a double sum over grids of directions."""
    unit, weight = grid(system.dim)
    spins = system.site.radius * unit
    first = spins[:, None].expand(-1, len(spins), -1)
    second = spins[None].expand(len(spins), -1, -1)
    energy = system.energy(torch.stack([first, second], -2))
    boltzmann = weight[:, None] * weight * torch.exp(-system.beta * energy)
    z = boltzmann.sum()
    p = boltzmann / z
    m = torch.stack([p.sum(1) @ spins, p.sum(0) @ spins])
    mean_energy = (p * energy).sum()
    variance = (p * (energy - mean_energy) ** 2).sum()
    return z.log(), m, (p * (first * second).sum(-1)).sum(), variance


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize(
    "kind", ["generic", "antiferromagnet", "parallel", "opposite", "first free", "second free"]
)
def test_two_spins_against_product_quadrature(dim: int, kind: str) -> None:
    field = normal(2, dim, seed=1)
    if kind in ("parallel", "opposite"):
        field[1] = (-1.4 if kind == "opposite" else 0.6) * field[0]
    if kind == "first free":
        field[0] = 0
    if kind == "second free":
        field[1] = 0
    coupling = -0.9 if kind == "antiferromagnet" else 0.8
    system = SpinSystem(bonds(2, {(0, 1): coupling}), field, 1.2, Sphere(dim, 1.1))
    equilibrium = Exact().solve(system)
    log_z, m, bond, variance = product_quadrature(system)
    # exp of up to 5 on 48 angles: converged to rounding.
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(equilibrium.log_partition.detach(), log_z, **close)
    torch.testing.assert_close(equilibrium.magnetization.detach(), m, **close)
    torch.testing.assert_close(equilibrium.correlations()[0, 1].detach(), bond, **close)
    heat = system.beta**2 * variance
    torch.testing.assert_close(equilibrium.specific_heat().detach(), heat, **close)


@pytest.mark.parametrize("dim", [2, 3, 6])
@pytest.mark.parametrize("kind", ["generic", "parallel", "first free", "second free", "free"])
def test_two_spins_have_all_derivatives(dim: int, kind: str) -> None:
    """To the third order, also where the plane of the fields is not defined.

    The fast mode compares random projections of the Jacobians.
    """
    b = normal(1, 2, dim, seed=2)
    if kind == "parallel":
        b[:, 1] = -0.7 * b[:, 0]
    b[:, 0] *= kind not in ("first free", "free")
    b[:, 1] *= kind not in ("second free", "free")
    k = bonds(2, {(0, 1): 0.8})[None]
    pair = closed_forms.Pair(dim, 1.3, (0, 1))
    pair.points = 16
    inputs = (k.requires_grad_(), b.requires_grad_())

    def log_z(k: Tensor, b: Tensor) -> Tensor:
        return pair((k + k.mT) / 2, b)

    def gradient(k: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(log_z(k, b).sum(), (k, b), create_graph=True)

    assert gradcheck(log_z, inputs)
    assert gradcheck(gradient, inputs, fast_mode=True)
    assert gradgradcheck(gradient, inputs, atol=1e-4, fast_mode=True)


def test_two_spins_change_places() -> None:
    """The quadrature treats its two spins differently; the answer does not."""
    for dim, strength in ((2, 3.0), (3, 3.0), (5, 10.0), (64, 3.0), (300, 2.0)):
        field = strength * normal(2, dim, seed=3)
        matrix = bonds(2, {(0, 1): -0.6 * strength})
        one = Exact().solve(SpinSystem(matrix, field, 0.9, Sphere(dim)))
        other = Exact().solve(SpinSystem(matrix, field.flip(0), 0.9, Sphere(dim)))
        torch.testing.assert_close(one.log_partition, other.log_partition, rtol=1e-12, atol=0)
        torch.testing.assert_close(
            one.magnetization, other.magnetization.flip(0), rtol=1e-10, atol=1e-12
        )


def test_weak_fields_join_the_closed_form() -> None:
    matrix = bonds(2, {(0, 1): 0.7})
    for dim in (2, 3, 16):
        field = 1e-5 * normal(2, dim, seed=4)
        weak = Exact().solve(SpinSystem(matrix, field, 1.0, Sphere(dim)))
        free = Exact().solve(SpinSystem(matrix, 0 * field, 1.0, Sphere(dim)))
        # Corrections are of second order in the field: 1e-10.
        torch.testing.assert_close(weak.log_partition, free.log_partition, rtol=0, atol=1e-8)
        chi = free.susceptibility()
        torch.testing.assert_close(weak.susceptibility(), chi, rtol=1e-8, atol=1e-9)
        linear = torch.einsum("iajb,jb->ia", chi, field)
        torch.testing.assert_close(weak.magnetization, linear, rtol=1e-7, atol=1e-16)


def test_cold_pair_in_many_dimensions() -> None:
    """An aligned pair in a strong field: the leading order and its fluctuations are known."""
    for dim in (2, 3, 8, 64):
        field = torch.zeros(2, dim, dtype=torch.float64)
        field[:, 0] = 1.0
        kappa = 20.0 * dim
        equilibrium = Exact().solve(
            SpinSystem(bonds(2, {(0, 1): 1.0}), field, kappa, Sphere(dim, 1.0))
        )
        # Each of the D - 1 transverse modes is Gaussian; precisions beta (1 + 1 -+ 1) in all.
        expected = 1 - (dim - 1) / (4 * kappa) * (1 + 1 / 3)
        found = equilibrium.magnetization[:, 0]
        # The next order is (D / kappa)^2 = 1 / 400 times a number below one.
        assert float((found - expected).abs().max().detach()) < 1 / 400


@pytest.mark.parametrize("negative", [1, 2], ids=["frustrated", "unfrustrated"])
def test_trees_and_rings_against_enumeration(negative: int) -> None:
    """D = 1 has both routes: tanh products and character sums, or all states."""
    draw = normal(20, seed=negative).tolist()
    tree = bonds(9, {(i, i * 7 % i if i > 1 else 0): draw[i] for i in range(1, 9)})
    branched = bonds(
        9, {(0, 1): draw[0], (1, 2): draw[1], (1, 3): draw[2], (3, 4): draw[3], (3, 5): draw[4]}
    )
    loop = bonds(7, {(i, (i + 1) % 7): abs(draw[i]) * (-1) ** (i < negative) for i in range(7)})
    for matrix in (tree, branched, loop):
        system = SpinSystem(matrix, torch.zeros(len(matrix), 1, dtype=torch.float64), 0.7, Ising())
        one, other = Exact().solve(system), Exact(max_enumerated=1).solve(system)
        for found, expected in (
            (other.log_partition, one.log_partition),
            (other.internal_energy, one.internal_energy),
            (other.specific_heat(), one.specific_heat()),
            (other.magnetization, one.magnetization),
            (other.correlations(), one.correlations()),
            (other.susceptibility(), one.susceptibility()),
        ):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_tree_of_vectors() -> None:
    """Correlations are products along the paths; the pair is the quadrature's."""
    dim, radius = 3, 1.2
    strengths = {(0, 1): 0.8, (1, 2): -1.1, (1, 3): 0.5, (3, 4): 2.0}
    system = SpinSystem(
        bonds(5, strengths), torch.zeros(5, dim, dtype=torch.float64), 0.9, Sphere(dim, radius)
    )
    equilibrium = Exact().solve(system)
    correlations = equilibrium.correlations()
    bond = {pair: correlations[pair] / radius**2 for pair in strengths}
    for pair, value in strengths.items():
        alone = Exact().solve(
            SpinSystem(bonds(2, {(0, 1): value}), system.field[:2], 0.9, system.site)
        )
        torch.testing.assert_close(alone.correlations()[0, 1], radius**2 * bond[pair])
    torch.testing.assert_close(correlations[2, 4] / radius**2, bond[1, 2] * bond[1, 3] * bond[3, 4])
    torch.testing.assert_close(correlations[0, 2] / radius**2, bond[0, 1] * bond[1, 2])
    chi = equilibrium.susceptibility()
    isotropic = torch.einsum("ij,ab->iajb", correlations, torch.eye(dim).double()) * 0.9 / dim
    torch.testing.assert_close(chi, isotropic)


@pytest.mark.parametrize("dim", [2, 3, 8])
def test_ring_is_its_own_derivative(dim: int) -> None:
    """The correlations of bonds (d log Z / d J) and of the other pairs (a second sum) agree.

    A ring of two kinds of bonds in turn, and the same ring with a site of it removed, which is a
    chain: as one bond goes to zero the ring becomes the chain.
    """
    strengths = {(0, 1): 0.9, (1, 2): -0.4, (2, 3): 0.7, (3, 4): -1.2, (4, 0): 0.6}
    field = torch.zeros(5, dim, dtype=torch.float64)
    whole = Exact().solve(SpinSystem(bonds(5, strengths), field, 1.1, Sphere(dim, 1.0)))
    correlations = whole.correlations()
    energy = -sum(value * correlations[pair] for pair, value in strengths.items())
    torch.testing.assert_close(whole.internal_energy, energy, rtol=1e-12, atol=0)
    torch.testing.assert_close(correlations, correlations.mT, rtol=1e-14, atol=0)
    assert float(torch.linalg.eigvalsh(correlations.detach()).min()) > 0
    nearly = strengths | {(4, 0): 1e-9}
    opened = {pair: value for pair, value in strengths.items() if pair != (4, 0)}
    one = Exact().solve(SpinSystem(bonds(5, nearly), field, 1.1, Sphere(dim, 1.0)))
    other = Exact().solve(SpinSystem(bonds(5, opened), field, 1.1, Sphere(dim, 1.0)))
    torch.testing.assert_close(one.log_partition, other.log_partition, rtol=0, atol=1e-9)
    torch.testing.assert_close(one.correlations(), other.correlations(), rtol=0, atol=1e-8)


def test_long_rings_are_chains_with_equal_bulk() -> None:
    """chi of an infinite chain: (beta R^2 / D) (1 + A) / (1 - A)."""
    for dim in (2, 3, 8):
        field = torch.zeros(48, dim, dtype=torch.float64)
        lattice = ring(48, strength=torch.tensor(1.0, dtype=torch.float64))
        equilibrium = Exact().solve(SpinSystem(lattice, field, 1.0, Sphere(dim, 1.0)))
        correlations = equilibrium.correlations().detach()
        a = float(correlations[0, 1])
        # Around a ring of 48 the corrections are A^48 < 1e-16.
        assert float(correlations[0].sum()) == pytest.approx((1 + a) / (1 - a), rel=1e-12)


def test_rings_of_every_temperature() -> None:
    """Ferromagnetic rings to beta J = 1e4; frustrated ones say where their digits end."""
    field = torch.zeros(3, 3, dtype=torch.float64)
    triangle = 1 - torch.eye(3, dtype=torch.float64)
    for beta in (1e-6, 1.0, 1e2, 1e4):
        equilibrium = Exact().solve(SpinSystem(triangle, field, beta, Sphere(3, 1.0)))
        if beta >= 1e2:  # equipartition: U = -3 + 4 modes / 2 beta
            energy = float(equilibrium.internal_energy.detach())
            assert energy == pytest.approx(-3 + 2 / beta, abs=beta**-2)
    for beta in (1e-6, 1.0, 4.0):
        Exact().solve(SpinSystem(-triangle, field, beta, Sphere(3, 1.0)))
    with pytest.raises(ConvergenceError, match="frustrated"):
        Exact().solve(SpinSystem(-triangle, field, 40.0, Sphere(3, 1.0)))


def test_components_add_up() -> None:
    """Pair in a field, chain without, two single spins in fields and one free, all in one J."""
    dim = 3
    matrix = bonds(8, {(0, 4): 0.8, (1, 2): -0.5, (2, 6): 0.9})
    field = torch.zeros(8, dim, dtype=torch.float64)
    field[[0, 3, 5]] = normal(3, dim, seed=5)
    site = Sphere(dim)
    equilibrium = Exact().solve(SpinSystem(matrix, field, 1.3, site))
    pair = Exact().solve(SpinSystem(matrix[[0, 4]][:, [0, 4]], field[[0, 4]], 1.3, site))
    tree = Exact().solve(SpinSystem(matrix[[1, 2, 6]][:, [1, 2, 6]], 0 * field[:3], 1.3, site))
    single = site.log_partition(1.3 * field[[3, 5]]).sum()
    torch.testing.assert_close(
        equilibrium.log_partition, pair.log_partition + tree.log_partition + single
    )
    m = equilibrium.magnetization
    torch.testing.assert_close(m[[0, 4]], pair.magnetization)
    torch.testing.assert_close(m[[3, 5]], site.mean(1.3 * field[[3, 5]]))
    # Between components, and with it every element: <S_i S_j> = m_i m_j.
    expected = m @ m.mT
    expected[[0, 4], [4, 0]] = pair.correlations()[0, 1]
    for row, column in itertools.product(range(3), repeat=2):
        expected[[1, 2, 6][row], [1, 2, 6][column]] = tree.correlations()[row, column]
    expected.fill_diagonal_(site.radius**2)
    torch.testing.assert_close(equilibrium.correlations(), expected, rtol=1e-12, atol=1e-14)
    connected = torch.einsum("iaja->ij", equilibrium.susceptibility()) / 1.3
    torch.testing.assert_close(connected, expected - m @ m.mT, rtol=1e-11, atol=1e-13)


def test_enumeration_of_twenty_spins() -> None:
    """The largest size: fluctuation and response agree (chi = beta (<ss> - <s><s>))."""
    system = SpinSystem(symmetric(20, 20) / 4, normal(20, 1), 1.1, Ising())
    equilibrium = Exact().solve(system)
    m = equilibrium.magnetization.detach()
    covariance = equilibrium.correlations().detach() - m @ m.mT
    (row,) = torch.autograd.grad(Exact().solve(replaced(system)).magnetization[3, 0], FIELD)
    torch.testing.assert_close(row[:, 0], 1.1 * covariance[3], rtol=1e-10, atol=1e-13)


FIELD = normal(20, 1).requires_grad_()


def replaced(system: SpinSystem) -> SpinSystem:
    return system.replace(field=FIELD)


def test_more_spins_in_small_components() -> None:
    """24 Ising spins as three rings of eight in fields: 3 x 2^8 states instead of 2^24."""
    lattice = ring(8, strength=torch.tensor(0.6, dtype=torch.float64)).to_dense()
    matrix = torch.block_diag(lattice, -lattice, lattice)
    field = normal(24, 1, seed=6)
    whole = Exact().solve(SpinSystem(matrix, field, 1.0, Ising()))
    parts = Exact().solve(
        SpinSystem(torch.stack([lattice, -lattice, lattice]), field.view(3, 8, 1), 1.0, Ising())
    )
    torch.testing.assert_close(whole.log_partition, parts.log_partition.sum())
    torch.testing.assert_close(whole.magnetization, parts.magnetization.reshape(24, 1))
    m = whole.magnetization
    torch.testing.assert_close(whole.correlations()[0, 8:], (m @ m.mT)[0, 8:])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems computed a few at a time, with recomputation in the backward: bit by bit the same."""
    matrix = symmetric(5, 6, 6).requires_grad_()
    field = normal(5, 6, 1).requires_grad_()
    beta = torch.tensor([0.5, 1.0, 1.5, 2.0, 0.1], dtype=torch.float64)

    def second_derivatives() -> tuple[Tensor, ...]:
        equilibrium = Exact().solve(SpinSystem(matrix, field, beta, Ising(), symmetrize=True))
        total = equilibrium.susceptibility().square().sum() + equilibrium.specific_heat().sum()
        return torch.autograd.grad(total, (matrix, field))

    at_once = second_derivatives()
    monkeypatch.setattr(closed_forms, "_CHUNK", 2**7)
    for one, other in zip(second_derivatives(), at_once, strict=True):
        assert torch.equal(one, other)


def test_gaussian_spins() -> None:
    """The moments of a Gaussian of precision 1 / v - beta J."""
    variance, dim, beta = 0.7, 3, 0.8
    matrix = 0.2 * symmetric(2, 5, 5)
    matrix.diagonal(dim1=-2, dim2=-1).zero_()
    field = normal(2, 5, dim)
    equilibrium = Exact().solve(SpinSystem(matrix, field, beta, Gaussian(dim, variance)))
    precision = torch.eye(5, dtype=torch.float64) / variance - beta * matrix
    covariance = torch.linalg.inv(precision)
    m = covariance @ (beta * field)
    torch.testing.assert_close(equilibrium.magnetization, m)
    torch.testing.assert_close(
        equilibrium.susceptibility(),
        beta * torch.einsum("nij,ab->niajb", covariance, torch.eye(dim).double()),
    )
    correlations = dim * covariance + m @ m.mT
    energy = -(matrix * correlations).sum((-1, -2)) / 2 - (field * m).sum((-1, -2))
    torch.testing.assert_close(equilibrium.internal_energy, energy)
    # The diagonal included: <|S_i|^2> is not fixed here.
    torch.testing.assert_close(equilibrium.correlations(), correlations)


def test_gaussian_spins_beyond_stability() -> None:
    matrix = bonds(3, {(0, 1): 1.0, (1, 2): 1.0})  # largest eigenvalue sqrt(2)
    system = SpinSystem(matrix, torch.zeros(3, 2, dtype=torch.float64), 1.0, Gaussian(2, 0.75))
    with pytest.raises(ValueError, match="largest eigenvalue is 1.06066"):
        Exact().solve(system)
    Exact().solve(system.replace(beta=0.94))  # 0.997


@pytest.mark.parametrize(
    ("site", "matrix", "field"),
    [
        (Ising(), symmetric(4, 4), normal(4, 1)),
        (Sphere(2), bonds(2, {(0, 1): 0.7}), normal(2, 2)),
        (Sphere(2), bonds(3, {(0, 1): 0.7, (1, 2): -0.4}), torch.zeros(3, 2).double()),
        (Sphere(2), bonds(3, {(0, 1): 0.7, (1, 2): -0.4, (2, 0): 0.5}), torch.zeros(3, 2).double()),
        (Sphere(2), torch.zeros(2, 2).double(), normal(2, 2)),
        (Gaussian(2, 0.5), 0.3 * symmetric(3, 3), normal(3, 2)),
    ],
    ids=["enumeration", "pair", "forest", "ring", "single", "gaussian"],
)
def test_observables_are_differentiable(site, matrix: Tensor, field: Tensor) -> None:
    """F, m, U, C and <S S> in the bonds, the temperature and (where there are any) the fields."""
    is_bond = (matrix != 0).double()
    inputs = [matrix.clone().requires_grad_(), torch.tensor(0.8).double().requires_grad_()]
    if bool((field != 0).any()):
        inputs.append(field.clone().requires_grad_())

    def observables(matrix: Tensor, beta: Tensor, h: Tensor = field) -> tuple[Tensor, ...]:
        equilibrium = Exact(quadrature_points=10).solve(
            SpinSystem(matrix * is_bond, h, beta, site, symmetrize=True)
        )
        return (
            equilibrium.free_energy,
            equilibrium.magnetization,
            equilibrium.internal_energy,
            equilibrium.specific_heat(),
            equilibrium.correlations(),
            equilibrium.susceptibility().sum(),
        )

    assert gradcheck(observables, inputs, atol=1e-6, fast_mode=True)


def test_batches_of_different_structure() -> None:
    """Every system by itself: chains, rings, pairs in fields, absent sites, in one batch."""
    dim = 3
    matrices = torch.stack(
        [
            bonds(4, {(0, 1): 0.5, (1, 2): 1.0, (2, 3): -0.3}),
            bonds(4, {(0, 1): 0.5, (1, 2): 1.0, (2, 3): -0.3, (3, 0): 0.8}),
            bonds(4, {(0, 2): 0.7}),
            bonds(4, {(0, 2): 0.9}),
            torch.zeros(4, 4).double(),
            bonds(4, {(0, 1): 0.5, (1, 2): 1.0, (2, 3): -0.3, (3, 0): 0.8}),
        ]
    )
    field = torch.zeros(6, 4, dim, dtype=torch.float64)
    field[2:5] = normal(3, 4, dim, seed=7)
    mask = torch.zeros(6, 4, dtype=torch.bool)
    mask[4, 1] = True
    mask[5, :2] = True
    beta = torch.linspace(0.4, 1.4, 6, dtype=torch.float64)
    junk = torch.where(mask[..., None], torch.nan, field)
    together = Exact().solve(SpinSystem(matrices, junk, beta, Sphere(dim), mask=mask))
    for row in range(6):
        there = ~mask[row]
        alone = Exact().solve(
            SpinSystem(matrices[row][there][:, there], field[row][there], beta[row], Sphere(dim))
        )
        for found, expected in (
            (together.log_partition[row], alone.log_partition),
            (together.internal_energy[row], alone.internal_energy),
            (together.specific_heat()[row], alone.specific_heat()),
            (together.magnetization[row][there], alone.magnetization),
            (together.correlations()[row][there][:, there], alone.correlations()),
        ):
            # Quadratures may use more points in company.
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
        assert float(together.magnetization[row][~there].abs().sum().detach()) == 0


def test_evidence() -> None:
    field = normal(2, 2, 3)
    field[1] = 0
    system = SpinSystem(bonds(2, {(0, 1): 0.7}), field, 1.0, Sphere(3))
    solution = Exact().solve(system).solution
    assert solution.value.shape == solution.residual.shape == (2,)
    assert bool(solution.converged.all())
    assert float(solution.residual.max()) <= 1e-12
    assert solution.iterations.tolist() == [1, 0]  # one doubling; nothing to do without a field
    with pytest.raises(ConvergenceError, match="1 of 2 systems did not converge"):
        Exact(quadrature_points=2).solve(system)
    assert bool(Exact(quadrature_points=40).solve(system).converged.all())


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (0, 0, 3)])
def test_empty(shape: tuple[int, ...]) -> None:
    field = torch.zeros(shape, requires_grad=True)
    for site in (Sphere(3), Gaussian(3)):
        equilibrium = Exact().solve(SpinSystem(torch.zeros(shape[1], shape[1]), field, 1.0, site))
        assert equilibrium.log_partition.shape == shape[:1]
        assert equilibrium.magnetization.shape == shape
        equilibrium.free_energy.sum().backward()


def test_float32_is_rounded_float64() -> None:
    matrix, field = bonds(2, {(0, 1): 0.7}), normal(2, 3)
    fine = Exact().solve(SpinSystem(matrix, field, 1.0, Sphere(3)))
    coarse = Exact().solve(SpinSystem(matrix.float(), field.float(), 1.0, Sphere(3)))
    assert coarse.magnetization.dtype == coarse.log_partition.dtype == torch.float32
    torch.testing.assert_close(coarse.magnetization, fine.magnetization.float())
    torch.testing.assert_close(coarse.specific_heat(), fine.specific_heat().float())


SPHERES = Sphere(3)
ZERO = torch.zeros(4, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("system", "message"),
    [
        (
            lambda: SpinSystem(chain(4).to_dense().double(), ZERO + 1, 1.0, SPHERES),
            "4 coupled spins .* in a field.* use SteepestDescent .* or MeanField",
        ),
        (
            lambda: SpinSystem(1 - torch.eye(4).double(), ZERO, 1.0, SPHERES),
            "on a graph with loops",
        ),
        (
            lambda: SpinSystem(cubic(3).to_dense(), torch.zeros(27, 1), 1.0, Ising()),
            "27 coupled spins .*0, 1, .*N = 20",
        ),
        (
            lambda: SpinSystem(bonds(2, {(0, 1): 1.0}), ZERO[:2], 1.0, LargeDSphere(3)),
            "approximation itself",
        ),
        (
            lambda: SpinSystem(normal(4, 4), ZERO, 1.0, SPHERES),
            "Exact needs symmetric couplings",
        ),
        (
            lambda: SpinSystem(MatrixValued(torch.zeros(4, 4, 3, 3).double()), ZERO, 1.0, SPHERES),
            "scalar couplings",
        ),
    ],
)
def test_what_it_cannot_do(system, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exact().solve(system())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quadrature_points": 1}, "quadrature_points=1"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
        ({"max_enumerated": 40}, "max_enumerated=40"),
    ],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exact(**options)


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="'quad_points'; the nearest is 'quadrature_points'"):
        Exact(quad_points=3)
