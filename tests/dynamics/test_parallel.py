"""Sampled parallel dynamics against exact laws, and what a long run asks for."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from spinformer import ConvergenceError, ConvergenceWarning, Exact
from spinformer.dynamics import (
    ExactDynamics,
    KineticTAP,
    ParallelDynamics,
    SampledSteadyState,
    SampledTransient,
    triangle_wave,
)
from spinformer.spins.couplings import LowRank, ring
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem

DATA = Path(__file__).parents[1] / "data" / "parallel.json"


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def system_of(site: SiteLaw, batch: tuple[int, ...] = (), num_spins: int = 4) -> SpinSystem:
    matrix = draw(*batch, num_spins, num_spins, seed=1) / num_spins
    return SpinSystem(matrix, draw(*batch, num_spins, site.dim, seed=2), 0.7, site)


def worst(value: Tensor, exact: Tensor, error: Tensor) -> float:
    """Largest z-score; what has no error must be right to rounding."""
    known = error < 1e-12
    torch.testing.assert_close(value[known], exact[known], rtol=0, atol=1e-12)
    return float(((value - exact) / error)[~known].abs().max())


# -- exact laws ----------------------------------------------------------------------------------


@pytest.mark.stochastic
def test_ising_spins_against_the_exact_chain() -> None:
    """Symmetric, where the law is Peretto's, and asymmetric couplings in one batch."""
    i = torch.arange(1, 5, dtype=torch.float64)
    matrix = torch.stack([torch.cos(i[:, None] * i) / 4, torch.sin(i[:, None] + 2 * i) / 2])
    system = SpinSystem(matrix, 0.5 * torch.sin(i)[:, None], 1.0, Ising())
    exact = ExactDynamics().steady_state(system)
    state = ParallelDynamics(chains=64, steps=4000, lags=(1, 2, 3), seed=3).steady_state(system)
    error = state.standard_error("magnetization")
    assert worst(state.magnetization, exact.magnetization, error) < 4
    for lag in (0, 1, 2, 3):
        for connected in (False, True):
            found, expected = (
                s.delayed_correlations(lag, connected=connected) for s in (state, exact)
            )
            error = state.standard_error("delayed_correlations", lag, connected=connected)
            assert worst(found, expected, error) < 4
    # The law of Gibbs is another one, and far off in these errors.
    gibbs = Exact().solve(SpinSystem(matrix[0], system.field[0], 1.0, Ising())).magnetization
    z = (state.magnetization[0] - gibbs) / state.standard_error("magnetization")[0]
    assert float(z.abs().max()) > 8
    assert float((exact.magnetization[0] - gibbs).abs().max()) > 5e-3


@pytest.mark.stochastic
@pytest.mark.parametrize("site", [Sphere(3, 1.0), LargeDSphere(3, 1.0)], ids=repr)
def test_pair_of_vectors_against_quadrature(site: SiteLaw) -> None:
    """Spins of the closed form at large D are drawn from the sphere's own law."""
    (record,) = (r for r in json.loads(DATA.read_text()) if r["name"] == "parallel_o3_pair")
    params, value = record["params"], record["value"]
    matrix = torch.tensor([[0.0, params["J"]], [params["J"], 0.0]], dtype=torch.float64)
    field = torch.tensor(params["h"], dtype=torch.float64)
    system = SpinSystem(matrix, field, float(params["beta"]), site)
    state = ParallelDynamics(chains=64, steps=500, seed=4).steady_state(system)
    expected = torch.tensor(value["m"], dtype=torch.float64)
    assert worst(state.magnetization, expected, state.standard_error("magnetization")) < 4
    z = (state.correlations()[0, 1] - value["S1S2"]) / state.standard_error("correlations")[0, 1]
    assert abs(float(z)) < 4
    torch.testing.assert_close(
        state.correlations().diagonal(), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.stochastic
def test_errors_are_those_of_repeated_runs() -> None:
    """z-scores of 40 independent runs have variance one: within 4 of its own errors."""
    system = system_of(Ising())
    exact = ExactDynamics().steady_state(system)
    pairs = torch.ones(4, 4).triu(1).bool()
    scores = []
    for seed in range(40):
        state = ParallelDynamics(chains=32, steps=32, seed=seed, on_failure="ignore").steady_state(
            system
        )
        m = (state.magnetization - exact.magnetization) / state.standard_error("magnetization")
        d = (state.correlations(connected=True) - exact.correlations(connected=True)) / (
            state.standard_error("correlations", connected=True)
        )
        scores.append(torch.cat([m[:, 0], d[pairs]]))
    z = torch.stack(scores)
    # 10 quantities of one run are correlated: the error of the variance is that over runs.
    per_run = z.square().mean(1)
    assert abs(float(per_run.mean()) - 1) < 4 * float(per_run.std()) / 40**0.5
    assert float(per_run.std()) / 40**0.5 < 0.15


@pytest.mark.stochastic
def test_transient_against_the_exact_chain() -> None:
    system = system_of(Ising())
    schedule = torch.tensor([1.0, 1.0, -2.0, -2.0])[:, None, None] * system.field
    start = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)[:, None]
    exact = ExactDynamics().run(system, 4, start, field=schedule)
    run = ParallelDynamics(chains=512, seed=5).run(system, 4, start, field=schedule)
    # The first step from one configuration is known without an error.
    assert worst(run.magnetization, exact.magnetization, run.standard_error("magnetization")) < 4
    assert worst(run.moment, exact.moment, run.standard_error("moment")) < 4
    assert worst(run.entropy_flow, exact.entropy_flow, run.standard_error("entropy_flow")) < 4
    torch.testing.assert_close(run.fields, schedule)
    torch.testing.assert_close(run.magnetization[0], start)


@pytest.mark.stochastic
def test_weak_couplings_of_vectors_are_those_of_kinetic_tap() -> None:
    """Its error is of third order: below that of this run at a coupling of 0.05."""
    matrix, field = draw(6, 6, seed=1) * 0.05, draw(6, 16, seed=2)
    system = SpinSystem(matrix, field, 0.5, Sphere(16))
    tap = KineticTAP().steady_state(system)
    state = ParallelDynamics(chains=64, steps=200, seed=6).steady_state(system)
    assert worst(state.magnetization, tap.magnetization, state.standard_error("magnetization")) < 4
    for lag in (0, 1):
        error = state.standard_error("delayed_correlations", lag, connected=True)
        found, expected = (s.delayed_correlations(lag, connected=True) for s in (state, tap))
        assert worst(found, expected, error) < 4
    z = state.entropy_production - tap.entropy_production
    assert abs(float(z / state.standard_error("entropy_production"))) < 4


# -- hysteresis ------------------------------------------------------------------------------------


def test_hysteresis_loop_of_a_ferromagnet() -> None:
    """Slow in the field's own time and still behind it: the loop has an area, and closes."""
    n = 32
    matrix = torch.full((n, n), 2.0 / n, dtype=torch.float64)
    system = SpinSystem(matrix, torch.zeros(n, 1, dtype=torch.float64), 1.0, Ising())
    wave = triangle_wave(torch.full((n, 1), 1.5, dtype=torch.float64), 40, 3)
    run = ParallelDynamics(chains=32).run(system, 120, "ordered", field=wave)
    moment = run.moment[1:, 0] / n
    cycle, previous = moment[-40:], moment[-80:-40]
    assert float((cycle - previous).abs().max()) < 0.2  # 32 chains of 32 spins
    # At no field the moment is what it was: up on the way down, down on the way up.
    down, up = 10, 30
    assert float(wave[down].abs().max()) == float(wave[up].abs().max()) == 0
    assert float(cycle[down]) > 0.6 and float(cycle[up]) < -0.6
    area = float(run.work[-40:].sum())
    # Coercive field times remanence, over the two flanks.
    assert area / n > 1
    free = SpinSystem(0 * matrix, system.field, 1.0, Ising())
    reversible = ParallelDynamics(chains=32).run(free, 120, "ordered", field=wave)
    # Without couplings a step lags behind by nothing: the work is that of the last field's moment.
    assert abs(float(reversible.work[-40:].sum())) / n < 0.3 * area / n


def test_triangle_wave() -> None:
    wave = triangle_wave(torch.tensor([2.0]), 4, 2)[:, 0]
    assert wave.tolist() == [2, 0, -2, 0, 2, 0, -2, 0]
    with pytest.raises(ValueError, match="period=3"):
        triangle_wave(torch.tensor([2.0]), 3)
    with pytest.raises(ValueError, match="cycles=0"):
        triangle_wave(torch.tensor([2.0]), 4, 0)


# -- chains --------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", [Ising(), Sphere(3), Sphere(5), Gaussian(2, 0.5)], ids=repr)
def test_a_chain_of_a_batch_is_that_chain_alone(site: SiteLaw) -> None:
    system = system_of(site, (2,))
    run = ParallelDynamics(chains=3, seed=7).run(system, 5)
    keys = run.streams.keys[2, 1]
    alone = ParallelDynamics(chains=1, seed=keys).run(
        SpinSystem(system.couplings.to_dense()[1], system.field[1], 0.7, site), 5
    )
    torch.testing.assert_close(alone.spins[0], run.spins[2, 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("site", [Ising(), Sphere(5)], ids=repr)
def test_carried_state_goes_on_bit_by_bit(site: SiteLaw) -> None:
    system = system_of(site, (2,))
    dynamics = ParallelDynamics(chains=3, seed=8)
    whole = dynamics.run(system, 7, "ordered")
    first = dynamics.run(system, 3, "ordered")
    second = dynamics.run(system, 4, first)
    assert torch.equal(second.spins, whole.spins)
    assert torch.equal(second.moments[1:], whole.moments[4:])
    # Once more from the same result: it was not used up.
    assert torch.equal(dynamics.run(system, 4, first).spins, whole.spins)
    assert second.sweeps == whole.sweeps == 7
    with pytest.raises(ValueError, match="take chains=3"):
        ParallelDynamics(chains=4).run(system, 2, first)


def test_steady_state_goes_on_without_warming_up() -> None:
    system = system_of(Ising())
    options = {"chains": 32, "warmup": 0, "lags": (1, 3), "on_failure": "ignore"}
    first = ParallelDynamics(steps=40, **options).steady_state(system)  # type: ignore[arg-type]
    second = ParallelDynamics(steps=40, **options).steady_state(system, first)  # type: ignore[arg-type]
    # Two steps each are spent before the first delay of three can be measured.
    assert (first.sweeps, second.sweeps) == (42, 84)
    assert second.series["moment"].shape == (32, 1, 40)
    assert not torch.equal(first.magnetization, second.magnetization)


def test_few_chains_are_cut_into_parts() -> None:
    system = system_of(Ising())
    exact = ExactDynamics().steady_state(system).magnetization
    state = ParallelDynamics(chains=1, steps=3200, every=3, seed=1).steady_state(system)
    error = state.standard_error("magnetization")
    assert worst(state.magnetization, exact, error) < 4
    many = ParallelDynamics(chains=64, steps=50, seed=1).steady_state(system)
    ratio = error / many.standard_error("magnetization")
    assert 0.5 < float(ratio.min()) < float(ratio.max()) < 2


@pytest.mark.parametrize("site", [Ising(), Sphere(3), Gaussian(2, 0.5)], ids=repr)
def test_masks_and_a_broken_system(site: SiteLaw) -> None:
    system = system_of(site, (2,), num_spins=5)
    matrix = system.couplings.to_dense().clone()
    mask = torch.tensor([[False] * 5, [False, True, False, False, True]])
    kept = (~mask[1]).nonzero()[:, 0]
    matrix[0, 2, 1], matrix[1, 1] = torch.nan, torch.nan
    both = SpinSystem(matrix, system.field, 0.7, site, mask=mask, check_finite=False)
    dynamics = ParallelDynamics(chains=64, steps=200, seed=9, on_failure="ignore")
    state, run = dynamics.steady_state(both), dynamics.run(both, 3)
    assert bool(state.magnetization[0].isnan().all() and run.magnetization[:, 0].isnan().all())
    for tensor in (state.magnetization[1], state.standard_error("magnetization")[1]):
        assert bool((tensor[mask[1]] == 0).all() and (tensor[kept] != 0).all())
    pairs = state.correlations()[1]
    assert bool((pairs[mask[1]] == 0).all() and (pairs[:, mask[1]] == 0).all())
    if site.radius is not None:
        torch.testing.assert_close(
            pairs.diagonal()[kept], torch.full((3,), site.radius**2, dtype=torch.float64)
        )
    cut = SpinSystem(matrix[1][kept][:, kept], system.field[1, kept], 0.7, site)
    other = dynamics.steady_state(cut)
    error = (
        state.standard_error("magnetization")[1, kept].square()
        + other.standard_error("magnetization").square()
    ).sqrt()
    assert worst(state.magnetization[1, kept], other.magnetization, error) < 4


@pytest.mark.parametrize(
    "couplings",
    [
        ring(6, strength=0.5, dtype=torch.float64),
        LowRank(draw(6, 2, seed=1), draw(6, 2, seed=2)),
        draw(6, 6, 3, 3, seed=3) / 4,
    ],
    ids=["ring", "low rank", "matrix-valued"],
)
def test_any_couplings(couplings: Tensor) -> None:
    system = SpinSystem(couplings, draw(6, 3), 0.5, Sphere(3))
    dynamics = ParallelDynamics(chains=4, steps=40, seed=1, on_failure="ignore")
    run = dynamics.run(system, 3)
    torch.testing.assert_close(run.spins.norm(dim=-1), torch.full((4, 6), 3**0.5).double())
    dense = system.couplings.to_dense()
    if dense.ndim == 2:
        same = dynamics.run(SpinSystem(dense, system.field, 0.5, Sphere(3)), 3)
        torch.testing.assert_close(run.spins, same.spins, rtol=0, atol=1e-10)
    state = dynamics.steady_state(system)
    assert (float(state.entropy_production) == 0) == system.couplings.is_symmetric


@pytest.mark.parametrize("ending", [".npz", ".h5"])
def test_saved_results_are_loaded_with_all_they_know(tmp_path: Path, ending: str) -> None:
    if ending == ".h5":
        pytest.importorskip("h5py")
    matrix = draw(2, 4, 4).float() / 4
    matrix[0, 0, 1] = torch.nan
    mask = torch.tensor([[False] * 4, [False, False, True, False]])
    system = SpinSystem(matrix, draw(4, 3).float(), 0.5, Sphere(3), mask=mask, check_finite=False)
    dynamics = ParallelDynamics(chains=4, steps=64, lags=(2,), on_failure="ignore")
    state = dynamics.steady_state(system)
    assert state.magnetization.dtype == torch.float32
    path = tmp_path / f"state{ending}"
    state.save(path)
    loaded = SampledSteadyState.load(path)
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    for of in (
        lambda s: s.magnetization,
        lambda s: s.delayed_correlations(2, connected=True),
        lambda s: s.standard_error("correlations", connected=True),
        lambda s: s.standard_error("entropy_production"),
        lambda s: s.series["moment"],
        lambda s: s.system.field,
        # The same random numbers and the same couplings.
        lambda s: dynamics.steady_state(s.system, s).magnetization,
    ):
        torch.testing.assert_close(of(loaded), of(state), **same)
    assert loaded.lags == state.lags and loaded.sweeps == state.sweeps

    run = dynamics.run([system, system.replace(beta=1.0)], 2, field=draw(2, 4, 3).float())
    run.save(path)
    again = SampledTransient.load(path)
    for of in (
        lambda s: s.magnetization,
        lambda s: s.entropy_flow,
        lambda s: s.work,
        lambda s: s.standard_error("magnetization"),
        lambda s: s.standard_error("moment"),
        lambda s: s.protocol[1][0].beta,
        lambda s: dynamics.run(system, 2, s).moment,
    ):
        torch.testing.assert_close(of(again), of(run), **same)
    with pytest.raises(ValueError, match="holds a sampled transient: SampledSteadyState.load"):
        SampledSteadyState.load(path)
    with pytest.raises(ValueError, match=r"must end in \.npz"):
        run.save(tmp_path / "run.txt")


def test_saved_averages_are_there_for_other_programs(tmp_path: Path) -> None:
    state = ParallelDynamics(chains=32, steps=64, on_failure="ignore").steady_state(
        system_of(Ising())
    )
    state.save(tmp_path / "state.npz")
    with numpy.load(tmp_path / "state.npz") as file:
        numpy.testing.assert_array_equal(file["magnetization"], state.magnetization)
        numpy.testing.assert_array_equal(
            file["delayed_correlations_1_error"], state.standard_error("delayed_correlations")
        )


# -- long runs -------------------------------------------------------------------------------------


def _pressing(step: int) -> Callable[[int, int], None]:
    """A real Ctrl-C after that step."""

    def press(done: int, total: int) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGINT)

    return press


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_keeps_what_was_measured() -> None:
    system = system_of(Ising())
    options = {"chains": 8, "warmup": 10, "on_failure": "ignore"}
    with pytest.warns(ConvergenceWarning, match="interrupted after 40 of 80 steps"):
        part = ParallelDynamics(steps=80, progress=_pressing(50), **options).steady_state(system)  # type: ignore[arg-type]
    # Half of the four parts of each chain.
    whole = ParallelDynamics(steps=40, **options).steady_state(system)  # type: ignore[arg-type]
    assert torch.equal(part.series["moment"], whole.series["moment"])
    torch.testing.assert_close(part.magnetization, whole.magnetization, rtol=0, atol=1e-14)
    assert bool((part.standard_error("magnetization") > 0).all())
    assert torch.equal(part.spins, whole.spins)
    with pytest.raises(KeyboardInterrupt):
        ParallelDynamics(steps=80, progress=_pressing(20), **options).steady_state(system)  # type: ignore[arg-type]
    with pytest.warns(ConvergenceWarning, match="interrupted after 3 of 9 steps"):
        run = ParallelDynamics(chains=8, progress=_pressing(3)).run([system] * 9, 9)
    short = ParallelDynamics(chains=8).run(system, 3)
    assert torch.equal(run.magnetization, short.magnetization)
    assert run.fields.shape == short.fields.shape and run.work.shape == (2,)


def test_progress() -> None:
    system = system_of(Ising())
    told: list[tuple[int, int]] = []
    dynamics = ParallelDynamics(
        chains=32, steps=16, warmup=4, on_failure="ignore", progress=lambda *n: told.append(n)
    )
    dynamics.steady_state(system)
    assert told == [(n, 20) for n in range(1, 21)]
    told.clear()
    dynamics.run(system, 3)
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_diagnostics_and_short_runs() -> None:
    # A ferromagnet that needs some ten steps to leave its order, which 512 chains see.
    matrix = torch.full((24, 24), 1.0 / 24, dtype=torch.float64)
    slow = SpinSystem(matrix, torch.zeros(24, 1, dtype=torch.float64), 1.0, Ising())
    short = {"chains": 512, "steps": 40, "warmup": 0}
    with pytest.warns(ConvergenceWarning, match="of 1 systems.*too short.*in 1 "):
        ParallelDynamics(**short).steady_state(slow, "ordered")  # type: ignore[arg-type]
    with pytest.raises(ConvergenceError, match="still drifts in 1"):
        ParallelDynamics(on_failure="raise", **short).steady_state(slow, "ordered")  # type: ignore[arg-type]
    state = ParallelDynamics(chains=32, steps=400, on_failure="raise").steady_state(
        system_of(Sphere(3))
    )
    found = state.diagnostics
    assert found["tau"].shape == (3,) and bool(found["equilibrated"].all())
    assert float(found["r_hat"].max()) < 1.05 and float(found["ess"].min()) > 1000


def test_bad_input() -> None:
    system = system_of(Ising())
    for options in ({"chains": 0}, {"steps": 3}, {"warmup": -1}, {"every": 0}):
        with pytest.raises(ValueError, match="must be an integer >="):
            ParallelDynamics(**options)
    with pytest.raises(ValueError, match="lag=-1"):
        ParallelDynamics(lags=(-1,))
    with pytest.raises(ValueError, match="errors need 32 measurements"):
        ParallelDynamics(chains=1, steps=20)
    with pytest.raises(TypeError, match="no option 'chain'.*'chains'"):
        ParallelDynamics(chain=3)  # type: ignore[call-arg]
    dynamics = ParallelDynamics(chains=32, steps=16, on_failure="ignore")
    with pytest.raises(ValueError, match="initial='orderd'.*'ordered'"):
        dynamics.run(system, 2, "orderd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps=0"):
        dynamics.run(system, 0)
    state = dynamics.steady_state(system)
    with pytest.raises(ValueError, match="lag=2 was not measured"):
        state.delayed_correlations(2)
    with pytest.raises(ValueError, match="quantity='moment'"):
        state.standard_error("moment")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name='energy'"):
        state.estimate("energy")
    matrix = torch.tensor([[0.0, 2.0], [-2.0, 0.0]], dtype=torch.float64)
    wild = SpinSystem(matrix, torch.zeros(2, 1, dtype=torch.float64), 1.0, Gaussian(1))
    with pytest.raises(ValueError, match="spectral radius below 1"):
        dynamics.steady_state(wild)
    dynamics = ParallelDynamics(chains=32, steps=16, correlations=False, on_failure="ignore")
    state = dynamics.steady_state(system)
    with pytest.raises(ValueError, match="lag=0 was not measured"):
        state.correlations()
