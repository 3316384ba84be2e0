"""Bethe: exact on trees, the right loops missing, ordered states, and its own linear response."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import spinformer as sf
from spinformer.equilibrium import bethe
from spinformer.equilibrium.bethe import Bethe
from spinformer.spins.special import bessel_ratio
from spinformer.thermo.equilibrium import DerivedEquilibrium, Equilibrium

F64 = torch.float64
TIGHT = Bethe(tolerance=1e-14)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def tree(num_spins: int, seed: int = 0, strength: float = 1.0) -> Tensor:
    """A random recursive tree with Gaussian bonds."""
    generator = torch.Generator().manual_seed(seed)
    j = torch.zeros(num_spins, num_spins, dtype=F64)
    for i in range(1, num_spins):
        parent = int(torch.randint(i, (1,), generator=generator))
        j[i, parent] = strength * torch.randn((), generator=generator, dtype=F64)
    return j + j.mT


def loop(num_spins: int, k: float) -> Tensor:
    return sf.couplings.ring(num_spins, strength=k, dtype=F64).to_dense()


def disordered(num_spins: int = 5, seed: int = 0, **options) -> sf.SpinSystem:
    """All pairs coupled, in fields."""
    j, h = normal(num_spins, num_spins, seed=seed) / 4, normal(num_spins, 1, seed=seed + 100)
    return sf.SpinSystem(j, h, 0.9, sf.Ising(), symmetrize=True, **options)


def compare(
    found: Equilibrium, exact: Equilibrium, tolerance: float, heat: float | None = None
) -> None:
    for name in ("log_partition", "magnetization", "internal_energy", "entropy"):
        torch.testing.assert_close(
            getattr(found, name).detach(),
            getattr(exact, name).detach(),
            rtol=tolerance,
            atol=tolerance,
        )
    for name in ("specific_heat", "susceptibility", "correlations"):
        atol = heat if heat is not None and name == "specific_heat" else tolerance
        torch.testing.assert_close(
            getattr(found, name)().detach(),
            getattr(exact, name)().detach(),
            rtol=tolerance,
            atol=atol,
        )


# --- trees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_spins", [1, 2, 6, 14])
@pytest.mark.parametrize("beta", [0.3, 1.3])
def test_exact_for_ising_spins_on_trees_in_fields(num_spins: int, beta: float) -> None:
    """Messages are exact after as many updates as the tree is wide, and stay so."""
    system = sf.SpinSystem(
        tree(num_spins, num_spins), normal(num_spins, 1, seed=num_spins), beta, sf.Ising()
    )
    found = TIGHT.solve(system)
    assert int(found.solution.iterations) <= num_spins + 1
    compare(found, sf.Exact().solve(system), 1e-12)


def test_exact_on_a_forest_of_strong_bonds_in_strong_fields() -> None:
    """Where every tanh rounds to one: K up to 40 and b up to 60, frustrated ones among them."""
    j = torch.block_diag(tree(6, 1, strength=20.0), tree(5, 2, strength=20.0))
    system = sf.SpinSystem(j, 30 * normal(11, 1, seed=3), 1.0, sf.Ising())
    found, exact = TIGHT.solve(system), sf.Exact().solve(system)
    # Energies of the order of 100, squared in the heat, of which the last digits are lost.
    compare(found, exact, 1e-11, heat=1e-9)
    assert bool(found.is_stable)


@pytest.mark.parametrize("dim", [2, 3, 8])
def test_exact_for_spheres_on_trees(dim: int) -> None:
    system = sf.SpinSystem(tree(7, dim), torch.zeros(7, dim, dtype=F64), 1.3, sf.Sphere(dim, 1.1))
    found = Bethe().solve(system)
    assert int(found.solution.iterations) == 0
    compare(found, sf.Exact().solve(system), 1e-12)


def test_large_d_spheres_on_trees_are_steepest_descent() -> None:
    """Where D is large both are exact, and both keep the leading order in D."""
    system = sf.SpinSystem(tree(7), torch.zeros(7, 4, dtype=F64), 1.3, sf.LargeDSphere(4))
    compare(Bethe().solve(system), sf.SteepestDescent().solve(system), 1e-12)


# --- loops ---------------------------------------------------------------------------------------


def loop_error(num_spins: int, site: sf.SiteLaw, k: float) -> float:
    assert site.radius is not None
    system = sf.SpinSystem(
        loop(num_spins, k / site.radius**2),
        torch.zeros(num_spins, site.dim, dtype=F64),
        1.0,
        site,
    )
    exact = sf.Exact().solve(system).log_partition - Bethe().solve(system).log_partition
    return float(exact.detach())


@pytest.mark.parametrize("site", [sf.Ising(), sf.Sphere(2), sf.Sphere(3), sf.Sphere(8)], ids=repr)
def test_what_is_missing_is_the_loops(site: sf.SiteLaw) -> None:
    """D prod (K R^2 / D) around a triangle or a square, with corrections of two orders more.

    Ratios of errors at k and k / 2 approach 2^order with corrections of order k^2 = 0.01.
    """
    k, dim = 0.1, site.dim
    triangle = [loop_error(3, site, x) for x in (k, k / 2)]
    square = [loop_error(4, site, x) for x in (k, k / 2)]
    assert triangle[0] / triangle[1] == pytest.approx(8, rel=0.02)
    assert square[0] / square[1] == pytest.approx(16, rel=0.02)
    # At D = 8 what is left is 1e-11, a hundred thousand times rounding.
    rest = [error - dim * (x / dim) ** 3 for error, x in zip(triangle, (k, k / 2), strict=True)]
    assert rest[0] / rest[1] == pytest.approx(32, rel=0.02)


def test_order_of_the_error_in_fields() -> None:
    errors = []
    for scale in (0.1, 0.05, 0.025):
        system = disordered(4, seed=2)
        system = system.replace(couplings=scale * system.couplings.to_dense())
        found, exact = TIGHT.solve(system), sf.Exact().solve(system)
        errors.append(
            (
                float((found.log_partition - exact.log_partition).detach().abs()),
                float((found.magnetization - exact.magnetization).detach().abs().max()),
            )
        )
    for coarse, fine in itertools.pairwise(errors):
        for one, other in zip(coarse, fine, strict=True):
            assert one / other == pytest.approx(8, rel=0.1)


# --- the free energy of the messages -------------------------------------------------------------


def test_fixed_points_are_stationary_points_of_the_coded_free_energy() -> None:
    """In every message, those between spins that have no bond among them."""
    system = disordered(6)
    j = system.couplings.to_dense().clone()
    j[0, 1] = j[1, 0] = 0.0
    found = TIGHT.solve(system.replace(couplings=j, symmetrize=False))
    k, b = 0.9 * j, 0.9 * system.field[..., 0]
    u = found.messages.clone().requires_grad_()
    value = bethe._log_partition(u, k, b)
    torch.testing.assert_close(value.detach(), found.log_partition.detach())
    (gradient,) = torch.autograd.grad(value, u)
    assert float(gradient.abs().max()) < 1e-13
    # And nowhere else: of first order a finite way off.
    (gradient,) = torch.autograd.grad(bethe._log_partition(u + 0.1, k, b), u)
    assert float(gradient.abs().max()) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_linear_response_is_the_response_of_the_fixed_point(seed: int) -> None:
    """The closed form of chi against one implicit derivative a field, on a graph with loops."""
    found = TIGHT.solve(disordered(6, seed))
    derived = DerivedEquilibrium._susceptibility(found)
    torch.testing.assert_close(found.susceptibility(), derived, rtol=1e-11, atol=1e-12)
    m = found.magnetization.detach()
    derivative = DerivedEquilibrium.magnetization.fget(found)  # type: ignore[attr-defined]
    torch.testing.assert_close(m, derivative.detach(), rtol=1e-12, atol=1e-13)


def test_correlations_of_bonds_and_of_all_pairs() -> None:
    """Only linear response knows how spins are correlated that share no bond."""
    j = tree(6, 4)
    system = sf.SpinSystem(j, normal(6, 1), 1.0, sf.Ising())
    found, exact = TIGHT.solve(system), sf.Exact().solve(system).correlations()
    m = found.magnetization
    coupling = found.correlations("coupling")
    bonds = (j != 0) | torch.eye(6, dtype=torch.bool)
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(coupling[bonds], exact[bonds], **close)
    torch.testing.assert_close(coupling[~bonds], (m @ m.mT)[~bonds], **close)


def test_derivatives() -> None:
    """Once of everything, twice of log Z and m; steps of 1e-6 leave errors of 1e-7."""
    j = (normal(2, 4, 4) / 3).requires_grad_()
    h = normal(2, 4, 1, seed=1).requires_grad_()
    beta = torch.tensor([0.5, 0.9], dtype=F64, requires_grad=True)

    def solve(j: Tensor, h: Tensor, beta: Tensor) -> Equilibrium:
        return TIGHT.solve(sf.SpinSystem(j, h, beta, sf.Ising(), symmetrize=True))

    def first(*inputs: Tensor) -> tuple[Tensor, ...]:
        return solve(*inputs).log_partition, solve(*inputs).magnetization

    def second(*inputs: Tensor) -> tuple[Tensor, ...]:
        found = solve(*inputs)
        return found.susceptibility(), found.specific_heat(), found.correlations("coupling")

    assert gradcheck(first, (j, h, beta), fast_mode=True)
    assert gradgradcheck(first, (j, h, beta), fast_mode=True)
    assert gradcheck(second, (j, h, beta), fast_mode=True)


def test_derivatives_of_spheres() -> None:
    j = (normal(2, 3, 3) / 4).requires_grad_()
    beta = torch.tensor([0.5, 0.9], dtype=F64, requires_grad=True)

    def quantities(j: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        field = torch.zeros(2, 3, 2, dtype=F64)
        found = Bethe().solve(sf.SpinSystem(j, field, beta, sf.Sphere(2), symmetrize=True))
        return found.log_partition, found.susceptibility(), found.specific_heat()

    assert gradcheck(quantities, (j, beta), fast_mode=True)
    assert gradgradcheck(quantities, (j, beta), fast_mode=True)


# --- order ---------------------------------------------------------------------------------------


def uniform_message(k: float, neighbours: int) -> float:
    """The positive root of u = atanh(tanh k tanh((z - 1) u)), by bisection."""
    low, high = 1e-3, k
    for _ in range(200):
        middle = (low + high) / 2
        update = math.atanh(math.tanh(k) * math.tanh((neighbours - 1) * middle))
        low, high = (middle, high) if update > middle else (low, middle)
    return low


def test_ordered_magnet_has_two_solutions() -> None:
    """4 x 4 torus with tanh K > 1 / (z - 1): m = 0, unstable, and two of lower free energy."""
    k = 0.6
    system = sf.SpinSystem(
        sf.couplings.square(4, dtype=F64), torch.zeros(16, 1, dtype=F64), k, sf.Ising()
    )
    start = torch.full((16, 1), 0.3, dtype=F64)
    none, up, down = (Bethe().solve(system, x) for x in (None, start, -start))
    u = uniform_message(k, 4)
    expected = torch.full((16, 1), math.tanh(4 * u), dtype=F64)
    # Residuals of 1e-10 in units of the largest field 3.4 and a contraction of about 1 / 2.
    torch.testing.assert_close(up.magnetization.detach(), expected, rtol=1e-8, atol=0)
    torch.testing.assert_close(down.magnetization.detach(), -expected, rtol=1e-8, atol=0)
    torch.testing.assert_close(up.free_energy, down.free_energy)
    assert float((up.free_energy - none.free_energy).detach()) < -0.1
    assert float(none.magnetization.detach().abs().max()) == 0
    assert [bool(x.is_stable) for x in (none, up, down)] == [False, True, True]


@pytest.mark.parametrize("site", [sf.Ising(), sf.Sphere(3), sf.LargeDSphere(4)], ids=repr)
def test_paramagnet_is_unstable_below_the_bethe_temperature(site: sf.SiteLaw) -> None:
    """On a graph of z neighbours each: stability (1 - (z - 1) r) / (1 + r), r that of a bond."""
    assert site.radius is not None
    for beta in (0.1, 0.25, 0.5):
        system = sf.SpinSystem(
            sf.couplings.square(4, dtype=F64), torch.zeros(16, site.dim, dtype=F64), beta, site
        )
        found = Bethe().solve(system)
        r = float(site.mean(torch.tensor([beta * site.radius], dtype=F64)) / site.radius)
        expected = (1 - 3 * r) / (1 + r)
        assert float(found.stability()) == pytest.approx(expected, rel=1e-11)
        assert bool(found.is_stable) == (3 * r < 1)


def test_stability_changes_sign_with_the_messages() -> None:
    """Spectral radius of the non-backtracking matrix of a random ferromagnet against M."""
    j = normal(6, 6, seed=5).abs() * (normal(6, 6, seed=6) > -0.3)
    j = torch.triu(j, 1) + torch.triu(j, 1).mT
    directed = [(a, b) for a in range(6) for b in range(6) if j[a, b] != 0]

    def radius(beta: float) -> float:
        weights = bessel_ratio(beta * j * 3, 3)
        matrix = torch.zeros(len(directed), len(directed), dtype=F64)
        for row, (a, b) in enumerate(directed):
            for column, (c, d) in enumerate(directed):
                if d == a and c != b:
                    matrix[row, column] = weights[a, b]
        return float(torch.linalg.eigvals(matrix).abs().max())

    low, high = 0.01, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if radius(middle) < 1 else (low, middle)

    def stability(beta: float) -> float:
        system = sf.SpinSystem(j, torch.zeros(6, 3, dtype=F64), beta, sf.Sphere(3))
        return float(Bethe().solve(system).stability())

    assert abs(stability(low)) < 1e-9
    assert stability(0.99 * low) > 0 > stability(1.01 * low)


def test_sign_of_the_stability_beside_frozen_spins() -> None:
    """Curvature of an unstable state in units of free spins is below that of M, and negative."""
    j = torch.block_diag(sf.couplings.curie_weiss(6, strength=3.0, dtype=F64).to_dense(), tree(2))
    h = torch.zeros(8, 1, dtype=F64)
    h[6:] = 40.0  # whose own curvature is cosh(40)^2
    found = Bethe().solve(sf.SpinSystem(j, h, 1.0, sf.Ising()))
    free = Bethe().solve(sf.SpinSystem(j[:6, :6], h[:6], 1.0, sf.Ising()))
    assert float(free.stability()) < -0.1
    assert float(found.stability()) <= float(free.stability()) * (1 - 1e-12)
    assert not bool(found.is_stable)


def test_magnetizations_of_a_solution_start_it() -> None:
    """They determine its messages: nothing is left to iterate."""
    system = disordered(6, seed=1)
    found = TIGHT.solve(system)
    again = Bethe().solve(system, found.magnetization.detach())
    assert int(again.solution.iterations) == 1
    torch.testing.assert_close(again.messages, found.messages, rtol=1e-10, atol=1e-12)
    # And are welcome where they are +-1.
    cold = system.replace(beta=30.0)
    assert bool(Bethe(damping=0.5).solve(cold, torch.ones(6, 1, dtype=F64)).converged)


def test_messages_on_frustrated_loops_are_loud_and_damped() -> None:
    generator = torch.Generator().manual_seed(2)
    j = sf.couplings.sherrington_kirkpatrick(10, generator=generator, dtype=F64)
    h = 0.3 * torch.randn(10, 1, generator=generator, dtype=F64)
    system = sf.SpinSystem(j, h, 1.5, sf.Ising())
    with pytest.raises(sf.ConvergenceError, match="damping"):
        Bethe().solve(system)
    lost = Bethe(on_failure="ignore").solve(system)
    assert not bool(lost.converged)
    assert float(lost.magnetization.abs().max()) <= 1
    found = Bethe(damping=0.3).solve(system)
    # Loops of K = 0.5 all over: no small error, but a smaller one than mean field's.
    mean_field = sf.MeanField(damping=0.3).solve(system).log_partition
    exact = sf.Exact().solve(system).log_partition
    assert abs(float(found.log_partition - exact)) < abs(float(mean_field - exact))


@pytest.mark.parametrize("solver", ["plain", "anderson", "broyden"])
def test_solvers_agree(solver: str) -> None:
    system = disordered(6)
    found = Bethe(solver=solver).solve(system)
    torch.testing.assert_close(found.log_partition, TIGHT.solve(system).log_partition)
    torch.testing.assert_close(found.magnetization, TIGHT.solve(system).magnetization)


# --- batches and errors --------------------------------------------------------------------------


@pytest.mark.parametrize("site", [sf.Ising(), sf.Sphere(3)], ids=repr)
@pytest.mark.parametrize("what", ["field", "beta too large"])
def test_a_broken_system_stays_alone(site: sf.SiteLaw, what: str) -> None:
    """Also one whose numbers are finite and overflow in beta J."""
    j = (10 * loop(4, 0.02)).requires_grad_()
    field = torch.zeros(2, 4, site.dim, dtype=F64)
    beta = torch.tensor([0.8, 0.8], dtype=F64)
    if what == "field":
        field[1, 0] = torch.nan
    else:
        beta[1] = 1e308
        j = (10 * j.detach()).requires_grad_()
    system = sf.SpinSystem(j, field, beta, site, check_finite=False)
    found = Bethe(on_failure="ignore", damping=0.5).solve(system)
    assert found.converged.tolist() == [True, False]
    alone = Bethe(damping=0.5).solve(sf.SpinSystem(j, field[0], 0.8, site))
    for name in ("log_partition", "magnetization", "susceptibility", "correlations", "stability"):
        one, other = getattr(found, name), getattr(alone, name)
        one, other = (x if isinstance(x, Tensor) else x() for x in (one, other))
        assert bool(one[1].isnan().all())
        torch.testing.assert_close(one[0], other)
        if name != "stability":
            gradients = [
                torch.autograd.grad(x.sum(), j, retain_graph=True, materialize_grads=True)[0]
                for x in (one[0], other)
            ]
            torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-8)
    with pytest.raises(sf.ConvergenceError, match="1 of 2"):
        Bethe(damping=0.5).solve(system)


def test_refusals() -> None:
    j, two = torch.zeros(3, 3, dtype=F64), torch.zeros(3, 2, dtype=F64)
    with pytest.raises(ValueError, match="Gaussian.*AdaptiveTAP"):
        Bethe().solve(sf.SpinSystem(j, two, site=sf.Gaussian(2)))
    with pytest.raises(ValueError, match="without fields.*TAP"):
        Bethe().solve(sf.SpinSystem(j, two + 1, site=sf.Sphere(2)))
    with pytest.raises(ValueError, match="matrix-valued"):
        Bethe().solve(sf.SpinSystem(torch.zeros(3, 3, 2, 2, dtype=F64), two, site=sf.Sphere(2)))
    with pytest.raises(ValueError, match="symmetric"):
        Bethe().solve(sf.SpinSystem(j + torch.ones(3, 3).triu(1), two[:, :1], site=sf.Ising()))
    ising = sf.SpinSystem(j, two[:, :1], site=sf.Ising())
    with pytest.raises(ValueError, match=r"initial holds 1\.5"):
        Bethe().solve(ising, torch.full((3, 1), 1.5, dtype=F64))
    with pytest.raises(ValueError, match="initial has shape"):
        Bethe().solve(ising, torch.zeros(4, 1, dtype=F64))
    with pytest.raises(TypeError, match="damping"):
        Bethe(dampng=0.5)
