"""What a symmetric system says of asymmetric attention, and what it does not."""

import pytest
import torch

from spinformer.descent.asymmetric import (
    AsymmetricAttention,
    TiedEnergy,
    curl_share,
    jacobian,
    symmetric_embedding,
)
from spinformer.descent.pairwise import PairwiseEnergy

F64 = torch.float64
# Of energies of up to 72 pairs of size one: 2e-16 times that, and a margin for their differences.
ROUNDING = 1e-11


@pytest.fixture
def draw(generator):
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=F64)


def diameter(Y):
    return torch.cdist(Y, Y).amax((-2, -1))


def test_symmetric_weights_are_the_pairwise_step(draw):
    """W_Q = W_K: nothing circulates, and the energy falls."""
    Y = draw(200, 6, 3)
    W = draw(3, 3)
    for metric, value in (("attention", None), ("gradient", 0.7 * W @ W.mT)):
        model = AsymmetricAttention(W, W, value, metric=metric)
        split = model.split(Y)
        zero = torch.zeros_like(Y)
        torch.testing.assert_close(split.circulation, zero, atol=1e-9, rtol=0)
        state = Y.clone().requires_grad_()
        (by_autograd,) = torch.autograd.grad(model.energy.energy(state).sum(), state)
        torch.testing.assert_close(split.gradient, by_autograd)
        assert (split.fall <= 0).all()
        # P G is a gradient, though G is none.
        assert curl_share(model.force, Y[:10]).max() < 1e-9
        assert curl_share(model.increment, Y[:10]).max() > 1e-2
    model = AsymmetricAttention(W, W)
    rise = model.energy.energy(model.step(Y)) - model.energy.energy(Y)
    assert (rise <= ROUNDING).all()
    # The same energy as that of W itself, for only W W^T counts.
    itself = PairwiseEnergy(weights=W[None])
    torch.testing.assert_close(model.energy.energy(Y), itself.energy(Y))


def test_parts_of_the_split(draw):
    Y = draw(100, 6, 3)
    model = AsymmetricAttention(draw(3, 2), draw(3, 2), draw(3, 3))
    split = model.split(Y)
    torch.testing.assert_close(split.descent + split.circulation, model.increment(Y))
    assert (split.fall <= 1e-12).all()
    torch.testing.assert_close(
        split.fall + split.rise, (split.gradient * model.increment(Y)).sum((-2, -1))
    )
    # <grad E, G> is the slope of E along the step.
    h = 1e-6
    slope = (model.energy.energy(model.step(Y, h)) - model.energy.energy(model.step(Y, -h))) / 2 / h
    torch.testing.assert_close(split.fall + split.rise, slope, atol=1e-7, rtol=1e-5)
    tied = TiedEnergy(model.query, model.key)
    other = model.split(Y, energy=tied)
    torch.testing.assert_close(other.descent, tied.step(Y) - Y)
    assert (other.fall <= 0).all()


def test_values_that_push_away_leave_no_descent(draw):
    """V = -I: the best non-negative share of the symmetric attention is none."""
    model = AsymmetricAttention(draw(3, 2), draw(3, 2), -torch.eye(3, dtype=F64))
    split = model.split(draw(5, 6, 3))
    assert (split.descent == 0).all()


def test_the_standard_layer(draw):
    Y, Q, K, V = draw(2, 5, 4), draw(4, 2), draw(4, 2), draw(4, 4)
    model = AsymmetricAttention(Q, K, V, reweight=False, residual=True)
    expected = Y + (Y @ Q @ (Y @ K).mT).softmax(-1) @ Y @ V
    torch.testing.assert_close(model.step(Y), expected)
    assert (model.split(Y).circulation != 0).any()


def test_asymmetry_is_first_order_with_either_sign(draw):
    """A = S + epsilon K: the rise is linear in epsilon, its mean over both signs quadratic."""
    B, K = draw(2, 4, 4)
    S, K = B @ B.mT / 4, K - K.mT
    Y = draw(500, 6, 4)
    eye = torch.eye(4, dtype=F64)

    def rise(epsilon):
        return AsymmetricAttention(S + epsilon * K, eye).split(Y).rise

    small, large = 0.01, 0.02
    size = [rise(e).abs().mean() for e in (small, large)]
    assert (size[1] / size[0]).item() == pytest.approx(2, rel=0.1)
    even = [((rise(e) + rise(-e)) / 2).abs().mean() for e in (small, large)]
    assert (even[1] / even[0]).item() == pytest.approx(4, rel=0.1)
    share = (rise(small) > 0).double().mean()
    assert 0.2 < share < 0.8
    curls = [
        curl_share(AsymmetricAttention(S + e * K, eye).force, Y[:20]).mean() for e in (small, large)
    ]
    assert (curls[1] / curls[0]).item() == pytest.approx(2, rel=0.1)


def test_asymmetric_steps_raise_the_energy(draw):
    rose = 0
    for _ in range(20):
        model = AsymmetricAttention(*(draw(3, 4, 4) / 2), reweight=False)
        Y = draw(100, 8, 4)
        rose += (
            (model.energy.energy(model.step(Y)) - model.energy.energy(Y) > ROUNDING).sum().item()
        )
    # About four in five of 2,000.
    assert rose > 1000


def test_the_diameter_never_grows_for_plain_values(draw):
    """V = I: the energy may rise, the diameter cannot, whatever queries and keys are."""
    rose = 0
    for _ in range(20):
        Y = 2 * draw(100, 6, 3)
        for reweight in (True, False):
            model = AsymmetricAttention(*draw(2, 3, 3), reweight=reweight)
            moved = model.step(Y)
            assert (diameter(moved) <= diameter(Y) * (1 + 1e-12) + 1e-7).all()
            rose += (model.energy.energy(moved) > model.energy.energy(Y) + ROUNDING).sum().item()
    assert rose > 0


def test_general_values_can_go_round(draw):
    """One token, V a rotation by 90 degrees: back after four steps, so that nothing can fall."""
    quarter = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=F64)
    model = AsymmetricAttention(*draw(2, 2, 2), quarter - torch.eye(2, dtype=F64), residual=True)
    Y = draw(1, 2)
    states = [Y]
    for _ in range(4):
        states.append(model.step(states[-1]))
    torch.testing.assert_close(states[4], Y)
    assert (states[1] - Y).norm() > 0.1
    eigenvalues = torch.linalg.eigvals(jacobian(model.increment, torch.zeros(1, 2, dtype=F64)))
    assert eigenvalues.imag.abs().min() > 0.9
    # Purely antisymmetric: the whole of the field turns.
    turn = AsymmetricAttention(*draw(2, 2, 2), quarter, residual=True)
    assert curl_share(turn.increment, Y) == pytest.approx(1)


def test_rotation_of_a_gradient_is_zero(draw):
    Y = draw(3, 4, 2)
    energy = PairwiseEnergy("log1p", data_weight=0.3)
    assert curl_share(energy.gradient, Y).max() < 1e-12
    mixed = curl_share(lambda y: y + y @ y.new_tensor([[0.0, 1.0], [-1.0, 0.0]]), Y)
    torch.testing.assert_close(mixed, torch.full_like(mixed, 0.5**0.5))


def test_the_embedding_computes_the_attention_once(draw):
    Y, Q, K = draw(10, 5, 3), draw(3, 3), draw(3, 3)
    lifted = symmetric_embedding(Y, Q, K)
    queries, keys = Y @ Q, Y @ K
    for role, both in (("both", True), ("queries", False)):
        moved, other = lifted.step(lifted.tokens, role=role).chunk(2, -2)
        scores = queries @ keys.mT - keys.square().sum(-1).unsqueeze(-2) / 2
        torch.testing.assert_close(moved, scores.softmax(-1) @ keys)
        back = keys @ queries.mT - queries.square().sum(-1).unsqueeze(-2) / 2
        torch.testing.assert_close(other, back.softmax(-1) @ queries if both else keys)
    # Normalized keys: the plain softmax of asymmetric scores.
    unit = torch.nn.functional.normalize(keys, dim=-1)
    tokens = torch.cat((queries, unit), -2)
    plain = (queries @ unit.mT).softmax(-1) @ unit
    torch.testing.assert_close(lifted.step(tokens, role="queries")[:, :5], plain)


@pytest.mark.parametrize("causal", [False, True])
def test_the_embedding_descends(causal, draw):
    """0 of 4,000, causal masks included; both kinds at once only up to size 1."""
    graph = torch.ones(6, 6, dtype=torch.bool).tril() if causal else None
    above = 0
    for _ in range(10):
        Y, Q, K = draw(100, 6, 3), draw(3, 3), draw(3, 3)
        lifted = symmetric_embedding(Y, Q, K, graph=graph)
        before = lifted.energy.energy(lifted.tokens)
        for role, size in (("both", 1.0), ("both", 0.4), ("queries", 1.9), ("keys", 1.9)):
            after = lifted.energy.energy(lifted.step(lifted.tokens, size, role))
            assert (after - before <= ROUNDING).all()
        after = lifted.energy.energy(lifted.step(lifted.tokens, 1.9))
        above += (after - before > ROUNDING).sum().item()
    assert above > 100
    if causal:
        first = lifted.step(lifted.tokens, role="queries")[:, 0]
        torch.testing.assert_close(first, Y[:, 0] @ K)


def test_the_tie_is_lost_unless_the_heads_are_narrow(draw):
    Y = draw(50, 6, 4)
    wide = symmetric_embedding(Y, draw(4, 4), draw(4, 4))
    narrow = symmetric_embedding(Y, draw(4, 2), draw(4, 2))
    assert wide.untied(wide.tokens).max() < 1e-12
    assert wide.untied(wide.step(wide.tokens)).min() > 0.05
    assert narrow.untied(narrow.step(narrow.tokens)).max() < 1e-12


def test_one_token_one_lift_sees_the_symmetric_part_only(draw):
    """phi(y) = [y W_Q, y W_K] with the exchange of its halves."""
    Y, Q, K = draw(5, 4), draw(4, 3), draw(4, 3)
    z = torch.cat((Y @ Q, Y @ K), -1)
    exchanged = torch.cat((Y @ K, Y @ Q), -1)
    A = Q @ K.mT
    torch.testing.assert_close(z @ exchanged.mT, Y @ (A + A.mT) @ Y.mT)


@pytest.mark.parametrize("rho", ["exp", "log1p"])
def test_tied_energy(rho, draw):
    """An energy of asymmetric weights in one variable; half of its gradient is attention."""
    Q, K = draw(2, 3, 2)
    graph = torch.ones(5, 5, dtype=torch.bool).tril()
    energy = TiedEnergy(Q, K, rho=rho, graph=graph)
    Y = draw(300, 5, 3)
    mask = torch.zeros(300, 5, dtype=torch.bool)
    mask[1, 3:] = True
    by_autograd = jacobian(lambda y: energy.energy(y, mask)[..., None, None], Y).squeeze(-2)
    torch.testing.assert_close(energy.gradient(Y, mask).flatten(-2), by_autograd)
    q, k = Y @ Q, Y @ K
    z = torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist").square() / 2
    value = {"exp": lambda z: -torch.exp(-z), "log1p": torch.log1p}[rho]
    expected = 2 * (value(z) * graph).sum((-2, -1))
    torch.testing.assert_close(energy.energy(Y), expected)
    # The two halves: attention, and being attended to.
    weights = {"exp": lambda z: torch.exp(-z), "log1p": lambda z: 1 / (1 + z)}[rho](z) * graph
    forward = (weights.sum(-1, keepdim=True) * q - weights @ k) @ Q.mT
    back = (weights.sum(-2).unsqueeze(-1) * k - weights.mT @ q) @ K.mT
    torch.testing.assert_close(energy.gradient(Y), 2 * (forward + back))
    for size in (0.5, 1.0, 2.0):
        rise = energy.energy(energy.step(Y, size, mask), mask) - energy.energy(Y, mask)
        assert (rise <= ROUNDING).all()
    lower, upper = energy.hessian_bounds(5)
    hessians = jacobian(energy.gradient, 0.3 * Y[:100])
    eigenvalues = torch.linalg.eigvalsh((hessians + hessians.mT) / 2)
    assert eigenvalues.min() >= lower and eigenvalues.max() <= upper


def test_masks(draw):
    Y, Q, K, V = draw(3, 5, 4), draw(4, 2), draw(4, 2), draw(4, 4)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True
    mask[2] = True
    Y[1, 3:], Y[2] = torch.nan, torch.nan
    few = Y[1, :3]
    model = AsymmetricAttention(Q, K, V)
    moved = model.step(Y, 0.5, mask)
    torch.testing.assert_close(moved[1, :3], model.step(few, 0.5))
    assert (moved[1, 3:] == 0).all() and (moved[2] == 0).all()
    split, alone = model.split(Y, mask), model.split(few)
    torch.testing.assert_close(split.descent[1, :3], alone.descent)
    torch.testing.assert_close(split.rise[1], alone.rise)
    lifted, small = symmetric_embedding(Y, Q, K, mask), symmetric_embedding(few, Q, K)
    moved = lifted.step(lifted.tokens)[1]
    both = small.step(small.tokens)
    torch.testing.assert_close(moved[[0, 1, 2, 5, 6, 7]], both)
    tied = TiedEnergy(Q, K)
    torch.testing.assert_close(tied.energy(Y, mask)[1], tied.energy(few))


def test_derivatives(draw):
    Q, K, V = (x.requires_grad_() for x in draw(3, 3, 3))
    Y = draw(4, 3).requires_grad_()
    run = (Q, K, V, Y)
    assert torch.autograd.gradcheck(lambda q, k, v, y: AsymmetricAttention(q, k, v).step(y), run)
    assert torch.autograd.gradgradcheck(lambda q, k, y: TiedEnergy(q, k).energy(y), (Q, K, Y))


def test_bad_input_raises(draw):
    Q, K = draw(2, 3, 2)
    with pytest.raises(ValueError, match=r"\(3, 2\) and \(2, 3\)"):
        AsymmetricAttention(Q, K.mT)
    with pytest.raises(ValueError, match="must be square"):
        AsymmetricAttention(Q, K, Q)
    with pytest.raises(ValueError, match="nearest is 'gradient'"):
        AsymmetricAttention(Q, K, metric="gradien")
    lifted = symmetric_embedding(draw(4, 3), Q, K)
    with pytest.raises(ValueError, match="nearest is 'queries'"):
        lifted.step(lifted.tokens, role="query")
