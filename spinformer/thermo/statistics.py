r"""Errors of correlated measurements: how much a Markov chain knows, and whether it knows it.

One convention for every function: a series has shape ``(C, *batch, T)``, the independent chains of
one system first, time last, and every axis between is a quantity of its own (systems, components),
with an answer of its own. A single chain is ``series[None]``; components that come last are moved,
``series.movedim(-1, -2)``. All is worked out in float64. NaN or infinity in one quantity makes NaN
of that quantity's answers and of no other's.

With the autocovariance :math:`\Gamma(t) = \langle \delta x_s \delta x_{s+t} \rangle` and the
autocorrelation :math:`\rho = \Gamma(t) / \Gamma(0)`, the error of the mean of n measurements is

.. math::
    \sigma^2 = \frac{2 \tau}{n} \Gamma(0),\qquad
    \tau = \tfrac12 + \sum_{t \ge 1} \rho(t),

the integrated autocorrelation time in measurements: 1/2 for independent ones, and n measurements
are worth :math:`n / 2\tau` of those (Sokal 1997; others, as emcee, call :math:`2\tau` so).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spinformer.errors import strict_options

__all__ = [
    "AutocorrelationTime",
    "BinnedMean",
    "Binning",
    "Equilibration",
    "Estimate",
    "Jackknife",
    "autocorrelation_time",
    "bin_means",
    "binning",
    "combined_error",
    "effective_sample_size",
    "equilibration",
    "estimate",
    "jackknife",
    "split_r_hat",
]

# A window of so many tau leaves out exp(-5) of an exponential decay.
_WINDOW = 5.0
# Bins are few and hardly correlated: there the noise of what is summed is the larger evil.
_WINDOW_OF_BINS = 1.5
# 20 tau a chain are the least that tells a tau: a window of a quarter.
_FEWEST = 4
# Shorter series have nothing to say about their correlations.
_SHORTEST = 8
# A sum of squares that is itself as noisy as with fewer than four degrees of freedom gets the
# factor of four: Student's variance has no finite value from two downwards.
_LARGEST_INFLATION = 2.0
# Alternating series have tau towards zero, and a sum of noise could fall below: up to here the
# claim is believed.
_LEAST = 0.1
# Entries of a large array that are worked on at a time: less memory than the array takes.
_CHUNK = 1 << 14


class AutocorrelationTime(NamedTuple):
    """Integrated autocorrelation times, in measurements; every entry is (*batch).

    Attributes:
        tau: 1/2 for independent measurements.
        error: its standard error (Madras & Sokal 1988).
        window: the lag W up to which correlations were summed.
        resolved: whether the chains are long enough, at least 20 tau each. If not, tau is rather a
            lower bound.
    """

    tau: Tensor
    error: Tensor
    window: Tensor
    resolved: Tensor


class _Summed(NamedTuple):
    """What the correlations of a series sum to; every entry is (*batch)."""

    mean: Tensor
    variance: Tensor
    tau: Tensor
    window: Tensor
    resolved: Tensor
    # Relative variance of the estimate of tau, 2 / (degrees of freedom).
    noise: Tensor


def autocorrelation_time(series: Tensor) -> AutocorrelationTime:
    r"""Integrated autocorrelation time with Sokal's automatic window.

    The autocovariance is averaged over the chains around their common mean, so that chains that
    disagree show up as correlations that don't decay. The sum stops at the smallest lag W with
    :math:`W \ge 5 \tau(W)`, which trades the bias of what is left out against the noise of what is
    summed, and is corrected for the mean being the sample's (Wolff 2004). The error of tau is
    :math:`\tau \sqrt{2(2W+1)/n}` for n measurements in all chains. Chains of fewer than 20 tau are
    reported as not ``resolved``. Where no window closes within half of the chains (a quarter of one
    alone), tau is the larger of the sum so far and of what the scatter of the chains' means says.

    A constant series has tau = 1/2; of a strongly alternating one tau is given as 1/10 at least.

    Args:
        series: (C, *batch, T), T >= 8.

    Cost: one Fourier transform, O(T log T) a series.

    Source: Madras & Sokal, J. Stat. Phys. 50, 109 (1988), section 2 and appendix C; Wolff, Comput.
    Phys. Commun. 156, 143 (2004).
    """
    summed = _sum(_checked(series))
    count = series.shape[0] * series.shape[-1]
    error = summed.tau * torch.sqrt(2 * (2 * summed.window + 1) / count)
    return AutocorrelationTime(summed.tau, error, summed.window, summed.resolved)


def _checked(series: Tensor, shortest: int = _SHORTEST) -> Tensor:
    if not isinstance(series, Tensor) or not series.is_floating_point():
        kind = series.dtype if isinstance(series, Tensor) else type(series).__name__
        raise TypeError(f"series is {kind}: pass a floating-point tensor (C, *batch, T)")
    if series.ndim < 2 or series.shape[0] < 1:
        raise ValueError(
            f"series has shape {tuple(series.shape)}: it must be (C, *batch, T), chains first and "
            "time last; one chain alone is series[None]"
        )
    if series.shape[-1] < shortest:
        raise ValueError(
            f"series has {series.shape[-1]} measurements a chain, and {shortest} are the least for "
            "an error: measure more often or longer (time is the last axis)"
        )
    return series.detach()


def _constant(series: Tensor) -> Tensor:
    """Whether a quantity is one number in all chains, to the rounding of its dtype, (*batch)."""
    low, high = series.amin((0, -1)), series.amax((0, -1))
    rounding = 4 * torch.finfo(series.dtype).eps
    same = high - low <= rounding * torch.maximum(low.abs(), high.abs())
    return same & torch.isfinite(high)


def _autocovariance(centred: Tensor, lags: int) -> Tensor:
    """Gamma(0 ... lags) averaged over the chains (*batch, lags + 1)."""
    steps = centred.shape[-1]
    if not centred.numel():  # there are no transforms of nothing
        return centred.new_zeros(*centred.shape[1:-1], lags + 1)
    # Padded with zeros, so that the end is not correlated with the beginning.
    size = 1 << (steps + lags - 1).bit_length()
    spectrum = torch.fft.rfft(centred, n=size)
    power = (spectrum.real.square() + spectrum.imag.square()).mean(0)
    summed: Tensor = torch.fft.irfft(power, n=size)[..., : lags + 1]
    pairs = steps - torch.arange(lags + 1, dtype=centred.dtype, device=centred.device)
    return summed / pairs


def _sum(series: Tensor, factor: float = _WINDOW) -> _Summed:
    chains, steps = series.shape[0], series.shape[-1]
    count = chains * steps
    frozen = _constant(series)
    work = series.double()
    # Of the distance to one of the values: a constant is subtracted exactly.
    origin = work[:1, ..., :1]
    moved = work - origin
    shift = moved.mean((0, -1), keepdim=True)
    mean = (origin + shift)[0, ..., 0]
    centred = moved - shift

    lags = steps // 2 if chains > 1 else steps // 4
    gamma = _autocovariance(centred, lags)
    window = torch.arange(1, lags + 1, dtype=gamma.dtype, device=gamma.device)
    # Around the sample's own mean every Gamma(t) is too small by total / n, where total is the sum
    # that is looked for: solved for it here, for each window.
    raw = gamma[..., :1] + 2 * gamma[..., 1:].cumsum(-1)
    total = raw / (1 - (2 * window + 1) / count)
    variance = gamma[..., :1] + total / count
    tau = total / (2 * variance)
    closed = window >= factor * tau.clamp_min(0.5)
    # The last window for those that never close.
    chosen = torch.where(closed.any(-1), closed.double().argmax(-1), lags - 1)
    resolved = closed.any(-1) & (_FEWEST * window[chosen] <= steps)
    tau = tau.gather(-1, chosen[..., None])[..., 0]
    variance = variance.gather(-1, chosen[..., None])[..., 0]
    window = window[chosen]
    noise = 4 * (window + 0.5 - tau) / count

    if chains > 1:
        # Where no window closes, a chain is worth one measurement at worst. One may have closed too
        # early: a slow mode of small amplitude hides behind a fast one. Then the chains' means
        # scatter more than chance allows.
        scatter = centred.mean(-1).square().sum(0) / (chains - 1)
        crude = steps * scatter / (2 * variance)
        hidden = crude > _excess(chains - 1) * tau
        worse = (~closed.any(-1) & (crude > tau)) | hidden
        resolved = resolved & ~hidden
        tau = torch.where(worse, crude, tau)
        noise = torch.where(worse, 2 / (chains - 1), noise)
    tau = tau.clamp_min(_LEAST)
    lost = ~torch.isfinite(mean)
    tau = torch.where(frozen, 0.5, tau).masked_fill(lost, torch.nan)
    variance = torch.where(frozen, 0.0, variance)
    noise = torch.where(frozen, 0.0, noise)
    return _Summed(mean, variance, tau, window, (resolved | frozen) & ~lost, noise)


def _excess(degrees: int) -> float:
    """What chi^2 / degrees exceeds once in a thousand times, by Wilson & Hilferty (1931)."""
    spread = 2 / (9 * degrees)
    return (1 - spread + 3.09 * math.sqrt(spread)) ** 3


def _inflation(noise: Tensor) -> Tensor:
    r"""What an estimated variance must be multiplied by for z-scores of variance one.

    An estimate with relative variance v has 2 / v degrees of freedom, and Student's
    t the variance :math:`\nu / (\nu - 2) = 1 / (1 - v)`.
    """
    return 1 / (1 - noise).clamp_min(1 / _LARGEST_INFLATION)


def _error(summed: _Summed, count: int) -> Tensor:
    """Standard error of the mean of so many measurements."""
    return torch.sqrt(2 * summed.tau * summed.variance / count * _inflation(summed.noise))


@dataclass(frozen=True)
class Estimate:
    """The mean of a correlated series and what is known about it; every entry is (*batch).

    Attributes:
        mean: over all chains.
        error: its standard error.
        tau: integrated autocorrelation time in measurements, 1/2 for independent ones.
        tau_error: standard error of tau.
        variance: of a single measurement.
        degrees: of freedom of the error, as in Student's t.
        resolved: whether every chain is longer than 20 tau: if not, ``error`` may be too small.
    """

    mean: Tensor
    error: Tensor
    tau: Tensor
    tau_error: Tensor
    variance: Tensor
    degrees: Tensor
    resolved: Tensor
    _series: Tensor = field(repr=False)

    @cached_property
    def ess(self) -> Tensor:
        """:func:`effective_sample_size` of the series."""
        return effective_sample_size(self._series)

    @cached_property
    def r_hat(self) -> Tensor:
        """:func:`split_r_hat` of the series."""
        return split_r_hat(self._series)

    def z_score(self, exact: Tensor | float) -> Tensor:
        """(mean - exact) / error; zero where both vanish, as for a frozen series."""
        distance = self.mean - exact
        return torch.where((distance == 0) & (self.error == 0), 0.0, distance / self.error)


def estimate(series: Tensor) -> Estimate:
    r"""Mean, error, autocorrelation time, effective sample size and R-hat of a series.

    The error is that of the autocorrelation time pooled over the chains,
    :math:`\sigma^2 = 2\tau\,\mathrm{Var}/n`, times the variance :math:`1/(1-v)` of Student's t with
    the :math:`\nu = 2/v` degrees of freedom that the estimate of tau has,
    :math:`v = 4(W + 1/2 - \tau)/n` (Wolff 2004): so z-scores have variance one also where tau is
    known to a third only.
    The scatter of the chains' means is not a second opinion worth more: it has C - 1 degrees of
    freedom, and the larger of two estimates is too large on average. It enters where it must: where
    correlations around the common mean don't decay, and where the chains' means scatter more than
    tau explains, by what chance would do once in a thousand times: a slow mode of small amplitude
    can hide behind a fast one. The series is then not ``resolved``.

    Args:
        series: (C, *batch, T), T >= 8.

    Cost: as :func:`autocorrelation_time`; ``ess`` and ``r_hat`` are computed when asked for.
    """
    series = _checked(series)
    summed = _sum(series)
    count = series.shape[0] * series.shape[-1]
    error = _error(summed, count)
    tau_error = summed.tau * torch.sqrt(2 * (2 * summed.window + 1) / count)
    return Estimate(
        summed.mean,
        error,
        summed.tau,
        tau_error,
        summed.variance,
        2 / summed.noise,
        summed.resolved,
        series,
    )


def combined_error(errors: Tensor, degrees: Tensor) -> Tensor:
    r"""Standard error of a sum of independent estimates, (*batch).

    Each error of :func:`estimate` carries Student's factor for its own degrees of freedom; their
    sum has more, by Welch and Satterthwaite :math:`\nu = (\sum s_k^2)^2 / \sum s_k^4/\nu_k` with
    :math:`s_k` the errors without that factor, and needs less of it.

    Args:
        errors: of the terms, (K, *batch); of weighted ones times the weights.
        degrees: of freedom, (K, *batch).
    """
    noise = 2 / degrees
    squares = errors.square() / _inflation(noise)
    total = squares.sum(0)
    shared = (squares.square() * noise).sum(0) / torch.where(total > 0, total, 1.0).square()
    return torch.sqrt(total * _inflation(shared))


def _array_stats() -> Any:
    from arviz_stats.base.array import array_stats  # noqa: PLC0415 (takes a second to import)

    return array_stats


def _through_arviz(
    series: Tensor, measure: Callable[[Any], Any], rows: Tensor, otherwise: Tensor
) -> Tensor:
    """A diagnostic of the quantities that have one, ``otherwise`` (*batch) for the rest."""
    answer = otherwise.clone()
    if bool(rows.any()):
        chosen = series.double().movedim(0, -2)[rows]  # (quantities, C, T)
        answer[rows] = torch.as_tensor(
            measure(chosen.cpu().numpy()), dtype=answer.dtype, device=answer.device
        )
    return answer


def effective_sample_size(series: Tensor) -> Tensor:
    """Independent draws that the chains are worth in the bulk of the distribution, (*batch).

    Rank-normalized and over split chains, by ``arviz_stats`` (Vehtari, Gelman, Simpson, Carpenter &
    Bürkner, Bayesian Analysis 16, 667 (2021)). It also sees chains that disagree. A constant series
    counts all its measurements.

    Args:
        series: (C, *batch, T), T >= 8.
    """
    series = _checked(series)
    stats = _array_stats()
    sound = torch.isfinite(series).all(-1).all(0)
    frozen = _constant(series)
    count = float(series.shape[0] * series.shape[-1])
    otherwise = torch.full_like(series[0, ..., 0], count, dtype=torch.float64)
    otherwise = otherwise.masked_fill(~sound, torch.nan)
    return _through_arviz(
        series,
        lambda rows: stats.ess(rows, chain_axis=1, draw_axis=2),
        sound & ~frozen,
        otherwise,
    )


def split_r_hat(series: Tensor) -> Tensor:
    r"""Rank-normalized split :math:`\hat R` over the chains, (*batch): 1 when they agree.

    The larger of that of the values and that of their distances from the median, by
    ``arviz_stats``: below 1.01 chains are usually called mixed (Vehtari et al. 2021). A series that
    is constant in every half chain has 1 if all agree and infinity if not. A chain alone is
    compared with itself, in four parts.

    Args:
        series: (C, *batch, T), T >= 8.
    """
    series = _checked(series)
    stats = _array_stats()
    sound = torch.isfinite(series).all(-1).all(0)
    frozen = _constant(series)
    half = series.shape[-1] // 2
    halves = torch.stack([series[..., :half], series[..., -half:]])
    stuck = (halves.amax(-1) == halves.amin(-1)).all(0).all(0) & ~frozen
    if series.shape[0] == 1:
        series = halves[:, 0]
    otherwise = torch.where(stuck, torch.inf, 1.0).double().masked_fill(~sound, torch.nan)

    def measure(rows: Any) -> Tensor:
        # Distances from the median may be constant within chains though the values are not.
        with np.errstate(divide="ignore", invalid="ignore"):
            of_values, of_distances = (
                torch.as_tensor(stats.rhat(rows, chain_axis=1, draw_axis=2, method=method))
                for method in ("z_scale", "folded")
            )
        # Two values around their median have one distance from it, and no R-hat of that.
        return torch.fmax(of_values, of_distances)

    return _through_arviz(series, measure, sound & ~frozen & ~stuck, otherwise)


class Binning(NamedTuple):
    """The error of a mean against the size of the blocks that it is taken from.

    Attributes:
        sizes: measurements in a block, 1, 2, 4 ..., (L,) int64.
        errors: standard error of the mean that blocks of each size show, (*batch, L).
        uncertainties: of those, (*batch, L).
        error: at the plateau, (*batch).
        resolved: whether there is a plateau: the blocks of its size are enough, (*batch).
    """

    sizes: Tensor
    errors: Tensor
    uncertainties: Tensor
    error: Tensor
    resolved: Tensor


def binning(series: Tensor) -> Binning:
    r"""Block averages of doubling size (Flyvbjerg & Petersen, J. Chem. Phys. 91, 461 (1989)).

    Of n blocks with variance c the error of the mean is :math:`\sqrt{c/(n-1)}`, itself known to a
    fraction :math:`1/\sqrt{2(n-1)}`. It rises with the size B of the blocks until they are
    independent. The plateau is read off at the smallest size with
    :math:`B^3 > 2 n (\sigma_B/\sigma_1)^4`, where bias and noise balance (Lee et al., Phys. Rev. E
    83, 066706 (2011)). Blocks are taken within chains and compared over all of them; what does not
    fill a block at the end of a chain is left out.

    A picture to look at, and a check of :func:`estimate`, which is the sharper.

    Args:
        series: (C, *batch, T), T >= 8.
    """
    work = _checked(series).double()
    chains, count = work.shape[0], work.shape[0] * work.shape[-1]
    sizes, errors, uncertainties = [], [], []
    blocks, size = work, 1
    # Two blocks a chain, and no fewer than four in all, still have a variance to speak of.
    while blocks.shape[-1] >= 2 and chains * blocks.shape[-1] >= 4:
        n = chains * blocks.shape[-1]
        error = torch.sqrt(blocks.movedim(0, -1).flatten(-2).var(-1) / n)
        sizes.append(size)
        errors.append(error)
        uncertainties.append(error / math.sqrt(2 * (n - 1)))
        pairs = blocks.shape[-1] // 2
        blocks = blocks[..., : 2 * pairs].unflatten(-1, (pairs, 2)).mean(-1)
        size *= 2
    levels = torch.tensor(sizes, device=work.device)
    stacked = torch.stack(errors, -1)
    first = torch.where(stacked[..., :1] > 0, stacked[..., :1], 1.0)
    enough = levels.double() ** 3 > 2 * count * (stacked / first) ** 4
    resolved = enough.any(-1)
    chosen = torch.where(resolved, enough.double().argmax(-1), len(sizes) - 1)
    error = stacked.gather(-1, chosen[..., None])[..., 0]
    # Without a plateau the largest is the best bound.
    error = torch.where(resolved, error, stacked.amax(-1))
    return Binning(levels, stacked, torch.stack(uncertainties, -1), error, resolved)


def bin_means(series: Tensor, bins: int = 32) -> Tensor:
    """Means over equal parts of every chain, (C * bins, *batch), for :func:`jackknife`.

    Bins should be many times tau long. What is left over is dropped at the beginning of a chain,
    where it matters least.

    Args:
        series: (C, *batch, T).
        bins: parts of each chain.

    Raises:
        ValueError: fewer measurements than bins.
    """
    series = _checked(series, 2)
    length = series.shape[-1] // bins if bins >= 1 else 0
    if length < 1:
        raise ValueError(
            f"bins={bins} of a series of {series.shape[-1]} measurements a chain: each bin needs "
            "at least one; ask for fewer bins, of many tau each"
        )
    parts = series.double()[..., series.shape[-1] - bins * length :].unflatten(-1, (bins, length))
    means: Tensor = parts.mean(-1).movedim(-1, 1).flatten(0, 1)
    return means


class Jackknife(NamedTuple):
    """A function of means: ``value`` corrected for its bias, and its standard ``error``."""

    value: Tensor
    error: Tensor


def jackknife(function: Callable[..., Tensor], *bins: Tensor) -> Jackknife:
    r"""A nonlinear function f of expectations, from independent bins of measurements.

    With :math:`f_j` the function of the means without bin j of n,

    .. math::
        f \approx f(\bar x) - B,\quad B = (n - 1) (\bar f_j - f(\bar x)),\qquad
        \sigma^2 = \frac{n-1}{n} \sum_j (f_j - \bar f_j)^2 + 2 B^2 .

    The value is unbiased to order 1/n^2, and correlations between the arguments are accounted for.
    The last term counts where f has no slope, as the square of a mean that vanishes: there f is a
    square of noise of mean B and variance :math:`2 B^2`, of which the sum sees next to nothing if
    the mean happens to vanish. Elsewhere it is smaller by 1/n.

    Args:
        function: takes the means of the arguments, with one more axis in front of each, and returns
            f with that axis in front: it acts on every entry of the first axis alone.
        bins: means (n, *shape) over bins, n >= 2, the same in every argument: from
            :func:`bin_means` or :attr:`BinnedMean.bins`.

    Source: Efron, The jackknife, the bootstrap and other resampling plans (SIAM 1982).
    """
    if not bins:
        raise ValueError("bins are missing: pass the bin means of at least one quantity")
    counts = {values.shape[0] if values.ndim else 0 for values in bins}
    n = counts.pop()
    if counts or n < 2:
        shapes = ", ".join(str(tuple(values.shape)) for values in bins)
        raise ValueError(
            f"bins have shapes {shapes}: all need the same number of bins, two or more, in front"
        )
    work = [values.detach().double() for values in bins]
    means = [values.mean(0, keepdim=True) for values in work]
    left_out = [mean + (mean - values) / (n - 1) for mean, values in zip(means, work, strict=True)]
    whole = function(*means)[0]
    parts = function(*left_out)
    middle = parts.mean(0)
    bias = (n - 1) * (middle - whole)
    variance = (n - 1) / n * (parts - middle).square().sum(0)
    return Jackknife(whole - bias, torch.sqrt(variance + 2 * bias.square()))


class Equilibration(NamedTuple):
    """Whether a series still drifts; every entry is (*batch).

    Attributes:
        z: distance of the means of the first fifth and the last half, in standard errors.
        equilibrated: abs(z) below the threshold.
        burn_in: measurements to drop at the beginning for the most effective samples, int64.
    """

    z: Tensor
    equilibrated: Tensor
    burn_in: Tensor


def equilibration(series: Tensor, threshold: float = 4.0) -> Equilibration:
    r"""Look for a drift at the beginning of a series that is supposed to be stationary.

    Geweke's comparison of the first fifth with the last half of all chains, with the variance and
    autocorrelation time of the last half (of the whole where the last half is constant, as that of
    a quantity that hardly ever changes may be). A drift slower than the chains are long cannot be
    seen in them; their disagreement (:func:`split_r_hat`) may show it.

    The burn-in is that of :math:`\max_{t_0} (T - t_0) / \tau(t_0)` over sixteen places in the first
    three quarters (Chodera, J. Chem. Theory Comput. 12, 1799 (2016)).

    Args:
        series: (C, *batch, T), T >= 16.
        threshold: z that is called a drift. The default of four standard errors is passed by chance
            once in 16 000 quantities.

    Source: Geweke, in Bayesian Statistics 4, 169 (Oxford 1992).
    """
    series = _checked(series, 2 * _SHORTEST)
    steps = series.shape[-1]
    head, tail = series[..., : steps // 5], series[..., steps - steps // 2 :]
    still, last, whole = _constant(tail), _sum(tail), _sum(series)
    tau, variance, noise = (
        torch.where(still, getattr(whole, name), getattr(last, name))
        for name in ("tau", "variance", "noise")
    )
    start = head.double().mean((0, -1))
    chains = series.shape[0]
    weight = 1 / (chains * head.shape[-1]) + 1 / (chains * tail.shape[-1])
    error = torch.sqrt(2 * tau * variance * weight * _inflation(noise))
    distance = start - last.mean
    z = torch.where(_constant(series), 0.0, distance / error)

    starts = sorted({steps * k * 3 // 64 for k in range(16)})
    starts = [first for first in starts if steps - first >= _SHORTEST]
    worth = torch.stack([(steps - first) / _sum(series[..., first:]).tau for first in starts])
    places = torch.tensor(starts, device=series.device)
    burn_in = places[worth.nan_to_num(nan=0.0).argmax(0)]
    return Equilibration(z, z.abs() < threshold, burn_in)


@strict_options
class BinnedMean:
    r"""Mean and error of arrays that are too large to keep as series, in constant memory.

    Values are averaged into bins; when all bins are full, neighbours are merged and the bins to
    come are twice as long: between ``bins / 2`` and ``bins`` of them stand at any time after the
    first. The error is that of the bin means of all chains.

    Args:
        bins: kept for each chain, an even number >= 4, better from 16 on (correlations of bins).
            Memory is ``bins + 1`` values in float64.

    Attributes:
        count: values that were added.
        length: values in one bin.
    """

    def __init__(self, bins: int = 32) -> None:
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 4 or bins % 2:
            raise ValueError(
                f"bins={bins!r} must be an even integer >= 4: full bins merge in pairs"
            )
        self.capacity = bins
        self.count = 0
        self.length = 1
        self._filled = 0
        self._inside = 0
        self._bins: Tensor | None = None
        self._current: Tensor | None = None

    def add(self, value: Tensor) -> None:
        """Take in one measurement of every chain, (C, *shape); its gradient is not kept.

        Raises:
            ValueError: another shape than before.
        """
        if self._bins is None or self._current is None:
            if value.ndim < 1:
                raise ValueError("value is a scalar: it needs the axis of chains, value[None]")
            size = (self.capacity, *value.shape)
            self._bins = torch.zeros(size, dtype=torch.float64, device=value.device)
            self._current = torch.zeros_like(self._bins[0])
        if value.shape != self._current.shape:
            raise ValueError(
                f"value has shape {tuple(value.shape)}, those before {tuple(self._current.shape)}: "
                "one accumulator serves one quantity"
            )
        self._current += value.detach()
        self.count += 1
        self._inside += 1
        if self._inside < self.length:
            return
        torch.div(self._current, self.length, out=self._bins[self._filled])
        self._current.zero_()
        self._inside = 0
        self._filled += 1
        if self._filled == self.capacity:
            half = self.capacity // 2
            for k in range(half):  # in place: these arrays are the large ones
                torch.add(self._bins[2 * k], self._bins[2 * k + 1], out=self._bins[k]).mul_(0.5)
            self._filled = half
            self.length *= 2

    def _full(self) -> tuple[Tensor, Tensor]:
        if self._bins is None or self._current is None:
            raise ValueError("nothing was added: there is no mean of no measurements")
        return self._bins[: self._filled], self._current

    @property
    def bins(self) -> Tensor:
        """Means of the full bins of all chains, (bins * C, *shape), for :func:`jackknife`."""
        return self._full()[0].flatten(0, 1)

    @property
    def chain_means(self) -> Tensor:
        """Mean of every chain, (C, *shape)."""
        full, current = self._full()
        return (full.sum(0) * self.length + current) / self.count

    @property
    def mean(self) -> Tensor:
        """Mean of all measurements in all chains, (*shape)."""
        return self.chain_means.mean(0)

    @property
    def error(self) -> Tensor:
        """Standard error of the mean, (*shape): that of :func:`estimate` for the bin means, with a
        window of 1.5 tau, as bins are few.

        Correlations that outlast a bin are seen as those of the bins. NaN with fewer than eight
        bins in all chains, or with one a chain.
        """
        full, current = self._full()
        kept = full.shape[0]
        answer = torch.full_like(current[0], torch.nan)
        count = kept * full.shape[1]
        if kept < 2 or count < _SHORTEST:
            return answer
        # What is in the bin to come adds to the mean, and would lower the error by its share.
        share = kept * self.length / self.count
        flat = full.flatten(2) if full.ndim > 2 else full[..., None]
        errors = [
            _error(_sum(part.permute(1, 2, 0), _WINDOW_OF_BINS), count)
            for part in flat.split(_CHUNK, -1)
        ]
        return torch.cat(errors).reshape(answer.shape) * math.sqrt(share)

    def state(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint: copies that later measurements don't change."""
        numbers = torch.tensor([self.capacity, self.count, self.length, self._filled, self._inside])
        if self._bins is None or self._current is None:
            return {"numbers": numbers}
        full = self._bins[: self._filled].clone()
        return {"numbers": numbers, "bins": full, "current": self._current.clone()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from :meth:`state`, bit by bit as if there had been no interruption."""
        numbers = (int(number) for number in state["numbers"])
        self.capacity, self.count, self.length, self._filled, self._inside = numbers
        self._bins = self._current = None
        if "current" in state:
            self._current = state["current"].clone()
            self._bins = self._current.new_zeros(self.capacity, *self._current.shape)
            self._bins[: self._filled] = state["bins"]
