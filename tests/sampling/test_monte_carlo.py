"""Runs against exact solutions, and that a run is what it says: repeatable, resumable, loud."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spinformer.equilibrium.exact import Exact
from spinformer.errors import ConvergenceError, ConvergenceWarning
from spinformer.sampling import HeatBath, Metropolis, MonteCarlo, OverRelaxation
from spinformer.sampling.sampled import SampledEquilibrium
from spinformer.spins.couplings import (
    CurieWeiss,
    LowRank,
    MatrixValued,
    chain,
    cubic,
    ring,
    sherrington_kirkpatrick,
    square,
)
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem
from spinformer.thermo.equilibrium import Equilibrium

DATA = Path(__file__).parents[1] / "data"
F64 = torch.float64
LIMIT = 4.0


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def glass(n: int, seed: int = 0) -> Tensor:
    return sherrington_kirkpatrick(
        n, generator=torch.Generator().manual_seed(seed), dtype=F64
    ).to_dense()


def run(system: SpinSystem, **options: Any) -> SampledEquilibrium:
    return MonteCarlo(**{"chains": 256, "sweeps": 80, "seed": 1} | options).solve(system)


def of(equilibrium: Equilibrium, name: str) -> Tensor:
    value = getattr(equilibrium, name)
    return value if isinstance(value, Tensor) else value()


def z_score(sampled: SampledEquilibrium, name: str, exact: Tensor) -> Tensor:
    """Zero where a quantity is fixed, as the square of a spin on a sphere, to rounding."""
    distance = of(sampled, name) - exact
    error = sampled.standard_error(name)
    fixed = distance.abs() <= 1e-12 * exact.abs().amax().clamp_min(1)
    return torch.where(fixed, 0.0, distance / error)


SYSTEMS: dict[str, Callable[[], SpinSystem]] = {
    "ising glass in fields": lambda: SpinSystem(glass(8), 0.4 * normal(8, 1), 0.7, Ising()),
    "ring of spheres": lambda: SpinSystem(
        ring(6, dtype=F64), torch.zeros(6, 3, dtype=F64), 0.5, Sphere(3)
    ),
    "chain of circles": lambda: SpinSystem(
        chain(4, strength=-1.0, dtype=F64), torch.zeros(4, 2, dtype=F64), 0.6, Sphere(2)
    ),
    "pair in fields": lambda: SpinSystem(
        torch.tensor([[0.0, 0.6], [0.6, 0.0]], dtype=F64), normal(2, 3), 0.8, Sphere(3, radius=1.2)
    ),
    "one spin in a field": lambda: SpinSystem(
        torch.zeros(1, 1, dtype=F64), normal(1, 5), 0.7, Sphere(5)
    ),
    "gaussian": lambda: SpinSystem(glass(6), 0.4 * normal(6, 2), 0.4, Gaussian(2, variance=0.8)),
    "masked batch": lambda: SpinSystem(
        torch.stack([glass(6, seed) for seed in range(3)]),
        0.4 * normal(3, 6, 1),
        torch.tensor([0.3, 0.6, 0.9], dtype=F64),
        Ising(),
        mask=torch.tensor([[False] * 6, [True] + [False] * 5, [False, True] * 3]),
    ),
}
OBSERVABLES = (
    "magnetization",
    "internal_energy",
    "specific_heat",
    "correlations",
    "susceptibility",
    "local_susceptibility",
    "uniform_susceptibility",
    "internal_energy_per_spin",
    "specific_heat_per_spin",
)


@pytest.mark.stochastic
@pytest.mark.parametrize(
    ("name", "conditional"),
    [*((name, True) for name in SYSTEMS), ("pair in fields", False), ("masked batch", False)],
)
def test_every_observable_of_exact_systems(name: str, conditional: bool) -> None:
    system = SYSTEMS[name]()
    sampled = run(system, conditional=conditional)
    assert bool(sampled.converged.all()), sampled.diagnostics
    exact = Exact().solve(system)
    for quantity in OBSERVABLES:
        z = z_score(sampled, quantity, of(exact, quantity))
        assert float(z.abs().max()) < LIMIT, (quantity, z)
        # Errors that are far too large would pass, too: z-scores have mean square one.
        if z.numel() >= 30:
            assert float(z[z != 0].square().mean()) > 0.1, quantity


@pytest.mark.stochastic
def test_reference_records() -> None:
    """Two spheres in fields that are not parallel."""
    records = json.loads((DATA / "two_spins.json").read_text())
    for record in (r for r in records if r["name"] == "two_spin_nonparallel"):
        parameters, value = record["params"], record["value"]
        dim = parameters["D"]
        if parameters["R"] != "sqrt(D)" or dim > 4 or parameters["beta"] == 0.5:
            continue
        amplitude = float(parameters["h_formula"].split("=")[1].split("*")[0])
        i = torch.arange(1, 3, dtype=F64)[:, None]
        a = torch.arange(1, dim + 1, dtype=F64)
        field = amplitude * torch.cos(i * a + i) / math.sqrt(dim)
        bond = parameters["J"] * torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
        sampled = run(SpinSystem(bond, field, parameters["beta"], Sphere(dim)))
        for name, exact in (
            ("magnetization", value["m"]),
            ("internal_energy", value["U"]),
        ):
            z = z_score(sampled, name, torch.tensor(exact, dtype=F64))
            assert float(z.abs().max()) < LIMIT, (record["params"], name, z)
        z = z_score(sampled, "correlations", torch.tensor(value["S1S2"], dtype=F64))[0, 1]
        assert abs(float(z)) < LIMIT, record["params"]


@pytest.mark.stochastic
@pytest.mark.parametrize(
    "site", [Ising(), Sphere(3), LargeDSphere(4), Gaussian(2)], ids=lambda site: type(site).__name__
)
def test_conditional_means_agree_with_plain_ones_and_have_smaller_errors(site: SiteLaw) -> None:
    system = SpinSystem(0.5 * glass(8), 0.3 * normal(8, site.dim), 0.6, site)
    plain = run(system, conditional=False)
    smooth = run(system, conditional=True)
    # The same chains, so that the difference is that of the estimators alone.
    assert torch.equal(plain.series["energy"], smooth.series["energy"])
    for name in ("magnetization", "internal_energy", "correlations", "susceptibility"):
        distance = of(plain, name) - of(smooth, name)
        joint = plain.standard_error(name) + smooth.standard_error(name)
        assert bool((distance.abs() <= LIMIT * joint + 1e-12).all()), name
    for name in ("magnetization", "internal_energy"):
        ratio = smooth.standard_error(name) / plain.standard_error(name)
        assert float(ratio.mean()) < 0.9, (name, ratio)


@pytest.mark.stochastic
@pytest.mark.parametrize(
    "couplings",
    [
        CurieWeiss(8, 1.5, dtype=F64),
        LowRank(normal(8, 2) / 3),
        cubic(2, periodic=False, dtype=F64),
        MatrixValued(0.3 * (normal(8, 8, 1, 1) + normal(8, 8, 1, 1).transpose(0, 1)), check=True),
    ],
    ids=lambda couplings: type(couplings).__name__,
)
def test_kinds_of_couplings(couplings: Any) -> None:
    """Each as its own matrix: the same run, and the exact answer of that."""
    field = 0.3 * normal(8, 1)
    dense = couplings.to_dense().reshape(8, 8)
    sampled = run(SpinSystem(couplings, field, 0.2, Ising()))
    exact = Exact().solve(SpinSystem(dense, field, 0.2, Ising()))
    for name in ("magnetization", "internal_energy", "correlations"):
        assert float(z_score(sampled, name, of(exact, name)).abs().max()) < LIMIT, name


def test_magnetization_of_the_large_d_law_is_that_of_the_sphere_it_samples() -> None:
    """Conditional means are those of what is drawn, not of the closed form."""
    field = torch.ones(1, 4, dtype=F64)
    sampled = run(SpinSystem(torch.zeros(1, 1, dtype=F64), field, 1.0, LargeDSphere(4)))
    torch.testing.assert_close(sampled.magnetization, Sphere(4).mean(field))


# -- one chain, one system, one run ---------------------------------------------------------------


def test_chain_of_a_run_is_that_chain_alone() -> None:
    system = SpinSystem(glass(6), 0.3 * normal(6, 3), 0.8, Sphere(3))
    moves = [HeatBath(), OverRelaxation(), Metropolis()]
    together = MonteCarlo(moves, chains=5, sweeps=40, seed=3, on_failure="ignore").solve(system)
    for k in (0, 3):
        alone = MonteCarlo(
            moves, chains=1, sweeps=40, seed=together.keys[k : k + 1], on_failure="ignore"
        ).solve(system)
        for name, series in together.series.items():
            torch.testing.assert_close(alone.series[name][0], series[k], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            alone.magnetization, together.record.means["spin"].chain_means[k]
        )


def test_system_of_a_batch_is_that_system_alone() -> None:
    couplings = torch.stack([glass(6, seed) for seed in range(3)])
    field, beta = 0.3 * normal(3, 6, 2), torch.tensor([0.3, 0.7, 1.5], dtype=F64)
    options = {"chains": 16, "sweeps": 32, "on_failure": "ignore"}
    batch = run(SpinSystem(couplings, field, beta, Sphere(2)), **options)
    for b in range(3):
        system = SpinSystem(couplings[b], field[b], beta[b], Sphere(2))
        alone = run(system, seed=batch.keys[:, b], **options)
        for name in OBSERVABLES:
            torch.testing.assert_close(of(alone, name), of(batch, name)[b])
            torch.testing.assert_close(alone.standard_error(name), batch.standard_error(name)[b])
        torch.testing.assert_close(
            alone.diagnostics.tau["energy"], batch.diagnostics.tau["energy"][b]
        )


def test_seeds() -> None:
    system = SpinSystem(glass(4), torch.zeros(4, 1, dtype=F64), 0.5, Ising())

    def energies(seed: Any) -> Tensor:
        return run(system, sweeps=20, seed=seed, on_failure="ignore").series["energy"]

    assert torch.equal(energies(5), energies(5))
    assert not torch.equal(energies(5), energies(6))
    generator = torch.Generator().manual_seed(9)
    first = energies(generator)
    assert not torch.equal(first, energies(generator))
    assert torch.equal(first, energies(torch.Generator().manual_seed(9)))


def test_broken_systems_stay_alone() -> None:
    couplings = torch.stack([glass(5, seed) for seed in range(3)])
    field = 0.3 * normal(3, 5, 2)
    broken = field.clone()
    broken[1, 2, 0] = torch.nan
    sound = run(SpinSystem(couplings, field, 0.5, Sphere(2)))
    mixed = run(SpinSystem(couplings, broken, 0.5, Sphere(2), check_finite=False))
    for name in OBSERVABLES:
        value, error = of(mixed, name), mixed.standard_error(name)
        assert bool(value[1].isnan().all()), name
        assert bool(error[1].isnan().all()), name
        torch.testing.assert_close(value[[0, 2]], of(sound, name)[[0, 2]])
        torch.testing.assert_close(error[[0, 2]], sound.standard_error(name)[[0, 2]])
    assert mixed.converged.tolist() == [True, False, True]
    assert mixed.structure_factor is not None
    assert bool(mixed.binder_cumulant()[1].isnan())


def test_absent_sites_leave_no_trace() -> None:
    mask = torch.tensor([False, True, False, False, True])
    couplings, field = glass(5), 0.3 * normal(5, 3)
    filled = torch.where(mask[:, None], torch.nan, field)
    sampled = run(SpinSystem(couplings, filled, 0.6, Sphere(3), mask=mask), keep=2)
    again = run(SpinSystem(couplings, field, 0.6, Sphere(3), mask=mask), keep=2)
    assert torch.equal(sampled.magnetization, again.magnetization)
    assert bool((sampled.magnetization[mask] == 0).all())
    assert bool((sampled.samples[..., mask, :] == 0).all())
    assert bool((sampled.correlations()[mask] == 0).all())
    assert bool((sampled.susceptibility()[mask] == 0).all())
    assert bool((sampled.standard_error("susceptibility")[mask] == 0).all())
    kept = ~mask
    small = SpinSystem(couplings[kept][:, kept], field[kept], 0.6, Sphere(3))
    joint = run(small).standard_error("magnetization")
    distance = run(small).magnetization - sampled.magnetization[kept]
    assert bool((distance.abs() < LIMIT * 1.5 * joint).all())


def test_float32_is_sampled_as_such_and_added_up_in_float64() -> None:
    system = SpinSystem(glass(8).float(), 0.4 * normal(8, 3).float(), 0.5, Sphere(3))
    sampled = run(system)
    for name in OBSERVABLES:
        assert of(sampled, name).dtype == torch.float32, name
        assert sampled.standard_error(name).dtype == torch.float32, name
    assert sampled.series["energy"].dtype == F64
    double = run(SpinSystem(glass(8), 0.4 * normal(8, 3), 0.5, Sphere(3)))
    error = sampled.standard_error("internal_energy") + double.standard_error("internal_energy")
    assert abs(sampled.internal_energy - double.internal_energy) < LIMIT * error


@pytest.mark.parametrize("site", [Ising(), Sphere(3), Gaussian(2)], ids=repr)
def test_no_spin_and_one(site: SiteLaw) -> None:
    """The least systems there are, in batches of none and alone."""
    for batch, n in (((), 0), ((), 1), ((0,), 2), ((2,), 0)):
        field = torch.ones(*batch, n, site.dim, dtype=F64)
        sampled = run(SpinSystem(torch.zeros(n, n, dtype=F64), field, 0.5, site), chains=3)
        for name in OBSERVABLES:
            value, error = of(sampled, name), sampled.standard_error(name)
            assert value.shape == error.shape, name
            assert bool(value.isfinite().all()), name
            assert bool(error.isfinite().all()), name
    # What is given by nothing but its own field is known without error.
    sampled = run(SpinSystem(torch.zeros(1, 1, dtype=F64), field.new_ones(1, site.dim), 0.5, site))
    assert bool((sampled.standard_error("magnetization") < 1e-14).all())


def test_large_lattices_keep_no_pairs() -> None:
    system = SpinSystem(cubic(10, dtype=F64), torch.zeros(1000, 1, dtype=F64), 0.1, Ising())
    sampled = run(system, chains=4, sweeps=32, on_failure="ignore")
    assert set(sampled.record.means) == {"spin"}
    assert "smooth_energy" not in sampled.series
    assert sampled.samples.shape == (4, 0, 1000, 1)


def test_samples_are_kept_evenly() -> None:
    system = SpinSystem(glass(4), torch.zeros(4, 2, dtype=F64), 0.5, Sphere(2))
    sampled = run(system, chains=3, sweeps=40, keep=5, on_failure="ignore")
    assert sampled.samples.shape == (3, 5, 4, 2)
    kept = sampled.system.energy(sampled.samples)
    torch.testing.assert_close(kept, sampled.series["energy"][:, 7::8])


def test_measurements_are_every_so_many_sweeps() -> None:
    system = SpinSystem(glass(4), torch.zeros(4, 2, dtype=F64), 0.5, Sphere(2))
    fine = run(system, sweeps=96, warmup=10, on_failure="ignore")
    coarse = run(system, sweeps=96, warmup=10, every=3, on_failure="ignore")
    assert torch.equal(coarse.series["energy"], fine.series["energy"][..., 2::3])
    assert int(coarse.solution.iterations) == 96


def test_initial_spins() -> None:
    """A frozen system shows where it started."""
    system = SpinSystem(ring(6, dtype=F64), torch.zeros(6, 1, dtype=F64), 50.0, Ising())
    options = {"chains": 2, "sweeps": 16, "warmup": 0, "on_failure": "ignore"}
    up = run(system, initial="ordered", **options)
    assert bool((up.magnetization == 1).all())
    down = MonteCarlo(**options).solve(system, initial=-torch.ones(6, 1, dtype=F64))
    assert bool((down.series["moment"] == -6).all())


# -- evidence -------------------------------------------------------------------------------------


def test_a_run_too_short_warns_and_names_what_to_raise() -> None:
    slow = SpinSystem(ring(64, dtype=F64), torch.zeros(64, 1, dtype=F64), 1.5, Ising())
    options = {"chains": 4, "sweeps": 200, "warmup": 0}
    with pytest.warns(ConvergenceWarning, match="raise sweeps to"):
        sampled = run(slow, **options)
    assert not bool(sampled.converged)
    with pytest.raises(ConvergenceError, match="autocorrelation time"):
        run(slow, **options, on_failure="raise")
    told: list[str] = []
    run(slow, **options, on_failure=told.append)
    assert len(told) == 1


def test_chains_in_two_valleys_are_noticed() -> None:
    """Two wells of different energy, and a field between them too weak to cross."""
    couplings = torch.ones(16, 16, dtype=F64)
    system = SpinSystem(couplings, torch.full((16, 1), 0.5, dtype=F64), 2.0, Ising())
    start = torch.ones(4, 16, 1, dtype=F64)
    start[:2] = -1
    with pytest.warns(ConvergenceWarning, match="ParallelTempering"):
        sampled = MonteCarlo(sweeps=100).solve(system, initial=start)
    assert float(sampled.solution.residual) > 0.05


def test_chains_in_mirror_valleys_know_the_length_of_the_moment_only() -> None:
    """A ferromagnet deep in order, without a field: local moves never turn it."""
    system = SpinSystem(square(6, dtype=F64), torch.zeros(36, 1, dtype=F64), 0.7, Ising())
    start = torch.ones(4, 36, 1, dtype=F64)
    start[:2] = -1
    sampled = MonteCarlo(sweeps=300, seed=1).solve(system, initial=start)
    assert bool(sampled.converged)
    order = sampled.absolute_moment() / 36
    assert 0.98 < float(order) < 1
    assert float(sampled.standard_error("absolute_moment")) / 36 < 0.01
    # Of four values +-1 that add up to zero the mean has the error (4 / 3)^(1/2) / 2 = 0.58, times
    # that of Student's t of three degrees of freedom, up to sqrt(3).
    error = sampled.standard_error("magnetization")
    assert bool(((error > 0.55) & (error < 1.0)).all())
    assert float(sampled.diagnostics.r_hat["moment"]) > 2
    assert bool((sampled.standard_error("susceptibility") > 0.3 * 0.7).all())


def test_a_drift_is_noticed() -> None:
    """A cold ferromagnet in a weak field, started from free spins without warming up."""
    system = SpinSystem(
        0.1 * torch.ones(10, 10, dtype=F64), torch.full((10, 3), 0.02, dtype=F64), 3.0, Sphere(3)
    )
    with pytest.warns(ConvergenceWarning, match="raise warmup"):
        MonteCarlo([Metropolis(cap=0.03)], sweeps=200, warmup=0).solve(system)


def test_diagnostics_of_a_long_run() -> None:
    sampled = run(SYSTEMS["ising glass in fields"]())
    found = sampled.diagnostics
    assert bool(found.passed)
    total = 256 * 80
    for name in ("energy", "absolute_moment", "moment"):
        worth = total / (2 * found.tau[name])
        torch.testing.assert_close(found.effective_samples[name], worth)
        assert 0.98 < float(found.r_hat[name]) < 1.05
    assert "R-hat" in repr(found)
    every = run(SYSTEMS["ising glass in fields"](), every=3)
    # In sweeps, whatever the distance of measurements: above its half by what they don't see.
    assert float(every.diagnostics.tau["energy"]) < 3 * float(found.tau["energy"])


# -- Ctrl-C, checkpoints --------------------------------------------------------------------------

RESUMED = {
    "chains": 3,
    "sweeps": 64,
    "warmup": 24,
    "every": 2,
    "keep": 5,
    "on_failure": "ignore",
    "moves": [HeatBath(), OverRelaxation(), Metropolis()],
}


def stopping(after: int) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    return tell


def same(first: SampledEquilibrium, second: SampledEquilibrium) -> None:
    assert first.series.keys() == second.series.keys()
    for name, series in first.series.items():
        assert torch.equal(series, second.series[name]), name
    for name, mean in first.record.means.items():
        assert torch.equal(mean.mean, second.record.means[name].mean), name
        assert torch.equal(mean.bins, second.record.means[name].bins), name
    assert torch.equal(first.samples, second.samples)
    assert torch.equal(first.keys, second.keys)
    assert first.record.reports.keys() == second.record.reports.keys()
    for name, value in first.record.reports.items():
        assert torch.equal(value, second.record.reports[name]), name


@pytest.mark.parametrize(("after", "ending"), [(10, "npz"), (24, "h5"), (40, "npz"), (70, "npz")])
def test_a_resumed_run_is_bit_equal(tmp_path: Path, after: int, ending: str) -> None:
    """Stopped in warming up, at its end, before and after there are enough measurements."""
    if ending == "h5":
        pytest.importorskip("h5py")
    system = SpinSystem(glass(5), 0.3 * normal(5, 3), 0.8, Sphere(3))
    whole = MonteCarlo(**RESUMED).solve(system)
    path = tmp_path / f"run.{ending}"
    options = RESUMED | {"checkpoint": path}
    if after < 24 + 2 * 16:
        with pytest.raises(KeyboardInterrupt):
            MonteCarlo(**options, progress=stopping(after)).solve(system)
    else:
        with pytest.warns(ConvergenceWarning, match="interrupted"):
            part = MonteCarlo(**options, progress=stopping(after)).solve(system)
        assert part.record.interrupted
        measured = part.num_measurements
        assert measured == (after - 24) // 2
        assert torch.equal(part.series["energy"], whole.series["energy"][:, :measured])
    same(MonteCarlo(**options).solve(system), whole)
    # Finished: nothing is left to do.
    calls: list[int] = []
    same(
        MonteCarlo(**options, progress=lambda done, total: calls.append(done)).solve(system), whole
    )
    assert calls == []


def test_checkpoints_are_written_now_and_then(tmp_path: Path) -> None:
    system = SpinSystem(glass(5), 0.3 * normal(5, 3), 0.8, Sphere(3))
    path = tmp_path / "run.npz"
    seen: list[bool] = []

    class CrashError(Exception):
        pass

    def crash(done: int, total: int) -> None:
        seen.append(path.exists())
        if done >= 60:
            raise CrashError

    options = RESUMED | {"checkpoint": path}
    with pytest.raises(CrashError):
        MonteCarlo(**options, checkpoint_every=0.0, progress=crash).solve(system)
    assert seen[0] is False
    assert all(seen[1:])
    same(MonteCarlo(**options).solve(system), MonteCarlo(**RESUMED).solve(system))
    assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]


@pytest.mark.parametrize("change", ["sweeps", "seed", "field", "moves", "initial"])
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, change: str) -> None:
    system = SpinSystem(glass(5), 0.3 * normal(5, 3), 0.8, Sphere(3))
    options: dict[str, Any] = RESUMED | {"checkpoint": tmp_path / "run.npz"}
    MonteCarlo(**options).solve(system)
    message = "its system, seed or initial spins differ"
    if change == "field":
        system = system.replace(field=system.field + 1e-12)
    elif change == "moves":
        options, message = options | {"moves": HeatBath()}, "moves"
    elif change == "sweeps":
        options, message = options | {"sweeps": 66}, "sweeps 64 there, 66 here"
    elif change == "seed":
        options = options | {"seed": 7}
    else:
        options, message = options | {"initial": "ordered"}, "initial 'random' there"
    with pytest.raises(ValueError, match="is of another run") as caught:
        MonteCarlo(**options).solve(system)
    assert message in str(caught.value)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_run_after_its_sweep(tmp_path: Path) -> None:
    """A real signal, which would otherwise stop in the middle of a sweep."""
    system = SpinSystem(glass(5), 0.3 * normal(5, 3), 0.8, Sphere(3))

    def press(done: int, total: int) -> None:
        if done == 80:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    options = RESUMED | {"checkpoint": tmp_path / "run.npz"}
    with pytest.warns(ConvergenceWarning, match=r"interrupted after 28 of 32 .* goes on from"):
        part = MonteCarlo(**options, progress=press).solve(system)
    assert signal.getsignal(signal.SIGINT) is before
    assert part.num_measurements == 28
    assert bool(part.standard_error("internal_energy") > 0)
    same(MonteCarlo(**options).solve(system), MonteCarlo(**RESUMED).solve(system))


def test_ctrl_c_with_next_to_nothing_measured_is_raised() -> None:
    system = SpinSystem(glass(5), 0.3 * normal(5, 3), 0.8, Sphere(3))
    with pytest.raises(KeyboardInterrupt):
        MonteCarlo(**RESUMED, progress=stopping(30)).solve(system)


def test_progress() -> None:
    system = SpinSystem(glass(5), 0.3 * normal(5, 3), 0.8, Sphere(3))
    told: list[tuple[int, int]] = []
    MonteCarlo(**RESUMED, progress=lambda *numbers: told.append(numbers)).solve(system)
    assert told[-1] == (88, 88)
    done = [number for number, _ in told]
    assert done == sorted(done)


def test_progress_bar_tells_the_rate_of_spin_updates(capsys: pytest.CaptureFixture[str]) -> None:
    system = SpinSystem(glass(5), 0.3 * normal(5, 3), 0.8, Sphere(3))
    MonteCarlo(**RESUMED, progress=True).solve(system)
    # 88 sweeps of 3 chains of 5 spins.
    assert "1.32k/1.32k" in (text := capsys.readouterr().err)
    assert "spin/s" in text


# -- errors ---------------------------------------------------------------------------------------


def test_asymmetric_couplings_are_sent_to_their_dynamics() -> None:
    system = SpinSystem(normal(4, 4), torch.zeros(4, 1, dtype=F64), 0.5, Ising())
    with pytest.raises(ValueError, match="ParallelDynamics"):
        MonteCarlo().solve(system)


def test_gaussian_spins_that_do_not_exist() -> None:
    system = SpinSystem(ring(6, dtype=F64), torch.zeros(6, 1, dtype=F64), 0.6, Gaussian(1))
    with pytest.raises(ValueError, match="largest eigenvalue is 1.2"):
        MonteCarlo().solve(system)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chains": 0}, ValueError, "chains=0"),
        ({"sweeps": 15}, ValueError, "sweeps=15"),
        ({"sweeps": 40, "every": 5}, ValueError, "80 or more"),
        ({"warmup": -1}, ValueError, "warmup=-1"),
        ({"keep": True}, ValueError, "keep=True"),
        ({"moves": []}, ValueError, "moves is empty"),
        ({"moves": [HeatBath]}, TypeError, "pass a Move"),
        ({"moves": HeatBath}, TypeError, "pass a Move"),
        ({"correlations": "component"}, ValueError, "'components'"),
        ({"sweep": 100}, TypeError, "the nearest is 'sweeps'"),
        ({"on_failure": "warm"}, ValueError, "the nearest is 'warn'"),
        ({"checkpoint": "run.txt"}, ValueError, ".npz"),
        ({"checkpoint_every": -1.0}, ValueError, "checkpoint_every"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MonteCarlo(**options)


def test_checkpoint_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """What would fail when the run ends fails before it begins."""
    swept: list[int] = []
    with pytest.raises(FileNotFoundError, match="the folder .*nowhere"):
        MonteCarlo(
            sweeps=16,
            checkpoint=tmp_path / "nowhere" / "run.npz",
            progress=lambda done, _: swept.append(done),
        ).solve(SYSTEMS["one spin in a field"]())
    assert not swept


def test_structure_factor_needs_a_lattice() -> None:
    with pytest.raises(ValueError, match="waves of a lattice"):
        run(SYSTEMS["gaussian"](), structure_factor=True)
