"""One contract for every approximation: thermodynamic identities, symmetries, masks, batches.

Identities are tested by finite differences of log Z alone, so that a slip in any closed form shows.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from spinformer.equilibrium.adaptive_tap import AdaptiveTAP
from spinformer.equilibrium.bethe import Bethe
from spinformer.equilibrium.exact import Exact
from spinformer.equilibrium.mean_field import MeanField
from spinformer.equilibrium.steepest_descent import SteepestDescent
from spinformer.equilibrium.tap import TAP
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem
from spinformer.thermo.equilibrium import Equilibrium


@dataclass(frozen=True)
class Case:
    """A solver with a site law, and the couplings that it can solve."""

    name: str
    solver: MeanField | TAP | AdaptiveTAP | Bethe | SteepestDescent | Exact
    site: SiteLaw
    num_spins: int = 3
    strength: float = 0.4
    in_field: bool = True
    bonds: str = "all"  # "all" or "chain"

    def system(self, seed: int = 0, *, field: Tensor | None = None, **options) -> SpinSystem:
        n = self.num_spins
        generator = torch.Generator().manual_seed(seed)
        matrix = torch.randn(n, n, generator=generator, dtype=torch.float64)
        matrix = self.strength * (matrix + matrix.mT) / 2
        matrix = torch.sign(matrix) * (matrix.abs() + 0.1)  # no bond of a chain is close to zero
        if self.bonds == "chain":
            matrix = matrix.diagonal(1).diag(1) + matrix.diagonal(1).diag(-1)
        if field is None:
            field = torch.randn(n, self.site.dim, generator=generator, dtype=torch.float64)
            field = field * (0.7 if self.in_field else 0.0)
        beta = options.pop("beta", 0.8)
        return SpinSystem(options.pop("couplings", matrix), field, beta, self.site, **options)

    def solve(self, system: SpinSystem) -> Equilibrium:
        return self.solver.solve(system)


# Residuals of 1e-13 leave finite differences of first derivatives (step 1e-2 here) exact to 1e-11.
MEAN_FIELD = MeanField(tolerance=1e-13)
REACTION = TAP(solver="anderson", tolerance=1e-13)
ADAPTIVE = AdaptiveTAP(tolerance=1e-13)
BETHE = Bethe(tolerance=1e-14)
CASES = [
    Case("mean field, Ising", MEAN_FIELD, Ising()),
    Case("mean field, sphere", MEAN_FIELD, Sphere(3)),
    Case("mean field, large D", MEAN_FIELD, LargeDSphere(3, radius=1.2)),
    Case("mean field, Gaussian", MEAN_FIELD, Gaussian(2, 0.6), strength=0.3),
    Case("mean field, no field", MEAN_FIELD, Sphere(3), strength=0.2, in_field=False),
    Case("TAP, Ising", REACTION, Ising()),
    Case("TAP, sphere", REACTION, Sphere(3)),
    Case("TAP, large D", REACTION, LargeDSphere(3, radius=1.2)),
    Case("TAP, Gaussian", REACTION, Gaussian(2, 0.6), strength=0.3),
    Case("TAP, no field", REACTION, Sphere(3), strength=0.2, in_field=False),
    Case("adaptive TAP, Ising", ADAPTIVE, Ising()),
    Case("adaptive TAP, sphere", ADAPTIVE, Sphere(3)),
    Case("adaptive TAP, large D", ADAPTIVE, LargeDSphere(3, radius=1.2)),
    Case("adaptive TAP, Gaussian", ADAPTIVE, Gaussian(2, 0.6), strength=0.3),
    Case("adaptive TAP, no field", ADAPTIVE, Sphere(3), in_field=False),
    Case("Bethe, Ising", BETHE, Ising()),
    Case("Bethe, tree", BETHE, Ising(), num_spins=4, bonds="chain"),
    Case("Bethe, spheres", BETHE, Sphere(3), strength=0.2, in_field=False),
    Case("Bethe, large D", BETHE, LargeDSphere(3, radius=1.2), strength=0.2, in_field=False),
    Case("SD0, site", SteepestDescent(auxiliary="site"), Sphere(3)),
    Case("SD0, shared", SteepestDescent(auxiliary="shared"), Sphere(3)),
    Case("SD1, site", SteepestDescent(auxiliary="site", fluctuations=True), Sphere(3)),
    Case("SD1, shared", SteepestDescent(auxiliary="shared", fluctuations=True), Sphere(3)),
    Case("SD0, no field", SteepestDescent(auxiliary="site"), Sphere(3), in_field=False),
    Case("exact, Ising", Exact(), Ising()),
    Case("exact, two spheres", Exact(), Sphere(3), num_spins=2),
    Case("exact, chain", Exact(), Sphere(3), bonds="chain", in_field=False),
    Case("exact, Gaussian", Exact(), Gaussian(2, 0.6), strength=0.3),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
spheres = pytest.mark.parametrize(
    "case", [c for c in CASES if c.site.radius is not None], ids=lambda case: case.name
)
in_field = pytest.mark.parametrize(
    "case", [c for c in CASES if c.in_field], ids=lambda case: case.name
)

# Every kind of answer once, for what does not depend on the law of a spin: gradient modes, shapes.
KINDS = (
    "mean field, sphere",
    "TAP, Ising",
    "TAP, sphere",
    "adaptive TAP, Ising",
    "Bethe, Ising",
    "Bethe, spheres",
    "SD0, site",
    "SD0, shared",
    "SD1, site",
    "SD1, shared",
    "exact, Ising",
    "exact, chain",
)
every_kind = pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in KINDS], ids=lambda case: case.name
)

STEP = 1e-2


def slope(function: Callable[[float], Tensor], step: float = STEP) -> Tensor:
    """f'(0) by the sixth-order central difference: error step^6 f^(7) / 140 = 1e-14 f^(7)."""
    weights = {1: 3 / 4, 2: -3 / 20, 3: 1 / 60}
    total = [w * (function(k * step) - function(-k * step)) for k, w in weights.items()]
    return sum(total[1:], total[0]).detach() / step


def close(found: Tensor, expected: Tensor, rtol: float = 1e-8, atol: float = 1e-9) -> None:
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=rtol, atol=atol)


QUANTITIES = (
    "log_partition",
    "free_energy",
    "internal_energy",
    "entropy",
    "specific_heat",
    "magnetization",
    "correlations",
    "susceptibility",
)


def quantity(equilibrium: Equilibrium, name: str) -> Tensor:
    value = getattr(equilibrium, name)
    return value if isinstance(value, Tensor) else value()


def quantities(equilibrium: Equilibrium) -> dict[str, Tensor]:
    """What symmetries and batching are checked on; totals first."""
    return {name: quantity(equilibrium, name) for name in QUANTITIES}


# --- how it is asked ------------------------------------------------------------------------------


@every_kind
def test_looking_without_gradients_takes_nothing_from_later_ones(case: Case) -> None:
    system = case.system()
    tensors = [system.field.clone().requires_grad_(), system.beta.clone().requires_grad_()]

    def gradients(look: bool) -> dict[str, tuple[Tensor, ...]]:
        equilibrium = case.solve(system.replace(field=tensors[0], beta=tensors[1]))
        if look:
            with torch.no_grad():
                quantities(equilibrium)
        return {
            name: torch.autograd.grad(
                value.square().sum(), tensors, retain_graph=True, materialize_grads=True
            )
            for name, value in quantities(equilibrium).items()
        }

    plain, after = gradients(look=False), gradients(look=True)
    for name in QUANTITIES:
        for one, two in zip(plain[name], after[name], strict=True):
            close(two, one)


@pytest.mark.parametrize("number", [math.nan, 1e308], ids=["NaN", "overflow"])
@pytest.mark.parametrize("where", ["couplings", "field", "beta"])
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in KINDS and not isinstance(c.solver, Exact)],
    ids=lambda case: case.name,
)
def test_a_broken_system_spoils_no_shared_gradient(case: Case, where: str, number: float) -> None:
    """Two systems, the second broken in one argument; they share the other arguments.

    By NaN, or by a finite number too large to have a square.
    """
    if case.name == "Bethe, spheres" and where == "field" and not math.isnan(number):
        pytest.skip("spheres in fields are refused")
    system = case.system()
    parts = {"couplings": system.couplings.to_dense(), "field": system.field, "beta": system.beta}
    shared = {name: part.clone().requires_grad_() for name, part in parts.items() if name != where}
    broken = torch.stack([parts[where], torch.full_like(parts[where], number)])
    solver = copy.copy(case.solver)
    if hasattr(solver, "fixed_point"):
        solver.fixed_point = dataclasses.replace(solver.fixed_point, on_failure="ignore")
    else:
        solver.on_failure = "ignore"
    pair = solver.solve(SpinSystem(**shared, **{where: broken}, site=case.site, check_finite=False))
    alone = case.solve(SpinSystem(**shared, **{where: parts[where]}, site=case.site))
    assert pair.converged.tolist() == [True, False]
    for name, value in quantities(pair).items():
        expected = quantity(alone, name)
        close(value[0], expected)
        assert value[1].isnan().all()
        for found, reference in zip(
            *(
                torch.autograd.grad(
                    x.square().sum(), shared.values(), retain_graph=True, materialize_grads=True
                )
                for x in (value[0], expected)
            ),
            strict=True,
        ):
            close(found, reference)


@every_kind
def test_inference_mode(case: Case) -> None:
    expected = quantities(case.solve(case.system()))
    with torch.inference_mode():
        found = quantities(case.solve(case.system()))
    for name, value in expected.items():
        close(found[name], value)


# --- thermodynamics ------------------------------------------------------------------------------


@every_case
def test_free_energy_is_energy_minus_temperature_times_entropy(case: Case) -> None:
    equilibrium = case.solve(case.system())
    temperature = 1 / equilibrium.system.beta
    close(
        equilibrium.free_energy,
        equilibrium.internal_energy - temperature * equilibrium.entropy,
        rtol=1e-13,
    )
    close(equilibrium.free_energy, -temperature * equilibrium.log_partition, rtol=1e-13)
    n = case.num_spins
    close(equilibrium.free_energy_per_spin * n, equilibrium.free_energy, rtol=1e-13)
    close(equilibrium.internal_energy_per_spin * n, equilibrium.internal_energy, rtol=1e-13)
    close(equilibrium.entropy_per_spin * n, equilibrium.entropy, rtol=1e-13)
    close(equilibrium.specific_heat_per_spin() * n, equilibrium.specific_heat(), rtol=1e-13)


@every_case
def test_energy_and_heat_in_temperature(case: Case) -> None:
    """U = -d log Z / d beta, C = -beta^2 dU / d beta, S = -dF/dT."""
    equilibrium = case.solve(case.system())
    beta = 0.8

    def at(change: float) -> Equilibrium:
        return case.solve(case.system(beta=beta + change))

    close(equilibrium.internal_energy, -slope(lambda e: at(e).log_partition))
    close(equilibrium.specific_heat(), -(beta**2) * slope(lambda e: at(e).internal_energy))
    entropy = -slope(lambda e: case.solve(case.system(beta=1 / (1 / beta + e))).free_energy)
    close(equilibrium.entropy, entropy)
    assert float(equilibrium.specific_heat().detach()) >= 0


@in_field
def test_magnetization_and_susceptibility_in_the_field(case: Case) -> None:
    """m = -dF/dh by autograd and by finite differences; chi = dm/dh, symmetric, positive."""
    system = case.system()
    field = system.field.clone().requires_grad_()
    equilibrium = case.solve(case.system(field=field))
    (gradient,) = torch.autograd.grad(equilibrium.free_energy, field, retain_graph=True)
    close(equilibrium.magnetization, -gradient)
    chi = equilibrium.susceptibility()
    close(chi, chi.permute(2, 3, 0, 1), rtol=1e-10)
    size = case.num_spins * case.site.dim
    assert float(torch.linalg.eigvalsh(chi.detach().reshape(size, size)).min()) > 0
    direction = torch.randn(
        field.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )

    def along(e: float) -> Equilibrium:
        return case.solve(case.system(field=system.field + e * direction))

    close((equilibrium.magnetization * direction).sum(), -slope(lambda e: along(e).free_energy))
    response = torch.einsum("iajb,jb->ia", chi, direction)
    close(response, slope(lambda e: along(e).magnetization))


@every_case
def test_correlations_are_the_response_to_couplings(case: Case) -> None:
    """<S_i . S_j> = -dF/dJ_ij. Of mean field this derivative is the product m_i . m_j."""
    system = case.system()
    equilibrium = case.solve(system)
    correlations = equilibrium.correlations("coupling")
    if isinstance(case.solver, MeanField):
        close(correlations, equilibrium.correlations("product"), rtol=1e-12)
    elif not isinstance(case.solver, TAP | Bethe):  # which have both, different ones
        close(correlations, equilibrium.correlations("linear_response"), rtol=1e-12)
    matrix = system.couplings.to_dense()
    change = torch.zeros_like(matrix)
    change[0, 1] = change[1, 0] = 1.0
    expected = -slope(lambda e: case.solve(case.system(couplings=matrix + e * change)).free_energy)
    close(correlations[0, 1], expected)
    close(correlations, correlations.mT, rtol=1e-12)


# --- second order, piece by piece ----------------------------------------------------------------


@every_case
def test_parts_of_the_susceptibility(case: Case) -> None:
    """Products, columns, diagonal blocks and totals are those of the dense one."""
    equilibrium = case.solve(case.system())
    chi = equilibrium.susceptibility()
    n, d = case.num_spins, case.site.dim
    vector = torch.randn(n, d, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    close(equilibrium.susceptibility_product(vector), torch.einsum("iajb,jb->ia", chi, vector))
    close(equilibrium.susceptibility([1, 0]), chi[:, :, [1, 0]])
    close(equilibrium.susceptibility([-1]), chi[:, :, [n - 1]])
    assert equilibrium.susceptibility([]).shape == (n, d, 0, d)
    with pytest.raises(IndexError, match=f"site {n} does not exist"):
        equilibrium.susceptibility([n])
    with pytest.raises(ValueError, match="vector"):
        equilibrium.susceptibility_product(torch.zeros(n + 1, d).double())
    close(equilibrium.local_susceptibility(), torch.einsum("iaib->iab", chi))
    close(equilibrium.uniform_susceptibility(), chi.sum((0, 2)))


@every_kind
def test_parts_of_the_susceptibility_in_a_batch(case: Case) -> None:
    """The same of every system, with absent sites left out, and differentiable."""
    _, arguments = stacked(case)
    mask = torch.zeros(3, case.num_spins, dtype=torch.bool)
    mask[1, 0] = mask[2, -1] = True
    given = {name: tensor.clone().requires_grad_() for name, tensor in arguments.items()}
    equilibrium = case.solve(case.system(**given, mask=mask, symmetrize=True))
    chi = equilibrium.susceptibility()
    vector = torch.ones_like(arguments["field"])
    close(equilibrium.susceptibility_product(vector), chi.sum((-2, -1)))
    close(equilibrium.local_susceptibility(), torch.einsum("...iaib->...iab", chi))
    close(equilibrium.uniform_susceptibility(), chi.sum((-4, -2)))
    weight = torch.randn(chi.shape, generator=torch.Generator().manual_seed(5)).double()
    dense = torch.einsum("...iaib,...iaib->", chi, weight)
    parts = (torch.einsum("...iaib->...iab", weight) * equilibrium.local_susceptibility()).sum()
    for one, other in zip(
        *(
            torch.autograd.grad(x, given.values(), retain_graph=True, materialize_grads=True)
            for x in (dense, parts)
        ),
        strict=True,
    ):
        close(one, other)


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in CASES
        if isinstance(c.solver, Exact) or c.name in ("Bethe, tree", "adaptive TAP, Gaussian")
    ],
    ids=lambda case: case.name,
)
def test_fluctuations_and_dissipation(case: Case) -> None:
    """chi = beta (<S S> - m m) on every bond: one side from fields, the other from couplings.

    An identity of what is exact: Bethe on trees and adaptive TAP of Gaussian spins are.
    """
    system = case.system()
    equilibrium = case.solve(system)
    m = equilibrium.magnetization
    connected = equilibrium.correlations("coupling") - m @ m.mT
    response = torch.einsum("iaja->ij", equilibrium.susceptibility()) / 0.8
    bonds = system.couplings.to_dense() != 0
    close(connected[bonds], response[bonds], rtol=1e-10)


@every_case
def test_stability_is_the_inverse_of_the_largest_response(case: Case) -> None:
    """All cases are stable; where a free energy exists its curvature is 1 / chi."""
    equilibrium = case.solve(case.system())
    size = case.num_spins * case.site.dim
    values = torch.linalg.eigvalsh(equilibrium.susceptibility().detach().reshape(size, size))
    stiffness = 0.8 * case.site.scale**2 / float(values.max())
    found = float(equilibrium.stability())
    if isinstance(case.solver, MeanField):
        # Of the map instead: 1 - C K has the sign, not the size, of C^-1 - K.
        assert 0 < found <= 1
        assert 0 <= float(equilibrium.spectral_radius()) < 1
    else:
        assert found == pytest.approx(stiffness, rel=1e-8)
    assert bool(equilibrium.is_stable)


@every_case
def test_strong_fields_are_stiff(case: Case) -> None:
    """A spin that a field holds answers with less than rounding, and not with an instability."""
    strong = torch.zeros(case.num_spins, case.site.dim, dtype=torch.float64)
    strong[:, 0] = torch.tensor([40.0, 1.0, 30.0, 20.0])[: case.num_spins]
    if case.in_field:
        equilibrium = case.solve(case.system(field=strong))
        assert float(equilibrium.stability()) > 0
        assert bool(equilibrium.is_stable)


@every_case
def test_order_ratio(case: Case) -> None:
    equilibrium = case.solve(case.system())
    moment = equilibrium.magnetization.sum(0)
    expected = moment.square().sum() / equilibrium.correlations().sum()
    close(equilibrium.order_ratio(), expected)
    aligned = case.system(field=100 * torch.ones(case.num_spins, case.site.dim).double())
    if case.site.radius is not None and case.in_field:
        # Relative fluctuations of a moment in a field b = 80 sqrt(D) are of order 1 / (R b).
        assert 0.9 < float(case.solve(aligned).order_ratio().detach()) <= 1


@spheres
def test_sum_rule(case: Case) -> None:
    """<|S_i|^2> = R^2, and exactly so from the fluctuations about the mean."""
    equilibrium = case.solve(case.system())
    assert case.site.radius is not None
    square = torch.full((case.num_spins,), case.site.radius**2, dtype=torch.float64)
    close(equilibrium.correlations().diagonal(), square, rtol=1e-12)
    close(equilibrium.correlations("product").diagonal(), square, rtol=1e-12)
    if isinstance(case.solver, Exact):
        own = torch.einsum("iaia->i", equilibrium.susceptibility()) / equilibrium.system.beta
        close(own + equilibrium.magnetization.square().sum(-1), square, rtol=1e-11)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if not isinstance(c.solver, SteepestDescent)],
    ids=lambda case: case.name,
)
def test_no_couplings_no_correlations(case: Case) -> None:
    """Free spins in fields follow the site law itself (in steepest descent, its large-D form)."""
    system = case.system(couplings=torch.zeros(case.num_spins, case.num_spins).double())
    equilibrium = case.solve(system)
    b = system.beta * system.field
    close(equilibrium.magnetization, case.site.mean(b), rtol=1e-12)
    close(equilibrium.log_partition, case.site.log_partition(b).sum(), rtol=1e-12)
    m = equilibrium.magnetization
    apart = ~torch.eye(case.num_spins, dtype=torch.bool)
    close(equilibrium.correlations()[apart], (m @ m.mT)[apart], rtol=1e-11)


# --- symmetries ----------------------------------------------------------------------------------


@every_case
def test_rotation(case: Case) -> None:
    system = case.system()
    generator = torch.Generator().manual_seed(2)
    square = torch.randn(case.site.dim, case.site.dim, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(square)[0]
    found = quantities(case.solve(case.system(field=system.field @ rotation.T)))
    expected = quantities(case.solve(system))
    expected["magnetization"] = expected["magnetization"] @ rotation.T
    expected["susceptibility"] = torch.einsum(
        "ca,iajb,db->icjd", rotation, expected["susceptibility"], rotation
    )
    for name, value in found.items():
        close(value, expected[name], rtol=1e-10), name


@every_case
def test_permutation(case: Case) -> None:
    system = case.system()
    order = torch.randperm(case.num_spins, generator=torch.Generator().manual_seed(3))
    matrix = system.couplings.to_dense()[order][:, order]
    found = quantities(case.solve(case.system(couplings=matrix, field=system.field[order])))
    expected = quantities(case.solve(system))
    expected["magnetization"] = expected["magnetization"][order]
    expected["correlations"] = expected["correlations"][order][:, order]
    expected["susceptibility"] = expected["susceptibility"][order][:, :, order]
    for name, value in found.items():
        close(value, expected[name], rtol=1e-10), name


@every_case
def test_units(case: Case) -> None:
    """(J, h) -> c (J, h) is beta -> c beta; energies change their unit, log Z does not."""
    system = case.system()
    expected = quantities(case.solve(system))
    for c in (2.0, 0.3):
        scaled = case.system(
            couplings=c * system.couplings.to_dense(), field=c * system.field, beta=0.8 / c
        )
        found = quantities(case.solve(scaled))
        for name in ("log_partition", "entropy", "specific_heat", "magnetization", "correlations"):
            close(found[name], expected[name], rtol=1e-10)
        for name in ("free_energy", "internal_energy"):
            close(found[name], c * expected[name], rtol=1e-10)
        close(found["susceptibility"], expected["susceptibility"] / c, rtol=1e-10)


@every_case
def test_only_the_off_diagonal_part_counts(case: Case) -> None:
    system = case.system()
    matrix = system.couplings.to_dense()
    found = case.solve(case.system(couplings=matrix + 5 * torch.eye(case.num_spins).double()))
    close(found.log_partition, case.solve(system).log_partition, rtol=1e-13)
    # Asymmetric couplings have no free energy, unless their symmetric part is asked for.
    skew = matrix + torch.triu(matrix, 1) - torch.tril(matrix, -1)
    with pytest.raises(ValueError, match="symmetric"):
        _ = case.solve(case.system(couplings=skew)).free_energy
    found = case.solve(case.system(couplings=skew, symmetrize=True))
    close(found.log_partition, case.solve(system).log_partition, rtol=1e-12)


# --- batches and masks ---------------------------------------------------------------------------


def stacked(case: Case, count: int = 3) -> tuple[list[SpinSystem], dict[str, Tensor]]:
    systems = [case.system(seed) for seed in range(count)]
    betas = torch.linspace(0.4, 0.8, count, dtype=torch.float64)
    systems = [system.replace(beta=beta) for system, beta in zip(systems, betas, strict=True)]
    arguments = {
        "couplings": torch.stack([system.couplings.to_dense() for system in systems]),
        "field": torch.stack([system.field for system in systems]),
        "beta": betas,
    }
    return systems, arguments


@every_case
def test_batching_changes_no_answer(case: Case) -> None:
    systems, arguments = stacked(case)
    together = case.solve(case.system(**arguments))
    assert together.solution.converged.shape == (3,)
    found = quantities(together)
    for row, system in enumerate(systems):
        for name, value in quantities(case.solve(system)).items():
            # Both stop at the tolerance of the solver, at the same step up to rounding.
            close(found[name][row], value, rtol=1e-9, atol=1e-10)
    more = {
        "couplings": arguments["couplings"][:, None],
        "field": arguments["field"][:, None],
        "beta": arguments["beta"][:, None],
    }
    again = quantities(case.solve(case.system(**more)))
    for name, value in again.items():
        assert value.shape == (3, 1, *found[name].shape[1:])
        close(value[:, 0], found[name], rtol=1e-9, atol=1e-10)


@every_case
def test_absent_sites_are_not_there(case: Case) -> None:
    """Alone, padded on the right, on the left and in the middle, with NaN in the padding."""
    system = case.system()
    n, total = case.num_spins, case.num_spins + 3
    expected = quantities(case.solve(system))
    densities = case.solve(system).free_energy_per_spin
    for places in (range(n), range(3, total), [0, *range(4, n + 3)]):
        there = torch.zeros(total, dtype=torch.bool)
        there[list(places)] = True
        matrix = torch.full((total, total), math.nan, dtype=torch.float64)
        field = torch.full((total, case.site.dim), math.nan, dtype=torch.float64)
        inside = there.nonzero().flatten()
        matrix[inside[:, None], inside] = system.couplings.to_dense()
        field[inside] = system.field
        padded = case.solve(case.system(couplings=matrix, field=field, mask=~there))
        found = quantities(padded)
        close(padded.free_energy_per_spin, densities, rtol=1e-10)
        for name in ("magnetization", "correlations", "susceptibility"):
            assert float(found[name][~there].detach().abs().sum()) == 0, name
        found["magnetization"] = found["magnetization"][there]
        found["correlations"] = found["correlations"][there][:, there]
        found["susceptibility"] = found["susceptibility"][there][:, :, there]
        for name, value in found.items():
            close(value, expected[name], rtol=1e-10)


@every_case
def test_nobody_is_there(case: Case) -> None:
    """A fully masked system beside a valid one: zeros, and finite gradients for both."""
    system = case.system()
    matrix = system.couplings.to_dense().clone().requires_grad_()
    field = system.field.expand(2, -1, -1).clone().requires_grad_()
    mask = torch.zeros(2, case.num_spins, dtype=torch.bool)
    mask[1] = True
    equilibrium = case.solve(case.system(couplings=matrix, field=field, mask=mask))
    close(equilibrium.log_partition[0], case.solve(system).log_partition, rtol=1e-10)
    assert float(equilibrium.log_partition[1].detach()) == 0
    assert float(equilibrium.magnetization[1].detach().abs().sum()) == 0
    total = equilibrium.free_energy.sum() + equilibrium.magnetization.square().sum()
    for gradient in torch.autograd.grad(total, (matrix, field)):
        assert bool(gradient.isfinite().all())


@every_kind
@pytest.mark.parametrize("empty", ["batch", "sites"])
def test_empty(case: Case, empty: str) -> None:
    n = 0 if empty == "sites" else case.num_spins
    batch = 0 if empty == "batch" else 2
    field = torch.zeros(batch, n, case.site.dim, dtype=torch.float64, requires_grad=True)
    equilibrium = case.solve(case.system(couplings=torch.zeros(n, n).double(), field=field))
    assert equilibrium.magnetization.shape == field.shape
    assert equilibrium.log_partition.shape == (batch,)
    assert equilibrium.correlations().shape == (batch, n, n)
    assert equilibrium.susceptibility().shape == (batch, n, case.site.dim, n, case.site.dim)
    assert equilibrium.local_susceptibility().shape == (batch, n, case.site.dim, case.site.dim)
    assert equilibrium.uniform_susceptibility().shape == (batch, case.site.dim, case.site.dim)
    assert equilibrium.order_ratio().shape == equilibrium.stability().shape == (batch,)
    (equilibrium.free_energy.sum() + equilibrium.magnetization.sum()).backward()


# --- derivatives and numbers ---------------------------------------------------------------------


@in_field
def test_derivatives(case: Case) -> None:
    """F, m, U and S in couplings, field and temperature, against finite differences."""
    system = case.system()
    matrix = system.couplings.to_dense().clone().requires_grad_()
    field = system.field.clone().requires_grad_()
    beta = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)

    def observables(matrix: Tensor, field: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        equilibrium = case.solve(
            case.system(couplings=matrix, field=field, beta=beta, symmetrize=True)
        )
        return (
            equilibrium.free_energy,
            equilibrium.magnetization,
            equilibrium.internal_energy,
            equilibrium.entropy,
        )

    # Finite differences with step 1e-6 of a solution to 1e-13: errors of 1e-7.
    assert gradcheck(observables, (matrix, field, beta), atol=1e-5, fast_mode=True)


@every_kind
def test_no_graph_without_gradients(case: Case) -> None:
    system = case.system()
    field = system.field.clone().requires_grad_()
    with torch.no_grad():
        found = quantities(case.solve(case.system(field=field)))
    expected = quantities(case.solve(system))
    for name, value in found.items():
        assert not value.requires_grad, name
        close(value, expected[name], rtol=1e-10)


@every_case
def test_float32(case: Case) -> None:
    system = case.system()
    solver = type(case.solver)() if hasattr(case.solver, "fixed_point") else case.solver
    single = SpinSystem(system.couplings.to_dense().float(), system.field.float(), 0.8, case.site)
    expected = quantities(case.solve(system))
    for name, value in quantities(solver.solve(single)).items():
        assert value.dtype == torch.float32, name
        # Mean field stops at residuals of 1e-5 in float32.
        scale = float(expected[name].detach().abs().max())
        error = float((value.double() - expected[name]).detach().abs().max())
        assert error <= 1e-4 * max(scale, 1.0), name


@every_case
def test_evidence(case: Case) -> None:
    solution = case.solve(case.system()).solution
    assert solution.residual.shape == solution.iterations.shape == solution.converged.shape == ()
    assert solution.iterations.dtype == torch.int64
    assert solution.converged.dtype == torch.bool
    assert bool(solution.converged)
    assert 0 <= float(solution.residual) < 1e-8


def test_two_aligned_unit_spins() -> None:
    """The factor that codes differ in: J_12 = J_21 = 1 is one bond of energy -1."""
    matrix = 1 - torch.eye(2, dtype=torch.float64)
    system = SpinSystem(matrix, torch.zeros(2, 3).double(), 1.0, Sphere(3, radius=1.0))
    spins = torch.tensor([[0.0, 0.6, 0.8], [0.0, 0.6, 0.8]], dtype=torch.float64)
    assert float(system.energy(spins)) == pytest.approx(-1.0, rel=1e-15)
    # And the exact ground state energy at low temperature: U = -1 + (D - 1) / 2 beta.
    cold = Exact().solve(system.replace(beta=1e4)).internal_energy
    assert float(cold.detach()) == pytest.approx(-1 + 1e-4, abs=1e-7)


@every_case
def test_doubling_beta_is_doubling_couplings_and_fields(case: Case) -> None:
    system = case.system()
    warm = case.system(couplings=2 * system.couplings.to_dense(), field=2 * system.field, beta=0.4)
    cold = case.system(beta=0.8)
    one, other = case.solve(warm), case.solve(cold)
    close(one.magnetization, other.magnetization, rtol=1e-12)
    close(one.log_partition, other.log_partition, rtol=1e-12)


def test_mean_field_is_below_the_exact_log_partition() -> None:
    """Gibbs and Bogoliubov: mean field bounds log Z from below, for every law and system."""
    for site, num_spins in ((Ising(), 6), (Sphere(2), 2), (Sphere(5), 2)):
        for seed in range(8):
            case = Case("", MEAN_FIELD, site, num_spins=num_spins)
            system = case.system(seed)
            bound = MeanField(tolerance=1e-10).solve(system).log_partition
            exact = Exact().solve(system).log_partition
            assert float((exact - bound).detach()) > 0
