"""Kinetic mean field and TAP against exact chains, quadratures and each other."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor

from spinformer import TAP, ConvergenceError, ConvergenceWarning, MeanField
from spinformer.dynamics import ExactDynamics, KineticMeanField, KineticTAP
from spinformer.dynamics.cumulants import cubic, cumulants, two_bonds, weighted_bond
from spinformer.spins.couplings import ring
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem

LAWS = [Ising(), Sphere(2), Sphere(3), Sphere(16), LargeDSphere(8), Gaussian(2, 0.5)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def system_of(
    site: SiteLaw, strength: float, *, symmetric: bool = False, num_spins: int = 5
) -> SpinSystem:
    matrix = draw(num_spins, num_spins, seed=3) * strength / math.sqrt(num_spins)
    field = 0.7 * draw(num_spins, site.dim, seed=4)
    return SpinSystem(matrix, field, 1.0, site, symmetrize=symmetric)


# -- rates: an error of order n falls by 2^n when J is halved --------------------------------

# The next orders are still visible at the strengths below: measured 3.5 ... 5.1 (of delayed
# correlations along a run; 4.3 at an eighth of the strength), 7.3 ... 15 (of the
# entropy flow, whose third order is small there) and 20.
SECOND, THIRD, FOURTH = (3.3, 5.3), (7.0, 17.0), (13.0, 25.0)


def _falls(error: Callable[[float], Tensor], strength: float, rate: tuple[float, float]) -> None:
    ratio = float(error(strength).abs().max() / error(strength / 2).abs().max())
    assert rate[0] < ratio < rate[1], ratio


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "quantity",
    [
        lambda s: s.magnetization,
        lambda s: s.correlations(connected=True),
        lambda s: s.correlations(),
        lambda s: s.delayed_correlations(1, connected=True),
        lambda s: s.delayed_correlations(2, connected=True),
    ],
    ids=["m", "C", "C raw", "D1", "D2"],
)
def test_order_of_the_steady_state_of_ising_spins(
    symmetric: bool, quantity: Callable[..., Tensor]
) -> None:
    for method, rate in ((KineticMeanField(), SECOND), (KineticTAP(), THIRD)):

        def error(strength: float, method: KineticMeanField | KineticTAP = method) -> Tensor:
            system = system_of(Ising(), strength, symmetric=symmetric)
            exact = quantity(ExactDynamics().steady_state(system))
            return quantity(method.steady_state(system)) - exact

        _falls(error, 0.1, rate)


def test_order_of_the_entropy_production_of_ising_spins() -> None:
    # It is itself of second order, and each level gives its next term.
    for method, rate in ((KineticMeanField(), THIRD), (KineticTAP(), FOURTH)):

        def error(strength: float, method: KineticMeanField | KineticTAP = method) -> Tensor:
            system = system_of(Ising(), strength)
            exact = ExactDynamics().steady_state(system).entropy_production
            return method.steady_state(system).entropy_production - exact

        _falls(error, 0.05, rate)


@pytest.mark.parametrize("initial", ["random", "ordered", "between"])
@pytest.mark.parametrize(
    "quantity",
    [
        lambda run: run.magnetization,
        lambda run: run.entropy_flow,
        lambda run: run.correlations(3, connected=True),
        lambda run: run.delayed_correlations(3, connected=True),
    ],
    ids=["m", "entropy flow", "C", "D"],
)
def test_order_of_a_transient_of_ising_spins(initial: str, quantity: Callable[..., Tensor]) -> None:
    for method, rate in ((KineticMeanField(), SECOND), (KineticTAP(), THIRD)):

        def error(strength: float, method: KineticMeanField | KineticTAP = method) -> Tensor:
            system = system_of(Ising(), strength)
            start = torch.full((5, 1), 0.6).double() if initial == "between" else initial
            schedule = torch.tensor([1.0, -0.5, 0.3, 0.3])[:, None, None] * draw(5, 1, seed=9)
            exact = ExactDynamics().run(system, 4, start, field=schedule)
            run = method.run(system, 4, start, field=schedule)
            return quantity(run) - quantity(exact)

        _falls(error, 0.1, rate)


# -- vectors: one step is an integral over independent spins ---------------------------------


def sphere_points() -> tuple[Tensor, Tensor]:
    """Directions in three dimensions and weights that add up to one."""
    z, weight = (torch.tensor(x) for x in numpy.polynomial.legendre.leggauss(24))
    angle = 2 * math.pi * (torch.arange(48, dtype=torch.float64) + 0.5) / 48
    r = (1 - z * z).sqrt()[:, None]
    points = torch.stack([r * angle.cos(), r * angle.sin(), z[:, None].expand(24, 48)], -1)
    return points.reshape(-1, 3), (weight[:, None].expand(24, 48) / 96).reshape(-1)


def law_of(b: Tensor, site: SiteLaw) -> Tensor:
    """Weights of the points for a spin in the field b (..., 3)."""
    points, weight = sphere_points()
    density = torch.exp(b @ (site.radius * points.T) - site.log_partition(b)[..., None])
    return weight * density


def test_order_of_one_step_of_vectors() -> None:
    """Spins 0 and 1 feel spin 2, which is independent of them: one integral is exact."""
    site = Sphere(3, 1.3)
    points = site.radius * sphere_points()[0]
    field, own = draw(3, 3, seed=5), draw(3, 3, seed=6)
    start = site.mean(own)
    law = law_of(own[2], site)

    def errors(method: KineticMeanField | KineticTAP, strength: float) -> list[Tensor]:
        matrix = torch.zeros(3, 3, dtype=torch.float64)
        matrix[0, 2], matrix[1, 2] = strength, -0.7 * strength
        run = method.run(SpinSystem(matrix, field, 0.9, site), 1, start)
        mean = site.mean(0.9 * (field[:2] + matrix[:2, 2, None] * points[:, None]))  # (P, 2, 3)
        exact = torch.einsum("p,pia->ia", law, mean)
        equal = torch.einsum("p,pa,pa->", law, mean[:, 0], mean[:, 1]) - exact[0] @ exact[1]
        delayed = torch.einsum("p,pia,pa->i", law, mean, points) - exact @ start[2]
        return [
            run.magnetization[1, :2] - exact,
            run.correlations(1, connected=True)[0, 1] - equal,
            run.delayed_correlations(1, connected=True)[:2, 2] - delayed,
        ]

    for which in range(3):
        _falls(lambda s, w=which: errors(KineticMeanField(), s)[w], 0.2, SECOND)
        _falls(lambda s, w=which: errors(KineticTAP(), s)[w], 0.2, THIRD)


def test_order_of_a_delay_of_two_steps_of_vectors() -> None:
    """Spin 0 feels 1, which feels 2, which feels none: two nested integrals are exact."""
    site = Sphere(3, 1.0)
    points = sphere_points()[0]
    field = draw(3, 3, seed=5)

    def error(strength: float) -> Tensor:
        matrix = torch.zeros(3, 3, dtype=torch.float64)
        matrix[0, 1], matrix[1, 2] = 3 * strength, -2 * strength
        state = KineticTAP().steady_state(SpinSystem(matrix, field, 1.0, site))
        first = law_of(field[2], site)
        second = law_of(field[1] + matrix[1, 2] * points, site)  # (P, P)
        mean = second @ site.mean(field[0] + matrix[0, 1] * points)
        exact = torch.einsum("p,pa,pa->", first, mean, points - site.mean(field[2]))
        return state.delayed_correlations(2, connected=True)[0, 2] - exact

    # Two bonds in a row: the next term has three.
    _falls(error, 0.2, (6.0, 20.0))


def test_no_field_and_even_sphere_need_no_reaction_of_odd_order() -> None:
    system = SpinSystem(draw(4, 4) / 4, torch.zeros(4, 3, dtype=torch.float64), 1.0, Sphere(3))
    assert float(KineticTAP().steady_state(system).magnetization.abs().max()) == 0
    assert float(KineticTAP().run(system, 3).magnetization.abs().max()) == 0


# -- identities ------------------------------------------------------------------------------


def test_ising_reaction_is_that_of_roudi_and_hertz() -> None:
    system = system_of(Ising(), 1.0)
    run = KineticTAP(tolerance=1e-14).run(system, 3, 0.4 * torch.ones(5, 1, dtype=torch.float64))
    k = system.couplings.to_dense()
    for before, after in zip(run.magnetization[:-1], run.magnetization[1:], strict=True):
        push = system.field + k @ before - after * (k.square() @ (1 - before.square()))
        torch.testing.assert_close(after, torch.tanh(push), rtol=0, atol=1e-13)


@pytest.mark.parametrize("site", LAWS, ids=repr)
def test_steady_state_of_symmetric_couplings_is_that_of_equilibrium(site: SiteLaw) -> None:
    system = system_of(site, 0.3, symmetric=True)
    # 1e-10 in units of the field, times a gain of the map below 1/2.
    close = {"rtol": 0, "atol": 1e-9}
    for kinetic, equilibrium in ((KineticTAP(), TAP()), (KineticMeanField(), MeanField())):
        state = kinetic.steady_state(system)
        torch.testing.assert_close(
            state.magnetization, equilibrium.solve(system).magnetization, **close
        )
        assert float(state.entropy_production) == 0
        assert bool(state.converged)


@pytest.mark.parametrize("method", [KineticMeanField(), KineticTAP()], ids=["mf", "tap"])
@pytest.mark.parametrize("site", LAWS, ids=repr)
def test_run_ends_in_the_steady_state(site: SiteLaw, method: KineticMeanField | KineticTAP) -> None:
    # The map contracts by less than 0.3 a step, so that 1e-10 takes 20 steps.
    system = system_of(site, 0.3 / site.scale)
    state, run = method.steady_state(system), method.run(system, 25, "ordered")
    close = {"rtol": 0, "atol": 2e-9}
    torch.testing.assert_close(run.magnetization[-1], state.magnetization, **close)
    torch.testing.assert_close(run.correlations(25), state.correlations(), **close)
    torch.testing.assert_close(run.delayed_correlations(25), state.delayed_correlations(), **close)
    torch.testing.assert_close(run.entropy_flow[-1], state.entropy_production, **close)
    going_on = method.run(system, 2, state)
    torch.testing.assert_close(going_on.magnetization[-1], state.magnetization, **close)


@pytest.mark.parametrize("site", [Ising(), Sphere(3), LargeDSphere(4), Gaussian(2)], ids=repr)
def test_spectral_radius_is_that_of_the_derivative_of_a_step(site: SiteLaw) -> None:
    system = system_of(site, 0.9 / site.scale**2, num_spins=3)
    naive = KineticMeanField().steady_state(system)
    torch.testing.assert_close(naive.spectral_radius(), MeanField().solve(system).spectral_radius())
    for method in (KineticMeanField(tolerance=1e-13), KineticTAP(tolerance=1e-13)):
        state = method.steady_state(system)

        def step(m: Tensor, method: KineticMeanField | KineticTAP = method) -> Tensor:
            return method.run(system, 1, m).magnetization[1]

        jacobian = torch.autograd.functional.jacobian(step, state.magnetization)
        rows = system.num_spins * system.dim
        radius = torch.linalg.eigvals(jacobian.reshape(rows, rows)).abs().max()
        torch.testing.assert_close(state.spectral_radius(), radius, rtol=1e-8, atol=0)


def test_gaussian_spins_are_exact_where_the_order_suffices() -> None:
    system = system_of(Gaussian(2, 0.5), 0.4)
    k = system.couplings.to_dense()
    identity = torch.eye(5, dtype=torch.float64)
    mean = torch.linalg.solve(identity - 0.5 * k, 0.5 * system.field)
    state = KineticTAP().steady_state(system)
    torch.testing.assert_close(state.magnetization, mean, rtol=0, atol=1e-9)
    # C = v + v^2 K C K^T ends with the second order where K^2 = 0.
    nilpotent = torch.zeros(3, 3, dtype=torch.float64)
    nilpotent[0, 2], nilpotent[1, 2] = 0.8, -0.5
    system = SpinSystem(nilpotent, draw(3, 2), 1.0, Gaussian(2, 0.5))
    state = KineticTAP().steady_state(system)
    c = 2 * (0.5 * identity[:3, :3] + 0.5**3 * nilpotent @ nilpotent.T)
    torch.testing.assert_close(state.correlations(connected=True), c)
    torch.testing.assert_close(state.delayed_correlations(connected=True), 0.5 * nilpotent @ c)


@pytest.mark.parametrize("site", [Ising(), Sphere(3), LargeDSphere(4), Gaussian(2)], ids=repr)
def test_contractions_of_cumulants(site: SiteLaw) -> None:
    """The tensors themselves, formed by autograd from the mean, and contracted by einsum."""
    b, other = draw(3, site.dim, seed=1), draw(3, site.dim, seed=2)
    left, right = (cumulants(site, x, None) for x in (b, other))

    def by_autograd(x: Tensor, order: int) -> Tensor:
        function = site.mean
        rows = []
        for row in x:
            if order == 2:
                rows.append(torch.autograd.functional.jacobian(function, row))
            else:
                rows.append(
                    torch.autograd.functional.jacobian(
                        lambda y: torch.autograd.functional.jacobian(
                            function, y, create_graph=True
                        ),
                        row,
                    )
                )
        return torch.stack(rows)

    c, d = by_autograd(b, 2), by_autograd(other, 2)
    torch.testing.assert_close(left.trace, torch.einsum("iaa->i", c))
    weight, back = draw(3, 3, seed=3), draw(3, 3, seed=4)
    expected = weight * torch.einsum("iab,jba->ij", c, d)
    torch.testing.assert_close(weighted_bond(weight, left, right), expected)
    expected = torch.einsum("iacd,jacd->ij", by_autograd(b, 3), by_autograd(other, 3))
    torch.testing.assert_close(cubic(left, right), expected)
    expected = torch.einsum("ik,kj,iab,kbc,jca->ij", weight, back, c, d, c)
    torch.testing.assert_close(two_bonds(weight, back, left, right), expected)


def test_matrix_valued_couplings_with_equal_blocks() -> None:
    system = system_of(Sphere(3), 0.5)
    identity = torch.eye(3, dtype=torch.float64)
    blocks = system.couplings.to_dense()[..., None, None] * identity
    matrix = system.replace(couplings=blocks)
    scalar_state, state = (KineticMeanField().steady_state(s) for s in (system, matrix))
    torch.testing.assert_close(state.magnetization, scalar_state.magnetization)
    torch.testing.assert_close(state.entropy_production, scalar_state.entropy_production)
    torch.testing.assert_close(state.delayed_correlations(), scalar_state.delayed_correlations())
    assert float(state.entropy_production) > 1e-3
    scalar_run, run = (KineticMeanField().run(s, 2) for s in (system, matrix))
    torch.testing.assert_close(run.entropy_flow, scalar_run.entropy_flow)
    torch.testing.assert_close(run.correlations(2), scalar_run.correlations(2))
    torch.testing.assert_close(run.delayed_correlations(2), scalar_run.delayed_correlations(2))
    with pytest.raises(ValueError, match="matrix-valued: use KineticMeanField"):
        KineticTAP().steady_state(matrix)
    with pytest.raises(ValueError, match="matrix-valued"):
        KineticTAP().run(matrix, 2)


# -- the usual demands -----------------------------------------------------------------------


@pytest.mark.parametrize("site", [Ising(), Sphere(3), LargeDSphere(4)], ids=repr)
@pytest.mark.parametrize("method", [KineticMeanField(), KineticTAP()], ids=["mf", "tap"])
def test_gradients(site: SiteLaw, method: KineticMeanField | KineticTAP) -> None:
    method = type(method)(tolerance=1e-13)
    system = system_of(site, 0.5, num_spins=2)

    def quantities(matrix: Tensor, field: Tensor, beta: Tensor) -> Tensor:
        made = SpinSystem(matrix, field, beta, site)
        state, run = method.steady_state(made), method.run(made, 2)
        answers = [state.magnetization, state.entropy_production, state.delayed_correlations()]
        return torch.cat([x.reshape(-1) for x in (*answers, run.magnetization, run.entropy_flow)])

    inputs = [system.couplings.to_dense(), system.field, system.beta]
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(quantities, leaves, fast_mode=True)


@pytest.mark.parametrize("method", [KineticMeanField(), KineticTAP()], ids=["mf", "tap"])
def test_batch_mask_and_a_broken_system(method: KineticMeanField | KineticTAP) -> None:
    matrix, field = draw(3, 4, 4) / 3, draw(3, 4, 3, seed=1)
    mask = torch.tensor([[False] * 4, [False] * 4, [False, True, False, False]])
    kept = [0, 2, 3]
    matrix[2, 1], matrix[2, :, 1], matrix[0, 0, 1] = torch.nan, torch.nan, torch.nan
    site = Sphere(3)
    beta = torch.tensor([0.5, 0.6, 0.7], dtype=torch.float64)
    system = SpinSystem(matrix, field, beta, site, mask=mask, check_finite=False)
    second = SpinSystem(matrix[1], field[1], 0.6, site)
    third = SpinSystem(matrix[2][kept][:, kept], field[2][kept], 0.7, site)
    ignoring = type(method)(on_failure="ignore")
    state, run = ignoring.steady_state(system), method.run(system, 3)
    close = {"rtol": 0, "atol": 1e-9}
    assert bool(state.magnetization[0].isnan().all() & run.magnetization[:, 0].isnan().all())
    assert state.converged.tolist() == [False, True, True]
    one, other = method.steady_state(second), method.steady_state(third)
    torch.testing.assert_close(state.magnetization[1], one.magnetization, **close)
    torch.testing.assert_close(state.magnetization[2][kept], other.magnetization, **close)
    for lag in (0, 1, 2):
        pairs = state.delayed_correlations(lag)[2]
        torch.testing.assert_close(pairs[kept][:, kept], other.delayed_correlations(lag), **close)
        assert bool((pairs[1] == 0).all() and (pairs[:, 1] == 0).all())
    torch.testing.assert_close(state.entropy_production[2], other.entropy_production, **close)
    torch.testing.assert_close(
        run.magnetization[:, 2][:, kept], method.run(third, 3).magnetization, **close
    )
    torch.testing.assert_close(
        run.entropy_flow[:, 2], method.run(third, 3).entropy_flow, rtol=0, atol=1e-8
    )


def test_other_kinds_of_couplings_and_float32() -> None:
    sparse = ring(5, strength=0.3, dtype=torch.float64)
    field = draw(5, 3)
    for method in (KineticMeanField(), KineticTAP()):
        left = method.steady_state(SpinSystem(sparse, field, 1.0, Sphere(3)))
        right = method.steady_state(SpinSystem(sparse.to_dense(), field, 1.0, Sphere(3)))
        torch.testing.assert_close(left.magnetization, right.magnetization)
        single = SpinSystem(sparse.to_dense().float(), field.float(), 1.0, Sphere(3))
        state, run = method.steady_state(single), method.run(single, 3)
        assert state.magnetization.dtype == run.entropy_flow.dtype == torch.float32
        torch.testing.assert_close(
            state.magnetization.double(), right.magnetization, rtol=0, atol=1e-4
        )


def test_strong_couplings_have_a_step_and_may_have_no_rest() -> None:
    """The equation of a step is solved however strong K is, as its reaction is solved for."""
    for site in (Ising(), Sphere(3), LargeDSphere(4)):
        run = KineticTAP().run(system_of(site, 40.0), 5, "random")
        assert float(run.magnetization.norm(dim=-1).max()) <= site.radius
    system = system_of(Ising(), 8.0)
    with pytest.raises(ConvergenceError, match="fixed-point"):
        KineticTAP(max_iterations=3).steady_state(system)
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        state = KineticTAP(max_iterations=3, on_failure="warn").steady_state(system)
    assert not bool(state.converged)
    with pytest.raises(ConvergenceError, match="step of KineticTAP"):
        KineticTAP(max_iterations=1).run(system, 2, "random")


def test_bad_input() -> None:
    system = system_of(Sphere(3), 0.3)
    with pytest.raises(TypeError, match="no option 'toleranz'"):
        KineticTAP(toleranz=1e-3)  # type: ignore[call-arg]
    for method in (KineticMeanField(), KineticTAP()):
        with pytest.raises(ValueError, match="initial='orderd'.*'ordered'"):
            method.run(system, 2, "orderd")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="length 5"):
            method.run(system, 2, torch.tensor([5.0, 0.0, 0.0], dtype=torch.float64))
        with pytest.raises(ValueError, match="must broadcast"):
            method.run(system, 2, torch.zeros(4, 3, dtype=torch.float64))
        with pytest.raises(ValueError, match="step=0: give 1 ... 2"):
            method.run(system, 2).correlations(0)
        with pytest.raises(ValueError, match=r"lag=1\.0"):
            method.steady_state(system).delayed_correlations(1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="initial holds NaN"):
            method.run(system, 2, torch.full((5, 3), torch.nan, dtype=torch.float64))
        other = method.run(system_of(Sphere(3), 0.3, num_spins=4), 2)
        with pytest.raises(ValueError, match=r"shape \(4, 3\): those of the systems"):
            method.run(system, 2, other)
    broken = system.replace(field=system.field * torch.nan, check_finite=False)
    for method in (KineticMeanField(), KineticTAP()):
        with pytest.raises(ConvergenceError, match="residual nan"):
            method.steady_state(broken)


@pytest.mark.parametrize("method", [KineticMeanField(), KineticTAP()])
def test_one_result_begins_the_runs_of_a_batch(method: KineticMeanField | KineticTAP) -> None:
    system = system_of(Ising(), 0.3)
    batch = system.replace(beta=torch.tensor([1.0, 0.5], dtype=torch.float64))
    for first in (method.run(system, 2), method.steady_state(system)):
        run, alone = method.run(batch, 3, first), method.run(system, 3, first)
        assert run.magnetization.shape == (4, 2, 5, 1)
        # Another batch shape, another order of sums.
        torch.testing.assert_close(run.magnetization[:, 0], alone.magnetization, rtol=0, atol=1e-14)
        assert not torch.allclose(run.magnetization[-1, 1], alone.magnetization[-1])
