"""The Energy Transformer: its energies, its norm, and the descent of both together."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

from spinformer.descent import descend
from spinformer.descent.energy import SumEnergy
from spinformer.descent.energy_transformer import (
    EnergyAttention,
    EnergyHopfield,
    EnergyLayerNorm,
    EnergyTransformer,
    EnergyTransformerStep,
)
from spinformer.descent.hopfield import HopfieldEnergy

EPS = torch.finfo(torch.float64).eps
ROUNDING = 1e-12


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def attention(generator, heads=2, d=6, width=3, scale=1.0, kind="random", **options):
    query = scale * draw(generator, heads, d, width)
    key = {"random": scale * draw(generator, heads, d, width), "like": query, "unlike": -query}
    return EnergyAttention(query, key[kind], **options)


def by_loops(energy, g):
    """The definition, pair by pair."""
    total = 0.0
    for query, key in zip(energy.query, energy.key, strict=True):
        for q in range(len(g)):
            scores = [energy.beta * (g[k] @ key) @ (g[q] @ query) for k in range(len(g)) if k != q]
            total = total - torch.stack(scores).logsumexp(0) / energy.beta
    return total


def test_energy_is_its_definition(generator):
    energy = attention(generator, beta=0.7)
    g = draw(generator, 4, 6)
    torch.testing.assert_close(energy.energy(g), by_loops(energy, g))
    assert EnergyAttention(energy.query, energy.key).beta == 1 / math.sqrt(3)
    memory = EnergyHopfield(draw(generator, 9, 6))
    expected = -sum(F.relu(x @ t) ** 2 for x in memory.patterns for t in g) / 2
    torch.testing.assert_close(memory.energy(g), expected)


def test_a_token_alone_feels_nothing(generator):
    energy = attention(generator)
    alone = draw(generator, 2, 1, 6)
    assert (energy.energy(alone) == 0).all() and (energy.gradient(alone) == 0).all()
    assert (energy.curvature(alone) == 0).all()
    assert torch.equal(energy.step(alone), alone)
    assert energy.energy(alone[:, :0]).shape == (2,)
    assert energy.gradient(alone[:, :0]).shape == (2, 0, 6)
    others = torch.tensor([False, True, True])
    g = draw(generator, 3, 6)
    assert energy.energy(g, others) == 0


def test_no_token_attends_to_itself(generator):
    """The authors' program lets it; then a token alone has the energy of its own score."""
    energy = attention(generator)
    g = draw(generator, 5, 6)
    assert (energy.attention(g).diagonal(dim1=-2, dim2=-1) == 0).all()
    torch.testing.assert_close(energy.attention(g).sum(-1), torch.ones(2, 5, dtype=torch.float64))
    program = EnergyAttention(energy.query, energy.key, attend_self=True)
    own = sum((g[0] @ k) @ (g[0] @ q) for q, k in zip(energy.query, energy.key, strict=True))
    torch.testing.assert_close(program.energy(g[:1]), -own)
    assert (program.gradient(g) - energy.gradient(g)).abs().max() > 0.1


@pytest.mark.parametrize("graph", [None, "bool", "float"])
def test_gradient(graph, generator):
    if graph is not None:
        graph = torch.rand(4, 4, generator=generator, dtype=torch.float64)
        graph = graph > 0.4 if graph.numel() and graph.dtype == torch.bool else graph
    beta = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    base = attention(generator)
    query, key = base.query.requires_grad_(), base.key.requires_grad_()
    patterns = draw(generator, 7, 6).requires_grad_()
    mask = torch.tensor([[False] * 4, [False, True, False, False]])

    def terms(query, key, beta, patterns):
        return EnergyAttention(query, key, beta, graph=graph) + EnergyHopfield(patterns)

    def value(g, *weights):
        return terms(*weights).energy(g, mask)

    g = draw(generator, 2, 4, 6).requires_grad_()
    weights = (query, key, beta, patterns)
    (by_autograd,) = torch.autograd.grad(value(g, *weights).sum(), g)
    torch.testing.assert_close(terms(*weights).gradient(g, mask), by_autograd)
    assert torch.autograd.gradcheck(value, (g, *weights))
    assert torch.autograd.gradgradcheck(
        lambda g, beta: value(g, query.detach(), key.detach(), beta, patterns.detach()), (g, beta)
    )


def test_graphs(generator):
    g = draw(generator, 5, 6)
    energy = attention(generator)
    allowed = torch.rand(5, 5, generator=generator) > 0.4
    allowed[2] = False  # a query without anybody
    some = EnergyAttention(energy.query, energy.key, graph=allowed)
    torch.testing.assert_close(
        EnergyAttention(energy.query, energy.key, graph=allowed.double()).energy(g), some.energy(g)
    )
    weights = some.attention(g)
    assert (weights[:, ~allowed] == 0).all() and (weights[:, 2] == 0).all()
    bonds = allowed.double().requires_grad_()
    weighed = EnergyAttention(energy.query, energy.key, graph=bonds)
    (slope,) = torch.autograd.grad(weighed.energy(g) + weighed.step(g).square().sum(), bonds)
    assert slope.isfinite().all() and (slope[~allowed] == 0).all()
    off = allowed & ~torch.eye(5, dtype=torch.bool)
    assert (slope[off] != 0).all()
    g.requires_grad_()
    (slope,) = torch.autograd.grad(some.energy(g), g)
    torch.testing.assert_close(some.gradient(g), slope)
    # A causal mask has an energy, but not a causal force: the past hears those that attend to it.
    causal = EnergyAttention(energy.query, energy.key, graph=torch.ones(5, 5).tril().bool())
    jacobian = torch.autograd.functional.jacobian(causal.gradient, g.detach())
    assert jacobian[0, :, 4].abs().max() > 1e-6


def test_query_force_is_conventional_attention(generator):
    """Values W_Q^T W_K g; the key force is what such a layer lacks, and what descent needs."""
    energy = attention(generator, heads=1)
    g = draw(generator, 5, 6)
    as_query, as_key = energy.forces(g)
    q, k = g @ energy.query[0], g @ energy.key[0]
    others = ~torch.eye(5, dtype=torch.bool)
    expected = F.scaled_dot_product_attention(
        q[None], k[None], (k @ energy.query[0].mT)[None], attn_mask=others
    )
    torch.testing.assert_close(as_query, expected.squeeze(0))
    torch.testing.assert_close(energy.gradient(g), -(as_query + as_key))
    # Alone it is no descent: with an antisymmetric product of the weights it often climbs.
    matrix = draw(generator, 1, 6, 6)
    turning = EnergyAttention(matrix - matrix.mT, torch.eye(6, dtype=torch.float64)[None], 0.3)
    g = 0.5 * draw(generator, 2000, 3, 6)
    as_query, as_key = turning.forces(g)
    product = (as_query * (as_query + as_key)).sum((-2, -1))
    assert (product < 0).sum() > 100
    climbed = turning.energy(g + 1e-4 * as_query) > turning.energy(g)
    assert climbed[product < -1e-3].all()


def test_clamped_keys_are_the_modern_hopfield_network(generator):
    """The energy of a query towards fixed keys is that of Ramsauer et al. less |q|^2 / 2."""
    energy = attention(generator, heads=1, beta=0.8)
    g = draw(generator, 6, 6)
    keys, query = g[1:] @ energy.key[0], g[:1] @ energy.query[0]
    only = torch.zeros(6, 6, dtype=torch.bool)
    only[0, 1:] = True
    ours = EnergyAttention(energy.query, energy.key, 0.8, graph=only).energy(g)
    hopfield = HopfieldEnergy(keys, 0.8).energy(query) - query.square().sum() / 2
    torch.testing.assert_close(ours, hopfield)


@pytest.mark.parametrize("kind", ["random", "like", "unlike"])
def test_attention_alone_never_rises(kind, generator):
    """Majorize-minimize in g, without a norm: 6,000 systems, weights of all sizes and signs."""
    for n in (2, 3, 7):
        for scale in (0.1, 1.0, 3.0):
            for with_memory in (False, True):
                energy = attention(generator, scale=scale, kind=kind)
                if with_memory:
                    energy = energy + EnergyHopfield(scale * draw(generator, 8, 6))
                g = torch.exp(draw(generator, 112, 1, 1)) * draw(generator, 112, n, 6)
                before = energy.energy(g)
                for size in (0.5, 1.0, 2.0):
                    moved = energy.step(g, size)
                    after = energy.energy(moved)
                    tolerance = ROUNDING * (1 + before.abs() + after.abs())
                    assert (after - before <= tolerance).all()


def test_curvature_is_an_upper_bound(generator):
    for kind in ("random", "like", "unlike"):
        energy = attention(generator, kind=kind) + EnergyHopfield(draw(generator, 8, 6))
        g, v = draw(generator, 1000, 4, 6), 2 * draw(generator, 1000, 4, 6)
        bound = energy.energy(g) + (energy.gradient(g) * v).sum((-2, -1))
        bound = bound + (energy.curvature(g)[..., None] * v.square()).sum((-2, -1)) / 2
        assert (energy.energy(g + v) <= bound + ROUNDING * bound.abs()).all()


def test_hessian_bounds(generator):
    for attend_self in (False, True):
        for kind in ("like", "unlike"):
            energy = attention(generator, kind=kind, attend_self=attend_self)
            lower, upper = energy.hessian_bounds(4)
            assert lower == -math.inf
            for g in 0.5 * draw(generator, 10, 4, 6):
                hessian = torch.autograd.functional.hessian(energy.energy, g).reshape(24, 24)
                assert torch.linalg.eigvalsh(hessian).max() <= upper
    memory = EnergyHopfield(draw(generator, 8, 6))
    hessian = torch.autograd.functional.hessian(memory.energy, draw(generator, 1, 6)).squeeze()
    eigenvalues = torch.linalg.eigvalsh(hessian.reshape(6, 6))
    lower, upper = memory.hessian_bounds(1)
    assert lower <= eigenvalues.min() and eigenvalues.max() <= upper + 1e-14


def test_memory_descends_at_any_size(generator):
    memory = EnergyHopfield(draw(generator, 8, 6))
    g = draw(generator, 500, 3, 6)
    assert memory.step_bound() == math.inf
    for size in (0.1, 10.0, 1e4):
        assert (memory.energy(memory.step(g, size)) <= memory.energy(g)).all()


def test_norm_is_layer_norm_and_the_gradient_of_a_convex_function(generator):
    bias = draw(generator, 6)
    norm = EnergyLayerNorm(1.7, bias, eps=0.01)
    x = torch.exp(2 * draw(generator, 500, 1)) * draw(generator, 500, 6)
    torch.testing.assert_close(norm(x), 1.7 * F.layer_norm(x, (6,), eps=0.01) + bias)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(norm.lagrangian(x).sum(), x)
    torch.testing.assert_close(slope, norm(x))
    for point in x.detach()[:50]:
        jacobian = torch.autograd.functional.jacobian(norm, point)
        torch.testing.assert_close(jacobian, jacobian.mT)
        eigenvalues = torch.linalg.eigvalsh(jacobian)
        limit = 1.7 / norm.scale(point)
        assert eigenvalues.min() >= -1e-14 * limit
        torch.testing.assert_close(eigenvalues.max(), limit)
        # The mean is lost for ever; the length, up to eps.
        assert eigenvalues[0].abs() < 1e-13 * limit
        along = 1.7 * 0.01 / norm.scale(point) ** 3
        assert (eigenvalues - along).abs().min() < 1e-12 * limit
    constant = torch.full((6,), 3.0, dtype=torch.float64)
    torch.testing.assert_close(norm(constant), bias)


def test_a_gain_for_each_component_has_no_lagrangian(generator):
    x = draw(generator, 6)
    gain = torch.rand(6, generator=generator, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda y: gain * F.layer_norm(y, (6,)), x)
    assert (jacobian - jacobian.mT).abs().max() > 0.1
    with pytest.raises(ValueError, match="gradient of a Lagrangian"):
        EnergyLayerNorm(gain)


def transformer(generator, kind="random", scale=1.0, gain=1.3, memory=True, d=6):
    terms = attention(generator, d=d, scale=scale, kind=kind)
    if memory:
        terms = terms + EnergyHopfield(scale * draw(generator, 8, d))
    return EnergyTransformer(EnergyLayerNorm(gain, 0.3 * draw(generator, d)), terms)


def tokens(generator, *shape):
    """Norms over four decades: the norm is steepest at tokens that are nearly constant."""
    return torch.exp(2 * draw(generator, *shape[:-2], 1, 1)) * draw(generator, *shape)


@pytest.mark.parametrize("kind", ["random", "like", "unlike"])
def test_continuous_flow_descends(kind, generator):
    """The rate is the derivative along the force, and never positive: 3,000 systems."""
    for n in (1, 2, 6):
        model = transformer(generator, kind)
        x = tokens(generator, 350, n, 6)
        rate = model.rate(x)
        assert (rate <= 0).all()
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model.energy(x).sum(), x)
        by_autograd = (slope * model.force(x)).sum((-2, -1))
        torch.testing.assert_close(rate, by_autograd, rtol=1e-7, atol=1e-7)


def test_negative_gains_climb(generator):
    """With a negative gain the Jacobian is negative semi-definite, and the same flow ascends."""
    model = transformer(generator, gain=torch.tensor(-1.0, dtype=torch.float64))
    x = tokens(generator, 200, 3, 6)
    assert (model.rate(x) >= 0).all()
    assert (model.energy(model.step(x, 1e-6)) > model.energy(x)).double().mean() > 0.9
    with pytest.raises(ValueError, match="must not be negative"):
        EnergyLayerNorm(-1.0)


@pytest.mark.parametrize("kind", ["random", "like", "unlike"])
@pytest.mark.parametrize("memory", [False, True])
def test_safe_steps_never_rise(kind, memory, generator):
    """9,000 systems, at the bound and below; steps of a fixed size rise in some of them."""
    risen = 0
    for n in (1, 2, 4, 8):
        for scale in (0.1, 1.0, 3.0):
            model = transformer(generator, kind, scale, memory=memory)
            x = tokens(generator, 125, n, 6)
            before = model.energy(x)
            size = model.safe_size(x)
            assert (size >= 0).all() and size.isfinite().all()
            # What is added to a token deviates less from its mean than the token does.
            added = (size * model.force(x)).var(-1, correction=0)
            assert (added <= (1 + ROUNDING) * model.norm.scale(x).square()).all()
            for fraction in (0.2, 0.5, 1.0):
                after = model.energy(model.step(x, fraction * size))
                assert (after - before <= ROUNDING * (1 + before.abs())).all()
            for fixed in (0.1, 1.0, 10.0):
                after = model.energy(model.step(x, fixed))
                risen += int((after - before > 1e-9 * (1 + before.abs())).sum())
    assert risen > 5


def test_safe_size_is_within_a_factor_of_the_truth(generator):
    """Twenty times the bound rises in some systems: it is not idle."""
    risen = 0
    for _ in range(10):
        model = transformer(generator, "unlike", 0.5, memory=False)
        x = tokens(generator, 200, 2, 6)
        after = model.energy(model.step(x, 20 * model.safe_size(x)))
        risen += int((after > model.energy(x) + 1e-9).sum())
    assert risen > 20


def test_g_comes_to_rest_and_x_does_not(generator):
    """Their fixed points are those of g: the length of x grows at a constant rate."""
    model = transformer(generator, "like", memory=True)
    x = draw(generator, 20, 3, 6)
    lengths, normalized, energies = [], [], []
    for _ in range(3):
        for _ in range(1500):
            x = model.step(x, 0.5)
        lengths.append(x.norm(dim=(-2, -1)))
        normalized.append(model.normalized(x))
        energies.append(model.energy(x))
    early, late = lengths[1] - lengths[0], lengths[2] - lengths[1]
    torch.testing.assert_close(early, late, rtol=0.05, atol=0)
    assert (late > 100).all()
    # As x grows, g turns ever more slowly: the change over the same time shrinks.
    assert (normalized[2] - normalized[1]).norm() < 0.6 * (normalized[1] - normalized[0]).norm()
    assert (normalized[2] - normalized[1]).abs().mean() < 0.02
    assert (energies[2] <= energies[1]).all()
    # g is bounded by the norm, hence so is the energy; the force does not vanish.
    limit = 1.3 * math.sqrt(6) + model.norm.bias.norm()
    assert (normalized[2].norm(dim=-1) <= limit).all()
    assert (model.force(x).norm(dim=-1) > 0.1).all()


def test_attention_alone_has_no_lower_bound(generator):
    energy = attention(generator)
    g = draw(generator, 4, 6)
    assert energy.energy(100 * g) < energy.energy(10 * g) < energy.energy(g) - 10


def test_absent_tokens_vanish(generator):
    for terms in (
        attention(generator, heads=3),
        EnergyHopfield(draw(generator, 5, 6)),
        attention(generator) + EnergyHopfield(draw(generator, 5, 6)),
    ):
        model = EnergyTransformer(EnergyLayerNorm(1.2, draw(generator, 6)), terms)
        x = draw(generator, 2, 5, 6)
        mask = torch.tensor([[False, True, False, False, True]] * 2)
        x[mask] = torch.nan
        x.requires_grad_()
        there = x[:, ~mask[0]]
        for part in (model, terms):
            total, moved = part.energy(x, mask), part.step(x, 0.1, mask)
            torch.testing.assert_close(total, part.energy(there))
            torch.testing.assert_close(moved[:, ~mask[0]], part.step(there, 0.1))
            assert (moved[mask] == 0).all()
            (slope,) = torch.autograd.grad(total.sum() + moved.sum(), x)
            assert slope.isfinite().all() and (slope[mask] == 0).all()
        assert (terms.gradient(x, mask)[mask] == 0).all()
        assert (terms.curvature(x, mask)[mask] == 0).all()
        torch.testing.assert_close(model.rate(x, mask), model.rate(there))
        size = model.safe_size(x, mask)
        torch.testing.assert_close(size[:, ~mask[0]], model.safe_size(there))
        assert (size[mask] == 0).all()


@hypothesis.given(st.integers(1, 5), st.integers(0, 2**31))
def test_invariances(n, seed):
    """Permutations of tokens, a common rotation of weights and tokens; batches don't mix."""
    generator = torch.Generator().manual_seed(seed)
    energy = attention(generator)
    memory = EnergyHopfield(draw(generator, 5, 6))
    Q = torch.linalg.qr(draw(generator, 6, 6))[0]
    g = draw(generator, 2, n, 6)
    order = torch.randperm(n, generator=generator)
    whole = SumEnergy(energy, memory)
    turned = EnergyAttention(Q @ energy.query, Q @ energy.key) + EnergyHopfield(
        memory.patterns @ Q.mT
    )
    torch.testing.assert_close(whole.gradient(g[:, order]), whole.gradient(g)[:, order])
    torch.testing.assert_close(turned.energy(g @ Q.mT), whole.energy(g))
    torch.testing.assert_close(turned.step(g @ Q.mT), whole.step(g) @ Q.mT)
    torch.testing.assert_close(whole.step(g[0]), whole.step(g)[0])
    g[0, 0, 0] = torch.nan
    assert whole.energy(g).isnan().tolist() == [True, False]


def test_large_scores_do_not_overflow(generator):
    energy = attention(generator)
    g = 60 * draw(generator, 4, 6)
    small = EnergyAttention(energy.query.float(), energy.key.float())
    torch.testing.assert_close(small.energy(g.float()), energy.energy(g).float())
    torch.testing.assert_close(
        small.gradient(g.float()), energy.gradient(g).float(), rtol=1e-4, atol=1e-3
    )


def test_safe_size_without_a_force():
    still = EnergyTransformer(EnergyLayerNorm(), EnergyHopfield(torch.zeros(2, 3)))
    assert (still.safe_size(torch.randn(4, 3)) == 0).all()


def test_errors():
    with pytest.raises(ValueError, match="one matrix a head"):
        EnergyAttention(torch.ones(2, 3, 4), torch.ones(2, 3, 5))
    with pytest.raises(ValueError, match="beta=0"):
        EnergyAttention(torch.ones(2, 3, 4), torch.ones(2, 3, 4), 0)
    with pytest.raises(ValueError, match="patterns has shape"):
        EnergyHopfield(torch.ones(3))
    with pytest.raises(ValueError, match="eps=0"):
        EnergyLayerNorm(eps=0.0)


def test_descends_under_the_eyes_of_the_monitor(generator):
    model = EnergyTransformer(EnergyLayerNorm(1.2), EnergyHopfield(draw(generator, 5, 4)))
    x = draw(generator, 3, 6, 4)
    report = descend(model, x, EnergyTransformerStep(10.0, safe=True), steps=5)
    assert report.counts()["guaranteed"] == 15
    (slope,) = torch.autograd.grad(model.energy(x.requires_grad_()).sum(), x)
    torch.testing.assert_close(model.gradient(x), slope)
    with pytest.raises(TypeError, match="EnergyHopfield: this is the step of an EnergyTransformer"):
        descend(model.terms, x, EnergyTransformerStep(1.0), steps=1)
