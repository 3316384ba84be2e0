"""The face of a sampled equilibrium: identities, errors, derivatives, other temperatures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spinformer.equilibrium.exact import Exact
from spinformer.errors import ConvergenceWarning, NotSampledError
from spinformer.sampling import HeatBath, MonteCarlo
from spinformer.sampling.sampled import SampledEquilibrium
from spinformer.spins.couplings import Lattice, sherrington_kirkpatrick, square
from spinformer.spins.site import Gaussian, Ising, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem

F64 = torch.float64
LIMIT = 4.0


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def glass(n: int, seed: int = 0) -> Tensor:
    return sherrington_kirkpatrick(
        n, generator=torch.Generator().manual_seed(seed), dtype=F64
    ).to_dense()


def run(system: SpinSystem, **options: Any) -> SampledEquilibrium:
    options = {"chains": 128, "sweeps": 64, "seed": 1, "on_failure": "ignore"} | options
    return MonteCarlo(**options).solve(system)


@pytest.fixture(scope="module")
def ising() -> SampledEquilibrium:
    return run(SpinSystem(glass(6), 0.4 * normal(6, 1), 0.7, Ising()), sweeps=160, keep=80)


@pytest.fixture(scope="module")
def spheres() -> SampledEquilibrium:
    return run(SpinSystem(glass(5), 0.4 * normal(5, 3), 0.5, Sphere(3)), keep=64)


# -- identities that hold for every run, to rounding ----------------------------------------------


@pytest.mark.parametrize("conditional", [True, False])
@pytest.mark.parametrize("site", [Ising(), Sphere(2), Gaussian(2)], ids=repr)
def test_energy_of_the_measured_means(site: SiteLaw, conditional: bool) -> None:
    """U = -1/2 sum J C - h m of the same run, exactly."""
    system = SpinSystem(0.4 * glass(5), 0.3 * normal(5, site.dim), 0.6, site)
    sampled = run(system, chains=6, sweeps=50, conditional=conditional)
    pairs = (system.couplings.to_dense() * sampled.correlations()).sum() / 2
    alone = (system.field * sampled.magnetization).sum()
    torch.testing.assert_close(sampled.internal_energy, -pairs - alone)


def test_susceptibilities_are_one_another(spheres: SampledEquilibrium) -> None:
    chi = spheres.susceptibility()
    torch.testing.assert_close(chi, chi.permute(2, 3, 0, 1))
    vector = normal(5, 3, seed=4)
    product = torch.einsum("iajb,jb->ia", chi, vector)
    torch.testing.assert_close(spheres.susceptibility_product(vector), product)
    torch.testing.assert_close(spheres.local_susceptibility(), torch.einsum("iaib->iab", chi))
    # The trace of the components is the product of the spins.
    m = spheres.magnetization
    trace = torch.einsum("iaja->ij", chi) / 0.5 + m @ m.mT
    torch.testing.assert_close(trace, spheres.correlations())
    torch.testing.assert_close(spheres.correlations().diagonal(), torch.full((5,), 3.0, dtype=F64))
    assert torch.equal(spheres.correlations("coupling"), spheres.correlations())


def test_plain_uniform_susceptibility_is_the_sum_of_all_pairs() -> None:
    system = SpinSystem(glass(5), 0.4 * normal(5, 2), 0.5, Sphere(2))
    sampled = run(system, chains=4, conditional=False)
    total = sampled.susceptibility().sum((0, 2))
    torch.testing.assert_close(sampled.uniform_susceptibility(), total)
    moment = sampled.magnetization.sum(-2).square().sum(-1)
    square = sampled.correlations().sum()
    torch.testing.assert_close(sampled.order_ratio(), moment / square)


def test_scalars_from_the_series(ising: SampledEquilibrium) -> None:
    """By their definitions; Binder's cumulant of Ising spins is Binder's own."""
    moment, energy = ising.series["moment"][..., 0], ising.series["energy"]
    torch.testing.assert_close(ising.absolute_moment(), moment.abs().mean())
    torch.testing.assert_close(
        ising.absolute_susceptibility(), 0.7 * moment.abs().var(correction=0)
    )
    torch.testing.assert_close(
        ising.binder_cumulant(), 1 - moment.pow(4).mean() / (3 * moment.square().mean() ** 2)
    )
    torch.testing.assert_close(ising.specific_heat(), 0.7**2 * energy.var(correction=0))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_binder_cumulant_of_order_and_disorder(dim: int) -> None:
    """2 / (D + 2) of a moment of fixed length, and of n free spins 2 / (n (D + 2)):
    <|M|^4> / <|M|^2>^2 = (D + 2) / D - 2 / (n D)."""
    site: SiteLaw = Ising() if dim == 1 else Sphere(dim)
    ordered = run(
        SpinSystem(torch.ones(8, 8, dtype=F64), torch.zeros(8, dim, dtype=F64), 100.0, site),
        initial="ordered",
        sweeps=16,
    )
    torch.testing.assert_close(
        ordered.binder_cumulant(), torch.tensor(2 / (dim + 2), dtype=F64), atol=1e-2, rtol=0
    )
    free = run(SpinSystem(torch.zeros(8, 8, dtype=F64), torch.zeros(8, dim, dtype=F64), 1.0, site))
    z = (free.binder_cumulant() - 2 / (8 * (dim + 2))) / free.standard_error("binder_cumulant")
    assert abs(float(z)) < LIMIT


@pytest.mark.stochastic
def test_rotations() -> None:
    """Turned fields turn the answer: O(D) invariance of the law, within errors of two runs."""
    turn = torch.linalg.qr(normal(3, 3, seed=5)).Q
    couplings, field = glass(4), 0.6 * normal(4, 3)
    first = run(SpinSystem(couplings, field, 0.6, Sphere(3)))
    second = run(SpinSystem(couplings, field @ turn.mT, 0.6, Sphere(3)), seed=2)
    distance = first.magnetization @ turn.mT - second.magnetization
    # A turned error is at most the length of the error of all components.
    error = torch.hypot(
        first.standard_error("magnetization").norm(dim=-1, keepdim=True),
        second.standard_error("magnetization"),
    )
    assert float((distance / error).abs().max()) < LIMIT
    apart = first.correlations() - second.correlations()
    joint = torch.hypot(first.standard_error("correlations"), second.standard_error("correlations"))
    off = ~torch.eye(4, dtype=torch.bool)
    assert float((apart / joint)[off].abs().max()) < LIMIT


# -- structure factor -----------------------------------------------------------------------------


def test_structure_factor_by_three_routes() -> None:
    """Amplitudes of waves in the run, transform of the pairs, and a sum over positions."""
    lattice = Lattice((4, 3), (True, False), 0.5, dtype=F64)
    mask = torch.zeros(12, dtype=torch.bool)
    mask[5] = True
    system = SpinSystem(lattice, 0.3 * normal(12, 2), 0.6, Sphere(2), mask=mask)
    options = {"chains": 4, "sweeps": 32, "conditional": False}
    pairs = run(system, **options).structure_factor()
    waves = run(system, **options, structure_factor=True).structure_factor()
    assert pairs.shape == (4, 3)
    torch.testing.assert_close(waves, pairs)
    n = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(3), indexing="ij"), -1)
    momenta = 2 * torch.pi * n.reshape(12, 2) / torch.tensor([4.0, 3.0], dtype=F64)
    sampled = run(system, **options)
    torch.testing.assert_close(sampled.structure_factor(momenta).reshape(4, 3), pairs)
    positions = n.reshape(12, 2).to(F64)
    torch.testing.assert_close(
        sampled.structure_factor(momenta, positions), sampled.structure_factor(momenta)
    )
    # The sum rule: the mean over all waves is the square of a spin.
    torch.testing.assert_close(pairs.mean(), torch.tensor(2.0, dtype=F64))
    error = sampled.standard_error("structure_factor", momenta=momenta).reshape(4, 3)
    torch.testing.assert_close(sampled.standard_error("structure_factor"), error)
    assert bool((error > 0).all())


def test_structure_factor_of_free_spins_is_flat() -> None:
    system = SpinSystem(
        Lattice((4, 4), strength=0.0, dtype=F64), torch.zeros(16, 1, dtype=F64), 1.0, Ising()
    )
    sampled = run(system, conditional=False, structure_factor=True)
    z = (sampled.structure_factor() - 1) / sampled.standard_error("structure_factor")
    assert float(z.abs().max()) < LIMIT
    assert 0.3 < float(z.square().mean()) < 3


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize(
    "name", ["magnetization", "specific_heat", "binder_cumulant", "susceptibility", "correlations"]
)
def test_errors_are_the_scatter_of_runs(name: str) -> None:
    """Twenty systems of a batch are twenty runs of one: their scatter against their errors."""
    count = 20
    field = (0.3 * normal(4, 2)).expand(count, 4, 2)
    sampled = run(SpinSystem(glass(4), field, 0.7, Sphere(2)), chains=8, sweeps=160)
    value = getattr(sampled, name)
    value = (value if isinstance(value, Tensor) else value()).reshape(count, -1)
    error = sampled.standard_error(name).reshape(count, -1)
    free = value.std(0) > 1e-9
    ratio = (value.var(0) / error.square().mean(0))[free].mean()
    # Of one quantity the variance of twenty is known to sqrt(2 / 19) = 0.32; three of those.
    assert 0.35 < float(ratio) < 2.0


@pytest.mark.stochastic
def test_a_slow_mode_that_the_energy_hides() -> None:
    """In a weak field two valleys differ little in energy: tau of the energy is that of one valley,
    a hundredth of the time in which the moment turns over."""
    systems = 48
    field = torch.full((systems, 16, 1), 0.1, dtype=F64)
    system = SpinSystem(square(4, dtype=F64), field, 0.5, Ising())
    exact = Exact().solve(system.replace(field=field[0]))
    sampled = run(system, moves=HeatBath(), chains=8, sweeps=800)
    tau = sampled.diagnostics.tau
    assert float((tau["moment_along_field"] / tau["energy"]).median()) > 10
    assert not bool(sampled.converged.any())
    z = (sampled.internal_energy - exact.internal_energy) / sampled.standard_error(
        "internal_energy"
    )
    # Mean square of n normal numbers; five times as much without a look at the moment.
    assert float(z.square().mean()) < 1 + LIMIT * math.sqrt(2 / systems)
    moment = (sampled.moment - exact.magnetization.sum(-2)) / sampled.standard_error("moment")
    assert float(moment.square().mean()) < 1 + LIMIT * math.sqrt(2 / systems)


def test_standard_error_of_an_unknown_name(ising: SampledEquilibrium) -> None:
    with pytest.raises(ValueError, match="the nearest is 'magnetization'"):
        ising.standard_error("magnetisation")


def test_errors_of_products(ising: SampledEquilibrium) -> None:
    error = ising.standard_error("correlations", method="product")
    m, dm = ising.magnetization[:, 0], ising.standard_error("magnetization")[:, 0]
    assert bool((error.diagonal() == 0).all())
    # Independent errors of two factors, to a factor of their correlation and of the jackknife.
    plain = torch.hypot(m[:, None] * dm, dm[:, None] * m)
    off = ~torch.eye(6, dtype=torch.bool)
    ratio = (error / plain)[off]
    assert float(ratio.min()) > 0.4
    assert float(ratio.max()) < 1.8


# -- what a run does not know ---------------------------------------------------------------------


def test_free_energies_are_not_sampled(ising: SampledEquilibrium) -> None:
    for name in ("log_partition", "free_energy", "entropy", "free_energy_per_spin"):
        with pytest.raises(NotSampledError, match=r"ThermodynamicIntegration.*MultiHistogram"):
            getattr(ising, name)
    with pytest.raises(NotSampledError):
        ising.standard_error("free_energy")


def test_a_log_partition_of_another_method(ising: SampledEquilibrium) -> None:
    value, error = torch.tensor(1.25, dtype=F64), torch.tensor(0.02, dtype=F64)
    known = ising.with_log_partition(value, error)
    torch.testing.assert_close(known.free_energy, -value / 0.7)
    torch.testing.assert_close(known.entropy, 0.7 * ising.internal_energy + value)
    torch.testing.assert_close(known.standard_error("free_energy"), error / 0.7)
    energy = 0.7 * ising.standard_error("internal_energy")
    torch.testing.assert_close(known.standard_error("entropy"), torch.hypot(energy, error))


def test_pairs_that_were_not_measured() -> None:
    sampled = run(SpinSystem(glass(4), normal(4, 2), 0.5, Sphere(2)), chains=2, correlations=False)
    with pytest.raises(NotSampledError, match="correlations=True"):
        sampled.correlations()
    with pytest.raises(NotSampledError, match='correlations="components"'):
        sampled.susceptibility()
    with pytest.raises(NotSampledError, match="keep=1000"):
        sampled.susceptibility_product(torch.ones(4, 2, dtype=F64))
    with pytest.raises(ValueError, match="waves of a lattice"):
        sampled.structure_factor()
    assert sampled.correlations("product").shape == (4, 4)


def test_susceptibilities_from_kept_configurations(spheres: SampledEquilibrium) -> None:
    """Without all pairs of components: covariances of the configurations that were kept."""
    kept = run(spheres.system, keep=64, correlations=False)
    flat = kept.samples.flatten(0, 1).flatten(-2)
    chi = 0.5 * torch.cov(flat.mT, correction=0).reshape(5, 3, 5, 3)
    vector = normal(5, 3, seed=4)
    torch.testing.assert_close(
        kept.susceptibility_product(vector), torch.einsum("iajb,jb->ia", chi, vector)
    )
    torch.testing.assert_close(kept.local_susceptibility(), torch.einsum("iaib->iab", chi))
    columns = kept.susceptibility([1])
    torch.testing.assert_close(columns, chi[:, :, 1:2])


# -- other temperatures ---------------------------------------------------------------------------


@pytest.mark.stochastic
def test_reweighting(ising: SampledEquilibrium) -> None:
    here = ising.reweight(0.7)
    for name in ("specific_heat", "binder_cumulant", "absolute_moment"):
        torch.testing.assert_close(here.values[name], getattr(ising, name)())
    # Not the conditional mean, which knows its own temperature only.
    torch.testing.assert_close(here.values["internal_energy"], ising.series["energy"].mean())
    torch.testing.assert_close(here.effective_fraction, torch.tensor(1.0, dtype=F64))
    torch.testing.assert_close(
        here.values["log_partition_change"], torch.tensor(0.0, dtype=F64), atol=1e-12, rtol=0
    )
    exact = Exact().solve(ising.system)
    for beta in (0.5, 0.85):
        there = ising.reweight(beta)
        answer = Exact().solve(ising.system.replace(beta=beta))
        expected = {
            "internal_energy": answer.internal_energy,
            "specific_heat": answer.specific_heat(),
            "uniform_susceptibility": answer.uniform_susceptibility(),
            "log_partition_change": answer.log_partition - exact.log_partition,
        }
        assert 0.2 < float(there.effective_fraction) < 1
        for name, value in expected.items():
            z = (there.values[name] - value) / there.errors[name]
            assert float(z.abs().max()) < LIMIT, (beta, name, z)


def test_reweighting_too_far(spheres: SampledEquilibrium) -> None:
    with pytest.warns(ConvergenceWarning, match="MultiHistogram"):
        found = spheres.reweight(8.0)
    assert float(found.effective_fraction) < 0.05


# -- derivatives ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tracked() -> tuple[SampledEquilibrium, dict[str, Tensor]]:
    leaves = {
        "J": glass(4).requires_grad_(),
        "h": (0.4 * normal(4, 1)).requires_grad_(),
        "beta": torch.tensor(0.6, dtype=F64, requires_grad=True),
    }
    system = SpinSystem(leaves["J"], leaves["h"], leaves["beta"], Ising())
    return run(system, chains=256, sweeps=40), leaves


def test_gradients_do_not_change_values(
    tracked: tuple[SampledEquilibrium, dict[str, Tensor]],
) -> None:
    sampled, _ = tracked
    plain = run(SpinSystem(glass(4), 0.4 * normal(4, 1), 0.6, Ising()), chains=256, sweeps=40)
    assert not plain.tracks_gradients
    assert sampled.samples.shape[-3] == 40  # kept for the gradients, though nobody asked
    for name in ("magnetization", "internal_energy", "specific_heat", "correlations"):
        first, second = (getattr(run_, name) for run_ in (sampled, plain))
        first = first if isinstance(first, Tensor) else first()
        second = second if isinstance(second, Tensor) else second()
        assert first.requires_grad, name
        torch.testing.assert_close(first.detach(), second)


def test_response_of_the_magnetization_is_the_susceptibility(
    tracked: tuple[SampledEquilibrium, dict[str, Tensor]],
) -> None:
    """All configurations are kept: the two are the same covariance but for the estimator."""
    sampled, leaves = tracked
    rows = [
        torch.autograd.grad(sampled.magnetization[i, 0], leaves["h"], retain_graph=True)[0][:, 0]
        for i in range(4)
    ]
    chi = sampled.susceptibility().detach()[:, 0, :, 0]
    # The diagonal has a conditional estimator that knows better: that of all others is the scale.
    error = sampled.standard_error("susceptibility")[:, 0, :, 0]
    z = (torch.stack(rows) - chi) / error.amax()
    assert float(z.abs().max()) < LIMIT


@pytest.mark.stochastic
def test_gradients_against_exact_ones(
    tracked: tuple[SampledEquilibrium, dict[str, Tensor]],
) -> None:
    """Errors of derivatives: their scatter over eight parts of the kept chains."""
    sampled, leaves = tracked
    exact = Exact().solve(SpinSystem(leaves["J"], leaves["h"], leaves["beta"], Ising()))
    inputs = list(leaves.values())

    def gradients(equilibrium: Any) -> list[Tensor]:
        mean = (equilibrium.magnetization * normal(4, 1, seed=7)).sum()
        found = []
        for value in (mean, equilibrium.internal_energy):
            parts = torch.autograd.grad(value, inputs, retain_graph=True, allow_unused=True)
            j, h, beta = (0.0 * x if g is None else g for g, x in zip(parts, inputs, strict=True))
            found += [(j + j.mT).triu(1), h, beta]
        return found

    parts = []
    for part in sampled.samples.chunk(8):
        record = sampled.record.__class__(**(vars(sampled.record) | {"samples": part}))
        parts.append(
            gradients(
                SampledEquilibrium(sampled.system, sampled._observables, record, sampled.broken)
            )
        )
    for k, (mine, theirs) in enumerate(zip(gradients(sampled), gradients(exact), strict=True)):
        scatter = torch.stack([part[k] for part in parts]).std(0) / 8**0.5
        z = torch.where(scatter > 0, (mine - theirs) / scatter, 0.0)
        # Student's t of seven degrees of freedom: 5.4 is as rare as four of a normal variate.
        assert float(z.abs().max()) < 5.4, (k, z)
    # dU/dbeta = -C / beta^2, also by the sampled specific heat, and a second derivative.
    (slope,) = torch.autograd.grad(
        sampled.internal_energy, leaves["beta"], create_graph=True, retain_graph=True
    )
    heat = sampled.specific_heat()
    error = sampled.standard_error("specific_heat")
    assert bool((-(slope * 0.36) - heat).abs() < LIMIT * error)
    (curvature,) = torch.autograd.grad(slope, leaves["beta"], retain_graph=True)
    (once,) = torch.autograd.grad(exact.internal_energy, leaves["beta"], create_graph=True)
    (twice,) = torch.autograd.grad(once, leaves["beta"])
    # Third moments of 10^4 configurations: sigma^3 sqrt(15 / 10^4) is a tenth of a sigma^3.
    spread = (heat.detach() / 0.36) ** 1.5
    assert bool((curvature - twice).abs() < 0.2 * spread)


def test_without_gradients_nothing_is_kept() -> None:
    system = SpinSystem(glass(4).requires_grad_(), normal(4, 1), 0.6, Ising())
    with torch.no_grad():
        sampled = run(system, chains=2, sweeps=16)
    assert sampled.samples.shape[-3] == 0
    assert not sampled.magnetization.requires_grad


def test_gradients_asked_for_but_not_kept() -> None:
    system = SpinSystem(glass(4).requires_grad_(), normal(4, 1), 0.6, Ising())
    with pytest.raises(ValueError, match="keep=0"):
        run(system, chains=2, sweeps=16, keep=0)
