"""The study of fidelity: its truth is the truth, and its errors are unbiased by the noise of it."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import simulations.fidelity as study
import spinformer as sf
from simulations import maps
from simulations.maps import Averages, Errors, Sampling
from simulations.study import parser_of
from spinformer.dynamics.exact_chain import ExactDynamics

F64 = torch.float64


def run(out: Path, *words: str) -> int:
    words = ("--quick", "--out", str(out), *words)
    return study.STUDY.run(parser_of(study.STUDY).parse_args(words))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", [0.0, 0.5])
def test_noise_does_not_bias_a_squared_distance(distance: float) -> None:
    """2000 trials of 6 noisy estimates of 8 components: plain squares are off by 40 sigma."""
    trials, chains, components = 2000, 6, 8
    noise = torch.randn(chains, trials, components, generator=generator(), dtype=F64)
    value = torch.zeros(trials, components, dtype=F64)
    value[:, 0] = distance
    found, error = maps.squared_distance(value, noise, 1)
    spread = float(found.std()) / math.sqrt(trials)
    assert abs(float(found.mean()) - distance**2) < 4 * spread
    plain = (value - noise.mean(0)).square().sum(-1)
    assert float(plain.mean()) - distance**2 > 20 * spread
    # A jackknife is never too small on average. It is right where the distance is much larger than
    # the noise; of a distance of zero its square is 2 (C - 1) / (C - 2) times too large, 2.5 here,
    # and the ratio of two variances of 2000 trials is known to some 5 %.
    ratio = float(error.square().mean() / found.var())
    assert 1 < ratio < 2.5 * 1.2
    if distance == 0:
        assert ratio > 2.5 / 1.2
    far, error = maps.squared_distance(value + 20, noise, 1)
    assert float(error.square().mean()) == pytest.approx(float(far.var()), rel=0.1)


def test_a_distance_of_exact_estimates_is_the_distance() -> None:
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=F64)
    truth = torch.tensor([[1.0, 0.0], [0.0, 4.0]], dtype=F64)
    found, error = maps.squared_distance(value, truth.expand(4, 2, 2), 1)
    assert found.tolist() == [4.0, 9.0]
    assert error.tolist() == [0.0, 0.0]
    both, _ = maps.squared_distance(value, truth.expand(4, 2, 2), 2)
    assert both.tolist() == 13.0


def test_a_jackknife_needs_three() -> None:
    with pytest.raises(ValueError, match="2 independent estimates"):
        maps.squared_distance(torch.zeros(3), torch.zeros(2, 3), 1)


def test_connected_pairs_hold_no_variance_of_the_means() -> None:
    """Independent chains of one random vector each: <S.S> - m.m is its covariance, not half."""
    chains, systems, dim = 4, 4000, 2
    # One observation a chain: the mean is the spin itself.
    spins = torch.randn(chains, systems, 2, dim, generator=generator(), dtype=F64)
    averages = Averages(spins, spins @ spins.mT, torch.zeros(chains, systems, 4, dtype=F64))
    connected = averages.connected().mean(0)
    own = connected.diagonal(dim1=-2, dim2=-1).flatten()
    assert abs(float(own.mean()) - dim) < 4 * float(own.std()) / math.sqrt(len(own))
    other = connected[:, 0, 1]
    assert abs(float(other.mean())) < 4 * float(other.std()) / math.sqrt(systems)


def test_what_is_not_known_has_no_error() -> None:
    """A truth that noise hides, a value that was not solved, and one that is."""
    noise = torch.randn(8, 3, 5, generator=generator(), dtype=F64)
    truth = torch.tensor([[0.0], [50.0], [50.0]], dtype=F64)
    solved = torch.tensor([True, False, True])
    errors = maps.relative_errors(torch.full((3, 5), 60.0, dtype=F64), truth + noise, solved, 1)
    assert np.isnan(errors.squared).tolist() == [True, True, False]
    assert errors.seen.tolist() == [False, False, True]
    # Ten of fifty; the noise of the truth is 1 / sqrt(8) of each of five components.
    assert errors.size[2] == pytest.approx(0.2, rel=4 * 0.35 / 10 / math.sqrt(5) * 1.2)
    assert errors.bound[2] > errors.size[2]


def test_chains_that_disagree_are_seen() -> None:
    series = torch.randn(6, 2, 400, generator=generator(), dtype=F64)
    series[0, 1] += 5
    together, apart = maps.split_r_hat(series)
    assert together < 1.03
    assert apart > 1.5


# --- the truth ----------------------------------------------------------------------------------


def small(dim: int, family: str = "glass") -> sf.SpinSystem:
    return study.plane(family, dim, 5, (0.4, 0.9, 1.4), (0.3, 1.0), 0)


def chi_square(samples: Tensor, exact: Tensor) -> float:
    """Mean over entries of t^2, t from the scatter of C independent chains.

    t is Student's with C - 1 degrees of freedom, whose square has the mean (C - 1) / (C - 3).
    """
    error = samples.std(0) / math.sqrt(len(samples))
    kept = error > 1e-6  # in float32, an entry that cannot change scatters by rounding
    t = ((samples.mean(0) - exact) / error)[kept]
    return float(t.square().mean()) / ((len(samples) - 1) / (len(samples) - 3))


# Entries of one system hang together, so that this mean scatters: 0.2 to 2.1 over six seeds. A mean
# that is off by two standard errors adds 4 to it.
_CHAINS, _LOW, _HIGH = 18, 0.1, 3.0


@pytest.mark.stochastic
def test_equilibrium_is_sampled() -> None:
    """Five Ising spins by enumeration: magnetizations, pairs and the integrated free energy."""
    system = small(1)
    exact = sf.Exact().solve(system)
    truth = maps.sample_equilibrium(system, Sampling(_CHAINS, 400, 50), seed=1)
    assert _LOW < chi_square(truth.magnetization, exact.magnetization) < _HIGH
    others = ~torch.eye(5, dtype=torch.bool)
    product = exact.magnetization @ exact.magnetization.mT
    pairs = (truth.pairs + truth.pairs.mT) / 2
    assert _LOW < chi_square(pairs * others, exact.correlations() * others) < _HIGH
    connected = (truth.connected() + truth.connected().mT) / 2 * others
    assert _LOW < chi_square(connected, (exact.correlations() - product) * others) < _HIGH
    assert bool((truth.scatter() < 1.05).all())


@pytest.mark.stochastic
def test_parallel_dynamics_is_sampled() -> None:
    """Five Ising spins of asymmetric couplings, by their exact Markov chain."""
    system = small(1, "softmax")
    truth = maps.sample_steady(system, Sampling(_CHAINS, 1000, 50), seed=1)
    exact = ExactDynamics().steady_state(system)
    assert _LOW < chi_square(truth.magnetization, exact.magnetization) < _HIGH
    assert _LOW < chi_square(truth.pairs, exact.delayed_correlations(1)) < _HIGH
    connected = exact.delayed_correlations(1, connected=True)
    assert _LOW < chi_square(truth.connected(), connected) < _HIGH


def test_free_energies_are_integrals_along_a_row() -> None:
    """With exact integrands, to the error that is claimed and to 1e-3 of the couplings' part."""
    coupling = torch.tensor(np.geomspace(0.1, 2.5, 10))
    system = study.plane("glass", 1, 6, coupling.tolist(), (0.3, 1.0), 0)
    exact = sf.Exact().solve(system)
    beta = system.beta[..., None, None]
    free = system.site.log_partition(beta * system.field).sum(-1)
    interaction = -exact.internal_energy - (system.field * exact.magnetization).sum((-2, -1))
    series = interaction.expand(3, *interaction.shape)[..., None].expand(3, -1, -1, 4)
    truth = Averages(torch.zeros(3), torch.zeros(3), series)
    logs, floor = study.interaction_logs(system, truth, coupling)
    expected = exact.log_partition - free
    error = (logs[0] - expected).abs()
    assert bool((error <= floor + 1e-6).all())
    assert float((error / expected.abs()).max()) < 1e-3
    assert torch.equal(logs[0], logs[2])


# --- what mean field says, and the plane --------------------------------------------------------


@pytest.mark.parametrize("dim", [2, 3])
def test_mean_field_fluctuations_are_its_linear_response(dim: int) -> None:
    """Woodbury's N squared numbers against the inverse of (N D) squared."""
    system = small(dim)
    answer = sf.MeanField(damping=0.5, max_iterations=5000).solve(system)
    m = answer.magnetization
    expected = answer.correlations() - m @ m.mT
    found = maps.mean_field_fluctuations(system, m)
    others = ~torch.eye(5, dtype=torch.bool)
    # The solution's own residual, 1e-10, times a response of at most some hundred.
    torch.testing.assert_close(found * others, expected * others, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("family", list(maps.FAMILIES))
def test_points_of_the_plane_are_where_they_say(family: str) -> None:
    coupling, field = (0.2, 1.0, 2.0), (0.1, 3.0)
    system = study.plane(family, 4, 12, coupling, field, 3)
    expected = torch.tensor(coupling, dtype=F64)[:, None].expand(3, 2)
    torch.testing.assert_close(maps.coupling_strength(system), expected)
    expected = torch.tensor(field, dtype=F64).expand(3, 2)
    torch.testing.assert_close(maps.field_strength(system), expected)
    assert system.couplings.is_symmetric == (family != "softmax")


def test_blocks_of_couplings_have_the_strength_of_scalars() -> None:
    """J_ij 1 as matrices: the same K and the same k, by other ways of computing them."""
    system = small(3, "softmax")
    blocks = torch.einsum("ij,ab->ijab", system.couplings.to_dense(), torch.eye(3, dtype=F64))
    matrices = system.replace(couplings=blocks)
    torch.testing.assert_close(maps.coupling_strength(matrices), maps.coupling_strength(system))
    m = system.site.mean(system.beta[..., None, None] * system.field)
    torch.testing.assert_close(maps.loop_strength(matrices, m), maps.loop_strength(system, m))


def test_free_spins_are_as_near_to_ordering_as_their_coupling() -> None:
    """Without a field the response is one; the rule's prediction is k^2 / (1 - K) below one."""
    system = study.plane("glass", 4, 12, (0.2, 1.5), (0.1,), 3)
    m = torch.zeros_like(system.field)
    near = maps.nearness(system, m)
    torch.testing.assert_close(near, maps.coupling_strength(system))
    made = dataclasses.replace(
        panel(np.ones((2, 1))),
        loop=maps.loop_strength(system, m).numpy(),
        nearness=near.numpy(),
    )
    k = float(maps.loop_strength(system, m)[0, 0])
    assert made.predicted[0, 0] == pytest.approx(k**2 / 0.8)
    assert np.isnan(made.predicted[1, 0])


def test_loop_strength_of_free_spins() -> None:
    """k^2 = sum_j (beta J_ij)^2 without a field; polarized spins have no echo, absent ones none."""
    couplings = torch.tensor([[0, 1, 2], [1, 0, 0], [2, 0, 0]], dtype=F64)
    system = sf.SpinSystem(couplings, torch.zeros(3, 4, dtype=F64), 0.5, sf.Sphere(4))
    m = torch.zeros(3, 4, dtype=F64)
    assert float(maps.loop_strength(system, m)) == pytest.approx(0.5 * math.sqrt(10 / 3))
    m[:, 0] = 2.0
    assert float(maps.loop_strength(system, m)) == 0.0
    absent = system.replace(mask=torch.tensor([False, False, True]))
    assert float(maps.loop_strength(absent, 0 * m)) == pytest.approx(0.5 * math.sqrt(2 / 2))


# --- the rule and the command -------------------------------------------------------------------


def panel(size: np.ndarray, noise: float = 1e-9) -> study.Panel:
    k = np.geomspace(0.01, 1.0, size.size).reshape(size.shape)
    flags = np.ones(size.shape, dtype=bool)
    errors = Errors(size**2, np.full(size.shape, noise), flags)
    axes = [np.geomspace(0.1, 1, n) for n in size.shape]
    return study.Panel(
        "glass", 3, *axes, flags, k, 0 * k, size, {"magnetization": {"mean_field": errors}}
    )


def test_the_rule_finds_a_law() -> None:
    k = np.geomspace(0.01, 1.0, 20).reshape(5, 4)
    rule = study.loop_rule(panel(0.5 * k**2), "magnetization", "mean_field")
    assert rule["power"] == pytest.approx(2, abs=1e-6)
    assert rule["factor"] == pytest.approx(0.5, rel=1e-6)
    below = k[0.5 * k**2 <= 0.01].max()
    assert rule["at_1"] == pytest.approx(below)
    assert rule["reached_1"] == 0.0
    # One percent is not reached at all by what is smaller everywhere.
    rule = study.loop_rule(panel(0.001 * k), "magnetization", "mean_field")
    assert rule["at_1"] == pytest.approx(1.0)
    assert rule["reached_1"] == 1.0


def test_checks_compare_an_error_with_what_is_known_of_it() -> None:
    k = np.geomspace(0.01, 1.0, 20).reshape(5, 4)
    checks = study.self_checks(panel(0.5 * k**2))
    assert checks["predicted"]["median"] == pytest.approx(0.5)
    assert checks["gap"] == pytest.approx({"tenth": 1, "median": 1, "ninetieth": 1})


def test_the_rule_counts_failures_and_skips_what_noise_hides() -> None:
    k = np.geomspace(0.01, 1.0, 20).reshape(5, 4)
    failed = panel(0.001 * k)
    errors = failed.errors["magnetization"]["mean_field"]
    unsolved = dataclasses.replace(errors, solved=k < 0.1)
    failed.errors["magnetization"]["mean_field"] = unsolved
    rule = study.loop_rule(failed, "magnetization", "mean_field")
    # Up to 5 % of the cells may be above: none of the first eleven.
    assert rule["at_1"] == pytest.approx(k[k < 0.1].max())
    # Errors of 0.1 % in noise of 5 %: nothing is known of 1 %, but all of 30 %.
    rule = study.loop_rule(panel(0.001 * k, noise=0.05**2), "magnetization", "mean_field")
    assert rule["at_1"] is None
    assert rule["at_10"] == pytest.approx(1.0)


def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dataclasses.replace(
        study.QUICK,
        coupling=(0.2, 0.6, 1.6),
        field=(0.4, 1.5),
        dims=(2,),
        num_spins=6,
        sampling=lambda dim: Sampling(6, 60, 20),
        steady=lambda dim: Sampling(6, 100, 20),
    )
    monkeypatch.setattr(study, "QUICK", plan)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny(monkeypatch)
    assert run(tmp_path) == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [(p["family"], p["dim"]) for p in results["panels"]] == [("glass", 2), ("softmax", 2)]
    names = set(results["panels"][0]["methods"])
    assert names == {"mean_field", "tap", "adaptive_tap", "sd0", "sd1"}
    stored = np.load(tmp_path / "maps.npz")
    assert stored["glass/D2/magnetization/tap/squared"].shape == (3, 2)
    for name in (
        "glass_magnetization",
        "glass_correlations",
        "glass_free_energy",
        "parallel",
        "prediction",
    ):
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000, name
    printed = capsys.readouterr().out
    assert "adaptive TAP" in printed
    assert "kinetic TAP" in printed
    assert "$" not in printed


def test_an_interrupted_study_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(monkeypatch)

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "steady_state", stop)
    assert run(tmp_path) == 130
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["interrupted"]
    assert [p["family"] for p in results["panels"]] == ["glass"]
    assert (tmp_path / "glass_magnetization.png").is_file()
