"""Errors of correlated series, against autoregressive processes whose every moment is known.

AR(1), x_t = phi x_{t-1} + noise, has rho(t) = phi^t, so that tau = (1 + phi) / (1 - phi) / 2.
"""

import math

import pytest
import torch
from torch import Tensor

from spinformer.thermo.statistics import (
    BinnedMean,
    autocorrelation_time,
    bin_means,
    binning,
    combined_error,
    effective_sample_size,
    equilibration,
    estimate,
    jackknife,
    split_r_hat,
)


def autoregressive(phi: float, *shape: int, seed: int = 0) -> Tensor:
    """Stationary series of variance one, time last."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*shape, dtype=torch.float64, generator=generator)
    series = torch.empty_like(noise)
    series[..., 0] = noise[..., 0]
    for t in range(1, shape[-1]):
        series[..., t] = phi * series[..., t - 1] + math.sqrt(1 - phi**2) * noise[..., t]
    return series


def decay(tau: float) -> float:
    """The phi of an AR(1) process with this autocorrelation time."""
    return (2 * tau - 1) / (2 * tau + 1)


def variance_of_mean(phi: float, steps: int) -> float:
    """Exact: (1 + 2 sum_t (1 - t/T) phi^t) / T."""
    return (1 + 2 * sum((1 - t / steps) * phi**t for t in range(1, steps))) / steps


# -- autocorrelation time -----------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize("phi", [-0.3, 0.0, 0.6, 0.9])
def test_the_autocorrelation_time_of_autoregressive_series(phi: float) -> None:
    found = autocorrelation_time(autoregressive(phi, 4, 100, 2000))
    exact = (1 + phi) / (1 - phi) / 2
    # A hundred series: their mean is ten times sharper than one. What the window of W = 5 tau (at
    # least three) leaves out is sum_{t > W} phi^t: below one percent of a slow decay, 2.3 of -0.3.
    error = found.tau.std() / 10
    assert abs(found.tau.mean() - exact) < 4 * error + (0.01 if phi >= 0 else 0.025) * exact
    assert bool(found.resolved.all())


@pytest.mark.stochastic
def test_its_error_is_the_scatter_of_repetitions() -> None:
    found = autocorrelation_time(autoregressive(decay(5.0), 4, 200, 2000))
    # Wolff's formula lacks tau from the W of Madras and Sokal's: a factor 1 - tau / W = 0.8 in the
    # square. The scatter of 200 numbers is known to one part in twenty.
    assert abs(found.tau.std() / found.error.mean() - math.sqrt(0.8)) < 4 / 20


def test_the_sum_is_that_of_the_products_of_the_definition() -> None:
    series = autoregressive(0.7, 3, 240)
    found = autocorrelation_time(series)
    count, window = series.numel(), int(found.window)
    centred = series - series.mean()
    gamma = [
        sum(float((chain[: 240 - t] * chain[t:]).sum()) / (240 - t) for chain in centred) / 3
        for t in range(window + 1)
    ]
    raw = gamma[0] + 2 * sum(gamma[1:])
    # Every Gamma(t) around the sample's mean lacks total / n.
    total = raw
    for _ in range(100):
        total = raw + (2 * window + 1) * total / count
    tau = total / 2 / (gamma[0] + total / count)
    assert float(found.tau) == pytest.approx(tau, rel=1e-12)
    # The smallest window that is five tau long.
    assert window - 1 < 5 * tau + 1 and window >= 5 * tau


def test_chains_that_are_too_short_or_disagree_are_not_resolved() -> None:
    slow = autoregressive(decay(50.0), 4, 200)
    assert not bool(autocorrelation_time(slow).resolved)
    apart = autoregressive(0.0, 4, 200) + 3 * torch.arange(4.0)[:, None]
    found = autocorrelation_time(apart)
    assert not bool(found.resolved)
    # Chains are then single measurements, and Student's factor for three degrees of freedom (twice
    # at most) makes the error larger.
    scatter = float(apart.mean(-1).std()) / 2
    assert scatter < float(estimate(apart).error) < 1.6 * scatter
    assert 0.9 * 200 < 2 * float(found.tau) < 2 * 200


# -- means --------------------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize("tau", [0.5, 3.0])
def test_the_error_is_that_of_the_mean(tau: float) -> None:
    phi, chains, steps = decay(tau), 4, 600
    found = estimate(autoregressive(phi, chains, 300, steps))
    exact = variance_of_mean(phi, steps) / chains
    squares = found.error.square()
    # To first order in 1 / n: Student's factor and the noise of tau are of size 20 tau / n.
    tolerance = 4 * squares.std() / math.sqrt(300) + 20 * tau / (chains * steps) * exact
    assert abs(squares.mean() - exact) < tolerance
    assert torch.allclose(found.variance.mean(), torch.tensor(1.0).double(), atol=0.05)


@pytest.mark.stochastic
@pytest.mark.parametrize("length", [20, 50, 200])
@pytest.mark.parametrize("tau", [0.5, 2.0, 8.0])
def test_z_scores_of_repeated_runs_have_variance_one(tau: float, length: int) -> None:
    runs = 300
    series = autoregressive(decay(tau), 4, runs, max(24, int(length * tau)), seed=3)
    square = estimate(series).z_score(0.0).square()
    assert abs(square.mean() - 1) < 4 * square.std() / math.sqrt(runs)
    accumulator = BinnedMean()
    for value in series.unbind(-1):
        accumulator.add(value)
    square = (accumulator.mean / accumulator.error).square()
    assert abs(square.mean() - 1) < 4 * square.std() / math.sqrt(runs)


@pytest.mark.stochastic
def test_z_scores_of_sums_of_independent_estimates_have_variance_one() -> None:
    runs, scales = 400, torch.tensor([1.0, 0.5, 0.5, 2.0, 0.1, 1.0, 1.0]).double()[:, None]
    found = estimate(autoregressive(decay(2.0), 4, 7, runs, 60, seed=9))
    total = (scales * found.mean).sum(0)
    square = (total / combined_error(scales * found.error, found.degrees)).square()
    assert abs(square.mean() - 1) < 4 * square.std() / math.sqrt(runs)
    one = combined_error(found.error[:1], found.degrees[:1])
    torch.testing.assert_close(one, found.error[0])
    # Many degrees of freedom: errors add in squares.
    many = torch.full((2,), 1e9, dtype=torch.float64)
    assert float(combined_error(torch.tensor([3.0, 4.0]).double(), many)) == pytest.approx(5)


def test_each_quantity_is_worked_out_alone() -> None:
    series = autoregressive(0.8, 4, 3, 2, 300)
    series[2, 1, 0, 17] = torch.nan
    series[0, 1, 1, 3] = torch.inf
    together = estimate(series)
    for a in range(3):
        for b in range(2):
            if a == 1:
                assert math.isnan(together.error[a, b]) and math.isnan(together.tau[a, b])
                assert math.isnan(together.r_hat[a, b]) and math.isnan(together.ess[a, b])
                assert not bool(together.resolved[a, b])
                continue
            alone = estimate(series[:, a, b])
            for name in ("mean", "error", "tau", "ess", "r_hat"):
                # The rounding of a Fourier transform depends on its place in memory.
                torch.testing.assert_close(
                    getattr(together, name)[a, b], getattr(alone, name), rtol=1e-9, atol=1e-12
                )
    drift = equilibration(series)
    assert bool(drift.equilibrated[0].all()) and not bool(drift.equilibrated[1].any())


def test_a_far_origin_costs_no_digits_and_a_frozen_series_has_no_error() -> None:
    series = autoregressive(0.5, 4, 400)
    near, far = estimate(series), estimate(series + 2.0**30)
    # 1e9 has a spacing of 2e-7 of the numbers of order one.
    torch.testing.assert_close(near.error, far.error, rtol=1e-5, atol=0)
    torch.testing.assert_close(near.mean + 2.0**30, far.mean, rtol=0, atol=1e-6)
    frozen = estimate(torch.full((4, 100), 0.1))
    assert float(frozen.error) == 0 and float(frozen.tau) == 0.5 and float(frozen.r_hat) == 1
    assert bool(frozen.resolved)
    assert float(frozen.mean) == float(torch.tensor(0.1))
    assert float(frozen.z_score(frozen.mean)) == 0 and float(frozen.z_score(0.0)) == math.inf


@pytest.mark.parametrize("function", [autocorrelation_time, estimate, binning, equilibration])
def test_what_has_no_statistics_is_refused(function) -> None:
    with pytest.raises(ValueError, match="7 measurements a chain"):
        function(torch.zeros(4, 7))
    with pytest.raises(ValueError, match=r"series\[None\]"):
        function(torch.zeros(100))
    with pytest.raises(TypeError, match="int64"):
        function(torch.zeros(4, 100, dtype=torch.int64))


# -- chains -------------------------------------------------------------------------------------


@pytest.mark.stochastic
def test_effective_samples_count_independent_draws() -> None:
    series = autoregressive(decay(4.0), 4, 50, 2000)
    # 8000 measurements of 2 tau = 8: the ranks of AR(1) decay somewhat faster than its values.
    assert 950 < float(effective_sample_size(series).mean()) < 1200
    assert float(effective_sample_size(torch.ones(4, 100))) == 400


def test_r_hat_tells_chains_that_disagree() -> None:
    series = autoregressive(0.5, 4, 6, 400)
    series[3, 1] += 2  # another place
    series[3, 2] *= 4  # another width
    series[:, 3] = 1.0  # frozen, all the same
    series[:, 4] = torch.arange(4.0)[:, None]  # frozen, each elsewhere
    series[:, 5] = series[:, 5].sign()  # two values, whose distances from the median agree
    r_hat = split_r_hat(series)
    assert r_hat[0] < 1.02 and r_hat[5] < 1.02
    assert r_hat[1] > 1.1 and r_hat[2] > 1.1
    assert r_hat[3] == 1 and r_hat[4] == math.inf


def test_a_single_chain_is_compared_with_itself() -> None:
    still = autoregressive(0.5, 1, 2, 800)
    still[:, 1] += torch.linspace(0, 4, 800, dtype=torch.float64)
    r_hat = split_r_hat(still)
    assert r_hat[0] < 1.03 and r_hat[1] > 1.2


@pytest.mark.stochastic
def test_a_drift_at_the_beginning_is_found() -> None:
    series = autoregressive(decay(2.0), 4, 200, 1000, seed=5)
    still = equilibration(series)
    square = still.z.square()
    # The first fifth has 400 tau: z is normal to a few percent.
    assert abs(square.mean() - 1) < 4 * square.std() / math.sqrt(200)
    assert bool(still.equilibrated.all())
    # Chodera's choice follows the noise: mostly it keeps almost everything.
    assert float(still.burn_in.double().mean()) < 100

    drifting = series + 5 * torch.exp(-torch.arange(1000.0).double() / 50)
    moving = equilibration(drifting)
    assert not bool(moving.equilibrated.any())
    # The excess of 5 is below a tenth after four times 50.
    assert 50 < float(moving.burn_in.double().mean()) < 350


# -- bins ---------------------------------------------------------------------------------------


@pytest.mark.stochastic
def test_binning_rises_from_the_naive_error_to_the_plateau() -> None:
    phi = decay(4.0)
    series = autoregressive(phi, 4, 100, 4000)
    found = binning(series)
    naive = series.movedim(0, -1).flatten(1).std(-1) / math.sqrt(16000)
    torch.testing.assert_close(found.errors[:, 0], naive)
    exact = math.sqrt(variance_of_mean(phi, 4000) / 4)
    assert bool(found.resolved.all())
    # The rule balances bias and noise: at B ~ (2 n 64)^(1/3) = 127 of 2 tau = 8 the blocks miss
    # 2 tau / 2 B = 3 percent of the variance.
    assert abs(found.error.mean() / exact - 1) < 4 * found.error.std() / exact / 10 + 0.03
    scatter = found.errors.std(0) / found.uncertainties.mean(0)
    # Normal blocks: the spread of a hundred errors is known to 7 percent.
    assert bool((scatter[5:9] - 1).abs().lt(0.3).all())


def test_binning_without_a_plateau_says_so() -> None:
    trend = torch.linspace(0, 1, 64, dtype=torch.float64).expand(4, 64)
    found = binning(trend)
    assert not bool(found.resolved)
    assert float(found.error) == float(found.errors.max())
    assert found.sizes.tolist() == [1, 2, 4, 8, 16, 32]


def test_bins_are_the_means_of_equal_parts() -> None:
    series = torch.arange(2 * 3 * 11.0).reshape(2, 3, 11)
    bins = bin_means(series, 5)
    assert bins.shape == (10, 3)
    # The remainder goes at the beginning; the second chain follows the first.
    torch.testing.assert_close(bins[0, 1], series[0, 1, 1:3].mean().double())
    torch.testing.assert_close(bins[9, 2], series[1, 2, 9:].mean().double())
    with pytest.raises(ValueError, match="bins=12"):
        bin_means(series, 12)


def test_the_jackknife_removes_the_bias_of_a_square_exactly() -> None:
    bins = torch.randn(20, 3, dtype=torch.float64) + 2
    found = jackknife(torch.square, bins)
    # The mean of x_i x_j over i != j: (n mean^2 - mean of squares) / (n - 1).
    n = 20
    exact = (n * bins.mean(0).square() - bins.square().mean(0)) / (n - 1)
    torch.testing.assert_close(found.value, exact, rtol=1e-10, atol=0)
    linear = jackknife(lambda x: x, bins)
    torch.testing.assert_close(linear.value, bins.mean(0))
    torch.testing.assert_close(linear.error, bins.std(0) / math.sqrt(n))


def test_the_jackknife_knows_the_noise_of_a_square_without_slope() -> None:
    """The squared mean of n normal numbers of mean zero is 1/n times chi-square, of variance 2."""
    n, runs = 64, 2000
    bins = torch.randn(n, runs, dtype=torch.float64)
    found = jackknife(torch.square, bins)
    z = found.value / found.error
    # The slope alone would see |2 x| / sqrt(n), next to nothing in one run of ten. With x in units
    # of its error, z = (x^2 - 1) / sqrt(4 x^2 + 2) -> -1 / sqrt(2) at x = 0, and x / 2 far out.
    assert float(z.min()) > -0.8
    assert float(z.max()) < 2.5
    # E[4 x^2 + 2] = 6 for a variance of 2: cautious by sqrt(3) where nothing is seen.
    ratio = found.error.square().mean() * n**2
    # 4 sqrt(Var(4 x^2) / runs) = 4 sqrt(32 / 2000), and O(1/n) of estimated variances.
    assert abs(float(ratio) - 6) < 0.51 + 6 * 4 / n


@pytest.mark.stochastic
def test_the_jackknife_of_a_ratio_with_correlated_parts() -> None:
    """<x y> / <y^2> of correlated normal numbers, whose value is their regression coefficient."""
    runs, slope = 300, 0.6
    y = autoregressive(0.5, 4, runs, 640, seed=1)
    x = slope * y + autoregressive(0.5, 4, runs, 640, seed=2)
    found = jackknife(lambda a, b: a / b, bin_means(x * y, 16), bin_means(y * y, 16))
    square = ((found.value - slope) / found.error).square()
    # Of 64 bins Student's variance is 63/61; bins of 40 measurements are longer than 20 tau.
    assert abs(square.mean() - 1) < 4 * square.std() / math.sqrt(runs) + 0.05
    with pytest.raises(ValueError, match="same number of bins"):
        jackknife(lambda a, b: a / b, torch.ones(4), torch.ones(5))
    with pytest.raises(ValueError, match="missing"):
        jackknife(lambda: torch.ones(1))


@pytest.mark.parametrize("steps", [1, 15, 16, 31, 32, 33, 500])
def test_binned_means_are_the_means(steps: int) -> None:
    series = autoregressive(0.5, 3, 2, steps)
    found = BinnedMean(16)
    for value in series.unbind(-1):
        found.add(value)
    assert found.count == steps
    torch.testing.assert_close(found.mean, series.mean((0, -1)))
    torch.testing.assert_close(found.chain_means, series.mean(-1))
    kept = found.bins.shape[0] // 3
    assert kept < 16 and (steps < 16 or kept >= 8)
    # The bins are those of the series.
    if steps >= 16:
        covered = series[..., : kept * found.length]
        parts = found.bins.unflatten(0, (kept, 3)).movedim(0, -1)
        torch.testing.assert_close(parts, covered.unflatten(-1, (kept, -1)).mean(-1))
    assert bool(torch.isfinite(found.error).all()) == (steps > 2)


def test_binned_means_go_on_bit_by_bit_where_they_were() -> None:
    series = torch.randn(2, 5, 4, 90)  # float32, summed in float64
    straight, resumed = BinnedMean(8), BinnedMean(8)
    for t, value in enumerate(series.unbind(-1)):
        straight.add(value)
        resumed.add(value)
        if t in (0, 6, 41):
            state = resumed.state()
            resumed.add(value)  # a state is not changed by what comes after it
            resumed = BinnedMean()
            resumed.restore(state)
    assert torch.equal(straight.mean, resumed.mean)
    assert torch.equal(straight.error, resumed.error)
    fresh = BinnedMean()
    fresh.restore(BinnedMean(6).state())
    assert fresh.capacity == 6 and fresh.count == 0


def test_binned_means_refuse_what_they_cannot_average() -> None:
    with pytest.raises(ValueError, match="bins=5"):
        BinnedMean(5)
    with pytest.raises(TypeError, match="nearest is 'bins'"):
        BinnedMean(bin=8)
    found = BinnedMean()
    with pytest.raises(ValueError, match="nothing was added"):
        _ = found.mean
    found.add(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        found.add(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="axis of chains"):
        BinnedMean().add(torch.zeros(()))
