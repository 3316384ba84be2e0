"""Site laws: derivatives of one log-partition, turning with their field, sampled as stated."""

from __future__ import annotations

import functools
import itertools
import math
import time

import pytest
import torch
from torch import Tensor

from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.special import bessel_ratio, bessel_ratio_derivative
from spinformer.spins.streams import Streams

LAWS = [
    Ising(),
    Sphere(2),
    Sphere(3, radius=1.0),
    Sphere(8),
    Sphere(64, radius="large_d"),
    LargeDSphere(3),
    LargeDSphere(16, radius=2.5),
    Gaussian(3, variance=0.7),
    Gaussian(1),
]
laws = pytest.mark.parametrize("site", LAWS, ids=repr)
spheres = pytest.mark.parametrize(
    "site", [law for law in LAWS if isinstance(law, Ising | Sphere | LargeDSphere)], ids=repr
)
# The laws whose samples have exactly the moments that the law states.
exact = pytest.mark.parametrize(
    "site", [law for law in LAWS if not isinstance(law, LargeDSphere)], ids=repr
)


def fields(site: SiteLaw, generator: torch.Generator) -> Tensor:
    """Weak, ordinary and strong fields, and none: (5, D)."""
    b = torch.randn(5, site.dim, generator=generator, dtype=torch.float64)
    strength = torch.tensor([0.0, 1e-6, 0.3, 2.0, 10.0], dtype=torch.float64)
    return b / b.norm(dim=-1, keepdim=True) * (strength / site.scale)[:, None]


@laws
def test_mean_and_covariance_are_derivatives(site: SiteLaw, generator: torch.Generator) -> None:
    b = fields(site, generator).requires_grad_()
    log_z = site.log_partition(b)
    (mean,) = torch.autograd.grad(log_z.sum(), b, create_graph=True)
    torch.testing.assert_close(mean, site.mean(b), rtol=1e-13, atol=1e-15)
    rows = [
        torch.autograd.grad(site.mean(b)[:, a].sum(), b, retain_graph=True)[0]
        for a in range(site.dim)
    ]
    covariance = torch.stack(rows, dim=1)
    scale = site.scale**2
    torch.testing.assert_close(covariance, site.covariance(b), rtol=1e-11, atol=1e-13 * scale)


def test_jet_of_the_sphere(generator: torch.Generator) -> None:
    """tau, rho and w are those of mean and covariance; w' is the slope of w in |b|^2."""
    for site in (Sphere(2), Sphere(3, radius=1.0), Sphere(64, radius="large_d")):
        b = fields(site, generator)
        square = b.square().sum(-1)
        tau, rho, w, slope = site.jet(b)
        close = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=0)
        close(tau[:, None] * b, site.mean(b))
        close(torch.stack((tau, rho)), torch.stack(site.response(b)))
        eye = torch.eye(site.dim, dtype=b.dtype)
        outer = w[:, None, None] * b[:, :, None] * b[:, None, :]
        close(tau[:, None, None] * eye + outer, site.covariance(b))
        shifted = [site.jet(b * (1 + e))[2] for e in (1e-4, -1e-4)]
        change = (shifted[0] - shifted[1]) / 4e-4  # s dw/ds, error 1e-8 relative
        close(slope * square, change, rtol=1e-6, atol=1e-10 * float(w.abs().max()))


@laws
def test_covariance_from_its_two_variances(site: SiteLaw, generator: torch.Generator) -> None:
    b = fields(site, generator)
    transverse, longitudinal = site.response(b)
    values = torch.linalg.eigvalsh(site.covariance(b))
    expected = torch.cat([longitudinal[:, None], transverse[:, None].expand(-1, site.dim - 1)], -1)
    expected = expected.sort(-1).values
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-14 * site.scale**2)
    assert bool((longitudinal > 0).all())
    # The field stiffens the spin: 0 < rho <= tau <= R^2 / D.
    slack = 1 + 1e-14
    assert bool((longitudinal <= transverse * slack).all())
    assert bool((transverse <= site.scale**2 * slack).all())


@laws
def test_zero_field(site: SiteLaw) -> None:
    b = torch.zeros(2, site.dim, dtype=torch.float64, requires_grad=True)
    assert float(site.log_partition(b).abs().max().detach()) == 0
    assert float(site.mean(b).abs().max().detach()) == 0
    free = site.scale**2 * torch.eye(site.dim, dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(site.covariance(b), free, rtol=1e-14, atol=0)
    (grad,) = torch.autograd.grad(site.mean(b).sum(), b)
    torch.testing.assert_close(grad, torch.full_like(grad, site.scale**2), rtol=1e-13, atol=0)
    m = torch.zeros(2, site.dim, dtype=torch.float64, requires_grad=True)
    inverse = site.inverse_response(m)
    (grad,) = torch.autograd.grad(inverse.sum(), m)
    torch.testing.assert_close(grad, torch.full_like(grad, site.scale**-2), rtol=1e-13, atol=0)


@laws
def test_weak_field_is_linear(site: SiteLaw) -> None:
    """m = beta h R^2 / D to 1e-6 near zero."""
    for strength in (1e-3, 1e-8, 1e-150):
        b = torch.full((site.dim,), strength / math.sqrt(site.dim) / site.scale).double()
        torch.testing.assert_close(site.mean(b), site.scale**2 * b, rtol=1e-6, atol=0)


@laws
def test_inverse_response_round_trip(site: SiteLaw, generator: torch.Generator) -> None:
    b = fields(site, generator)
    back = site.inverse_response(site.mean(b))
    # db / dm = 1 / variance amplifies the rounding of m: by the longitudinal one at worst.
    eps = torch.finfo(torch.float64).eps
    _, longitudinal = site.response(b)
    bound = 16 * eps * (b.norm(dim=-1) + site.mean(b).norm(dim=-1) / longitudinal)
    assert bool(((back - b).norm(dim=-1) <= bound).all())


@laws
def test_entropy(site: SiteLaw, generator: torch.Generator) -> None:
    b = fields(site, generator)
    m = site.mean(b)
    expected = site.log_partition(b) - (b * m).sum(-1)
    # log z and b . m cancel: of strong fields the entropy keeps the absolute accuracy of b . m.
    atol = 1e-13 * float(1 + (b * m).sum(-1).abs().max())
    entropy = site.entropy(m.requires_grad_())
    torch.testing.assert_close(entropy, expected, rtol=1e-12, atol=atol)
    assert bool((entropy <= 1e-15).all())
    (grad,) = torch.autograd.grad(entropy.sum(), m)  # the field is what resists: dS/dm = -b
    torch.testing.assert_close(grad, -b, rtol=1e-7, atol=1e-9)


@laws
def test_turns_with_the_field(site: SiteLaw, generator: torch.Generator) -> None:
    b = fields(site, generator)
    square = torch.randn(site.dim, site.dim, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(square)[0]
    # The largest field has 10 R^2 / D-ish units: compare relative to each law's scale.
    close = {"rtol": 1e-12, "atol": 1e-13 * site.scale}
    torch.testing.assert_close(site.log_partition(b @ rotation.T), site.log_partition(b), **close)
    torch.testing.assert_close(site.mean(b @ rotation.T), site.mean(b) @ rotation.T, **close)
    turned = rotation @ site.covariance(b) @ rotation.T
    torch.testing.assert_close(
        site.covariance(b @ rotation.T), turned, rtol=1e-12, atol=1e-13 * site.scale**2
    )


@spheres
def test_spins_are_inside_the_ball(site: SiteLaw) -> None:
    assert site.radius is not None
    for strength in (1e2, 1e5, 1e8):
        b = torch.zeros(site.dim, dtype=torch.float64)
        b[0] = strength
        assert float(site.mean(b).norm()) <= site.radius * (1 + 1e-15)
        assert math.isfinite(float(site.log_partition(b)))
    for length in (1.0, 1.5):
        m = torch.zeros(2, site.dim, dtype=torch.float64)
        m[1, 0] = length * site.radius
        with pytest.raises(ValueError, match="not strictly inside the ball"):
            site.inverse_response(m)


@laws
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_is_kept(site: SiteLaw, dtype: torch.dtype, generator: torch.Generator) -> None:
    b = fields(site, generator)[:4].to(dtype).requires_grad_()
    reference = b.detach().double()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    for found, expected in (
        (site.log_partition(b), site.log_partition(reference)),
        (site.mean(b), site.mean(reference)),
        (site.covariance(b), site.covariance(reference)),
    ):
        assert found.dtype == dtype
        scale = float(expected.abs().max())
        assert float((found.double() - expected).abs().max().detach()) <= tolerance * scale
    assert site.sample(b).dtype == dtype


@exact
@pytest.mark.stochastic
def test_samples_have_the_moments_of_the_law(site: SiteLaw, generator: torch.Generator) -> None:
    """5 sigma on every component of the mean, and on the covariance of the first four."""
    draws = 10_000
    for b in fields(site, generator)[[0, 2, 3]]:
        samples = site.sample(b.expand(draws, -1), generator)
        assert samples.shape == (draws, site.dim)
        covariance = site.covariance(b)
        error = (samples.mean(0) - site.mean(b)).abs()
        assert bool((error <= 5 * (covariance.diagonal() / draws).sqrt()).all())
        centred = (samples - site.mean(b))[:, :4]
        covariance = covariance[:4, :4]
        products = centred[:, :, None] * centred[:, None, :]
        spread = (products.var(0) / draws).sqrt()
        # S^2 of an Ising spin without a field does not vary at all.
        assert bool(((products.mean(0) - covariance).abs() <= 5 * spread + 1e-12).all())
        if site.radius is not None:
            lengths = samples.norm(dim=-1)
            torch.testing.assert_close(
                lengths, torch.full_like(lengths, site.radius), rtol=1e-14, atol=0
            )


@pytest.mark.stochastic
@pytest.mark.parametrize("dim", [2, 3, 4, 5, 64, 512])
@pytest.mark.parametrize("kappa", [0.0, 1e-12, 1e-3, 1.0, 100.0, 800.0, 1e6])
@pytest.mark.parametrize("axis", ["plus", "minus", "nearly"])
def test_von_mises_fisher(dim: int, kappa: float, axis: str, generator: torch.Generator) -> None:
    """Finite, on the sphere, quick, and aligned with the field by A_D(kappa) within 5 sigma."""
    draws = 10_000 if dim < 512 else 2_000  # 5e6 normals are the cost at D = 512
    mu = torch.zeros(dim, dtype=torch.float64)
    mu[0 if axis == "nearly" else -1] = -1.0 if axis == "minus" else 1.0
    if axis == "nearly":
        mu = mu + 1e-8 * torch.randn(dim, generator=generator, dtype=torch.float64)
        mu = mu / mu.norm()
    begin = time.perf_counter()
    samples = Sphere(dim, radius=1.0).sample((kappa * mu).expand(draws, -1), generator)
    # A guard against a rejection loop that hardly accepts: the draws take milliseconds.
    assert time.perf_counter() - begin < 1.0
    assert bool(samples.isfinite().all())
    torch.testing.assert_close(
        samples.norm(dim=-1), torch.ones(draws, dtype=torch.float64), rtol=0, atol=1e-14
    )
    # 1 - mu . x keeps the digits at kappa = 1e6.
    gap = (samples - mu).square().sum(-1) / 2
    k = torch.tensor(kappa, dtype=torch.float64)
    expected = 1 - bessel_ratio(k, dim)
    sigma = (bessel_ratio_derivative(k, dim) / draws).sqrt()
    assert float((gap.mean() - expected).abs()) <= 5 * float(sigma)


@laws
def test_generator_decides_the_draws(site: SiteLaw) -> None:
    b = torch.ones(100, site.dim)
    state = torch.get_rng_state()
    first = site.sample(b, torch.Generator().manual_seed(3))
    again = site.sample(b, torch.Generator().manual_seed(3))
    other = site.sample(b, torch.Generator().manual_seed(4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


@laws
def test_shapes(site: SiteLaw) -> None:
    for shape in ((), (4,), (2, 0), (0, 3), (2, 3)):
        b = torch.ones(*shape, site.dim)
        assert site.log_partition(b).shape == shape
        assert site.mean(b).shape == b.shape
        assert site.covariance(b).shape == (*b.shape, site.dim)
        assert site.sample(b).shape == b.shape
        if len(shape) == 2:
            assert site.sample(b, Streams.from_seed(0, shape[:1])).shape == b.shape


def test_values_from_the_field() -> None:
    """beta |h| R = 1: the two numbers that people check first."""
    for dim, expected in ((3, 0.313035285499331), (2, 0.446389965896535)):
        site = Sphere(dim)
        b = torch.zeros(dim, dtype=torch.float64)
        b[-1] = 1 / site.radius
        m = site.mean(b)
        assert float(m[-1]) / site.radius == pytest.approx(expected, rel=1e-14)
        assert float(m[:-1].abs().max()) == 0


def test_large_d_law() -> None:
    """The saddle form of the one-spin integral: inverse, entropy and O(1/D) from the exact law."""
    site = LargeDSphere(6, radius=1.3)
    m = torch.tensor([[0.3, -0.2, 0.1, 0.4, 0.0, 0.5]], dtype=torch.float64)
    square = m.square().sum(-1)
    expected = 6 * m / (1.3**2 - square)
    torch.testing.assert_close(site.inverse_response(m), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(site.entropy(m), 3 * torch.log(1 - square / 1.3**2))
    errors = []
    for dim in (32, 64, 128, 256):
        b = torch.zeros(dim, dtype=torch.float64)
        b[0] = dim / 2  # R = 1, kappa = D / 2
        exact = float(Sphere(dim, radius=1.0).mean(b)[0])
        errors.append(float(LargeDSphere(dim, radius=1.0).mean(b)[0]) / exact - 1)
    assert errors[2] == pytest.approx(-1.6e-3, abs=1e-4)
    for coarse, fine in itertools.pairwise(errors):
        assert coarse / fine == pytest.approx(2, rel=0.02)


def test_radius_conventions() -> None:
    assert Sphere(7).radius == math.sqrt(7)
    assert Sphere(8, radius="large_d").radius == math.sqrt(3)
    assert Ising().radius == 1
    assert Gaussian(2).radius is None
    assert Sphere(9).scale == 1
    assert Gaussian(2, variance=4.0).scale == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Sphere(1), "Ising"),
        (lambda: Sphere(2.0), "dim=2.0"),
        (lambda: Sphere(3, radius=-1.0), "radius=-1.0"),
        (lambda: Sphere(3, radius=math.inf), "radius=inf"),
        (lambda: Sphere(3, radius="large"), "radius='large'"),
        (lambda: Sphere(2, radius="large_d"), "dim > 2"),
        (lambda: LargeDSphere(1), "dim"),
        (lambda: Gaussian(0), "dim=0"),
        (lambda: Gaussian(2, variance=0.0), "variance=0.0"),
    ],
)
def test_bad_arguments(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("law", [Sphere, LargeDSphere, Gaussian])
def test_unknown_option_is_named(law: type[SiteLaw]) -> None:
    with pytest.raises(TypeError, match="no option 'dimm'; the nearest is 'dim'"):
        law(dimm=3)


@pytest.mark.parametrize("site", [Ising(), Sphere(3), LargeDSphere(4, radius=1.5)], ids=repr)
def test_covariance_is_smooth_at_zero_field(site):
    """Its second derivative there is the fourth of log z, to the last digits."""
    zero = torch.zeros(site.dim, dtype=torch.float64)

    def covariance(b):
        return site.covariance(b)[0, 0]

    def slope(b):
        return torch.autograd.functional.jacobian(site.mean, b, create_graph=True)[0, 0]

    ours = torch.autograd.functional.hessian(covariance, zero)
    torch.testing.assert_close(ours, torch.autograd.functional.hessian(slope, zero))
    assert float(ours[0, 0]) < 0


@pytest.mark.parametrize("site", [Ising(), Sphere(3), LargeDSphere(4), Gaussian(2)], ids=repr)
def test_no_draws_in_a_field_that_is_not_finite(site):
    b = torch.zeros(2, site.dim)
    b[1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"b\[1, 0\] = nan"):
        site.sample(b)


# --- draws of chains ----------------------------------------------------------------------------


def test_a_chain_draws_what_it_would_draw_alone() -> None:
    """Whatever its neighbours need, and however many sites there are: to the last bit but where
    sums of many components are taken in another order."""
    for site, dtype in itertools.product(LAWS, (torch.float32, torch.float64)):
        streams = Streams.from_seed(0, (30, 2))
        b = torch.randn(30, 2, 20, site.dim, generator=torch.Generator().manual_seed(0)).to(dtype)
        b *= torch.logspace(-3, 3, 30)[:, None, None, None].to(dtype)
        alone = streams[17:18, 1:]
        some = site.sample(b, streams)
        again = site.sample(b[17:18, 1:], alone)
        assert streams.position == alone.position
        eps = 16 * torch.finfo(dtype).eps * site.scale
        torch.testing.assert_close(some[17:18, 1:], again, rtol=0, atol=eps)


def test_noise_is_made_ahead() -> None:
    """Of many sites at once, and placed one by one."""
    for site in LAWS:
        b = torch.randn(3, 40, site.dim, generator=torch.Generator().manual_seed(0)).double()
        streams = [Streams.from_seed(0, (3,)) for _ in range(2)]
        together = site.draw(b, streams[0])
        parts = zip(*(n.split(1, 1) for n in site.noise((40,), streams[1], b.dtype)), strict=True)
        singly = [site.place(b[:, i : i + 1], noise) for i, noise in enumerate(parts)]
        torch.testing.assert_close(torch.cat(singly, 1), together, rtol=1e-14, atol=1e-14)
        assert streams[0].position == streams[1].position


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_field_disturbs_no_draw(bad: float) -> None:
    for site in LAWS:
        b = torch.ones(4, 5, site.dim).double()
        sound = site.draw(b, Streams.from_seed(0, (4,)))
        b[2, 3, -1] = bad
        found = site.draw(b, Streams.from_seed(0, (4,)))
        assert not bool(found[2, 3].isfinite().all())
        found[2, 3] = sound[2, 3]
        assert torch.equal(found, sound)


@pytest.mark.stochastic
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [2, 3, 4, 7, 64])
@pytest.mark.parametrize("kappa", [0.0, 0.5, 5.0, 300.0])
def test_the_law_of_the_alignment(dtype, dim: int, kappa: float) -> None:
    """Kolmogorov-Smirnov at a significance of 1e-5 (40 cases: 4e-4 in all) against the integral of
    exp(kappa cos t) sin(t)^(D - 2) over the angle t by the midpoint rule; and the direction across
    the field has no preference, within 4 sigma. The law's own tests know its mean only."""
    draws = 20_000
    axis = torch.nn.functional.normalize(torch.arange(1.0, dim + 1).to(dtype), dim=0)
    site = Sphere(dim, radius=1.0)
    spins = site.sample((kappa * axis).expand(draws, dim), Streams.from_seed(dim, ())).double()
    axis = axis.double()
    along = spins @ axis
    cells = 200_000
    t = (torch.arange(cells).double() + 0.5) * math.pi / cells
    log_weight = kappa * (t.cos() - 1) + (dim - 2) * t.sin().log()
    distribution = (log_weight - log_weight.max()).exp().cumsum(0)
    distribution = distribution / distribution[-1]
    angle = torch.atan2((spins - along[:, None] * axis).norm(dim=-1), along).sort().values
    place = (angle / math.pi * cells).long().clamp(max=cells - 1)
    steps = torch.arange(draws).double() / draws
    distance = float((distribution[place] - steps).abs().max())
    # P(distance > x / sqrt(n)) = 2 exp(-2 x^2); 1 / n for the steps, and the width of a cell
    limit = math.sqrt(-math.log(1e-5 / 2) / 2 / draws) + 1 / draws + 1e-3
    assert distance < limit
    across = torch.nn.functional.normalize(spins - along[:, None] * axis, dim=-1)
    mean = across.mean(0)
    # Its components vary by (1 - n n^T) / (D - 1).
    sigma = ((1 - axis**2) / (dim - 1) / draws).sqrt()
    assert bool((mean.abs() < 4.5 * sigma).all())
