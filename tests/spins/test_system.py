"""The system's conventions, and what it refuses at the border."""

import pytest
import torch

import spinformer as sf

F64 = torch.float64


@pytest.fixture
def parts(generator):
    j = torch.randn(2, 4, 4, generator=generator, dtype=F64)
    h = torch.randn(2, 4, 3, generator=generator, dtype=F64)
    s = torch.randn(2, 4, 3, generator=generator, dtype=F64)
    return j, h, s


def test_two_aligned_unit_spins_have_energy_minus_one():
    j = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
    up = torch.tensor([[1.0, 0, 0], [1.0, 0, 0]], dtype=F64)
    assert float(sf.SpinSystem(j, 0 * up, site=sf.Sphere(3, radius=1.0)).energy(up)) == -1.0


def test_force_is_minus_the_gradient_of_the_energy(parts):
    j, h, s = parts
    system = sf.SpinSystem(j, h, site=sf.Sphere(3), symmetrize=True)
    s.requires_grad_()
    (gradient,) = torch.autograd.grad(system.energy(s).sum(), s)
    torch.testing.assert_close(system.force(s), -gradient, rtol=1e-12, atol=1e-12)
    off = (j + j.mT) / 2 * (1 - torch.eye(4, dtype=F64))
    torch.testing.assert_close(system.force(s), h + off @ s, rtol=1e-12, atol=1e-12)


def test_energy_difference_of_a_move_is_field_times_change(parts):
    j, h, s = parts
    system = sf.SpinSystem(j, h, site=sf.Sphere(3), symmetrize=True)
    moved = s.clone()
    moved[:, 1] += 0.3
    change = system.energy(moved) - system.energy(s)
    expected = -(system.force(s)[:, 1] * (moved - s)[:, 1]).sum(-1)
    torch.testing.assert_close(change, expected, rtol=1e-12, atol=1e-12)


def test_energy_sees_the_symmetric_part_and_no_diagonal(parts):
    j, h, s = parts
    energy = sf.SpinSystem(j, h, site=sf.Sphere(3)).energy(s)
    symmetric = sf.SpinSystem((j + j.mT) / 2, h, site=sf.Sphere(3)).energy(s)
    shifted = sf.SpinSystem(j + 7 * torch.eye(4, dtype=F64), h, site=sf.Sphere(3)).energy(s)
    torch.testing.assert_close(energy, symmetric, rtol=1e-12, atol=1e-12)
    assert torch.equal(energy, shifted)


def test_absent_sites_change_nothing(parts):
    j, h, s = parts
    mask = torch.tensor([False, True, False, False])
    broken_j, broken_h = j.clone(), h.clone()
    broken_j[:, 1], broken_j[:, :, 1], broken_h[:, 1] = torch.nan, torch.inf, torch.nan
    system = sf.SpinSystem(broken_j, broken_h, site=sf.Sphere(3), mask=mask)
    keep = [0, 2, 3]
    alone = sf.SpinSystem(j[:, keep][:, :, keep], h[:, keep], site=sf.Sphere(3))
    torch.testing.assert_close(system.energy(s), alone.energy(s[:, keep]))
    torch.testing.assert_close(system.force(s)[:, keep], alone.force(s[:, keep]))
    assert not system.force(s)[:, 1].any()
    assert system.num_present.tolist() == [3, 3]


def test_leading_axes_broadcast(parts):
    j, h, s = parts
    system = sf.SpinSystem(j[0], h[:, None], torch.ones(5, dtype=F64), sf.Sphere(3))
    assert system.batch_shape == (2, 5)
    assert system.field.shape == (2, 5, 4, 3) and system.beta.shape == (2, 5)
    assert system.energy(s[0]).shape == (2, 5)


def test_replace_keeps_the_rest(parts):
    j, h, s = parts
    system = sf.SpinSystem(j, h, 0.7, sf.Sphere(3), symmetrize=True)
    colder = system.replace(beta=1.4)
    assert torch.equal(colder.energy(s), system.energy(s))
    assert colder.beta.tolist() == [1.4, 1.4]


def nan_at(tensor, *index):
    tensor = tensor.clone()
    tensor[index] = torch.nan
    return tensor


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda j, h: {"couplings": j[:, :3]}, ValueError, "square"),
        (lambda j, h: {"couplings": j[:, :3, :3]}, ValueError, "between 3 spins.*4 spins"),
        (lambda j, h: {"couplings": nan_at(j, 0, 1, 2)}, ValueError, r"\[0, 1, 2\].*finite"),
        (lambda j, h: {"couplings": j.float()}, TypeError, "float32.*float64"),
        (lambda j, h: {"couplings": j.long()}, TypeError, "int64"),
        (lambda j, h: {"couplings": [[0.0]]}, TypeError, "list"),
        (lambda j, h: {"couplings": j.expand(3, 2, 4, 4)[:, 0]}, ValueError, "broadcast"),
        (lambda j, h: {"field": nan_at(h, 1, 2, 0)}, ValueError, r"field\[1, 2, 0\] = nan"),
        (lambda j, h: {"field": h[..., :2]}, ValueError, "2 components.*dim=3"),
        (lambda j, h: {"field": h[0, :, 0]}, ValueError, r"\(\.\.\., N, D\)"),
        (lambda j, h: {"field": h.long()}, TypeError, "int64"),
        (lambda j, h: {"beta": 0.0}, ValueError, "beta=.*positive"),
        (lambda j, h: {"beta": -1.0}, ValueError, "beta=.*positive"),
        (lambda j, h: {"beta": torch.nan}, ValueError, "beta=.*finite"),
        (lambda j, h: {"site": None}, TypeError, "site=None"),
        (lambda j, h: {"site": sf.Ising()}, ValueError, "dim=1"),
        (lambda j, h: {"mask": torch.zeros(4)}, ValueError, "mask is torch.float32"),
        (
            lambda j, h: {"mask": torch.zeros(3, dtype=torch.bool)},
            ValueError,
            "mask.*True = absent",
        ),
    ],
)
def test_bad_input_names_argument_value_and_remedy(parts, change, error, match):
    j, h, _ = parts
    good = {"couplings": j, "field": h, "beta": 1.0, "site": sf.Sphere(3)}
    with pytest.raises(error, match=match):
        sf.SpinSystem(**(good | change(j, h)))


def test_ambiguous_matrix_valued_couplings_are_refused():
    j, h = torch.zeros(3, 3, 3, 3), torch.zeros(3, 3)
    with pytest.raises(ValueError, match="two ways"):
        sf.SpinSystem(j, h, site=sf.Sphere(3))
    blocks = sf.SpinSystem(sf.couplings.MatrixValued(j), h, site=sf.Sphere(3))
    assert blocks.couplings.dim == 3 and blocks.batch_shape == ()


def test_free_energy_needs_symmetric_couplings(parts):
    j, h, _ = parts
    system = sf.SpinSystem(j, h, 0.1, sf.Sphere(3))
    with pytest.raises(ValueError, match="symmetrize=True"):
        sf.MeanField().solve(system).free_energy  # noqa: B018
    assert torch.isfinite(sf.MeanField().solve(system).magnetization).all()


def test_what_is_replaced_is_checked(parts):
    j, h, s = parts
    system = sf.SpinSystem(j, h, 0.7, sf.Sphere(3))
    with pytest.raises(ValueError, match="beta=.*positive"):
        system.replace(beta=-1.0)
    with pytest.raises(ValueError, match="finite"):
        system.replace(field=h * torch.nan)
    mask = torch.tensor([True, False, False, False])
    masked = system.replace(mask=mask)
    torch.testing.assert_close(masked.replace(mask=None).energy(s), system.energy(s))
    with pytest.raises(ValueError, match="beta=.*positive"):
        sf.SpinSystem(j, h, -1.0, sf.Sphere(3), check_finite=False)


def test_states_are_checked_and_absent_spins_ignored(parts):
    j, h, s = parts
    with pytest.raises(ValueError, match=r"spins have shape \(2, 4, 1\).*4, 3"):
        sf.SpinSystem(j, h, site=sf.Sphere(3)).energy(s[..., :1])
    mask = torch.tensor([True, False, False, False])
    system = sf.SpinSystem(j, h, site=sf.Sphere(3), mask=mask)
    broken = s.clone()
    broken[:, 0] = torch.nan
    assert torch.equal(system.energy(broken), system.energy(s))
    assert torch.equal(system.force(broken), system.force(s))


def test_isolated_clears_broken_members_only(parts):
    j, h, _ = parts
    sound = sf.SpinSystem(j, h, 0.7, sf.Sphere(3))
    assert sound.isolated() == (sound, None)
    system = sf.SpinSystem(nan_at(j, 1, 0, 2), h, 0.7, sf.Sphere(3), check_finite=False)
    clean, broken = system.isolated()
    assert broken.tolist() == [False, True]
    assert torch.equal(clean.couplings.to_dense()[0], sound.couplings.to_dense()[0])
    assert not clean.couplings.to_dense()[1].any() and not clean.field[1].any()


def test_half_precision_is_refused(parts):
    j, h, _ = parts
    with pytest.raises(TypeError, match="bfloat16.*float32 or float64"):
        sf.SpinSystem(j.bfloat16(), h.bfloat16(), site=sf.Sphere(3))


def test_isolated_keeps_factors_that_sound_members_share(generator):
    """NaN in one member's weights; the factor has as many sites as there are members."""
    left = torch.randn(2, 3, generator=generator, dtype=F64)
    weights = torch.randn(2, 3, generator=generator, dtype=F64)
    h = torch.ones(2, 2, 3, dtype=F64)
    sound = sf.couplings.LowRank(left, weights=weights)
    spoiled = sound.with_tensors(left, nan_at(weights, 1, 0))
    clean, broken = sf.SpinSystem(spoiled, h, site=sf.Sphere(3), check_finite=False).isolated()
    assert broken.tolist() == [False, True]
    assert torch.equal(clean.couplings.to_dense()[0], sound.to_dense()[0])
    assert not clean.couplings.to_dense()[1].any()


def test_isolated_takes_out_what_a_solver_lost(parts):
    j, h, _ = parts
    system = sf.SpinSystem(j[0], h, torch.tensor([0.7, 1e308], dtype=F64), sf.Sphere(3))
    clean, broken = system.isolated(torch.tensor([False, True]))
    assert broken.tolist() == [False, True]
    assert clean.beta.tolist() == [0.7, 1.0]
    assert not clean.field[1].any()
    assert torch.equal(clean.couplings.to_dense(), system.couplings.to_dense())  # shared
    alone = sf.SpinSystem(j, h, site=sf.Sphere(3)).isolated(torch.tensor([False, True]))[0]
    assert not alone.couplings.to_dense()[1].any()
