"""The ladder of exact results: single spins, pairs, chains, rings, enumeration, tori, Kaufman, K_c.

Every rung compares a run with an independently computed value in units of the run's own standard
error, |z| < 4: with some 300 comparisons of Gaussian z the chance of one beyond is 2 %, and seeds
are fixed. That the errors themselves are right is the calibration test's matter.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import spinformer as sf
from spinformer.sampling.cluster import SwendsenWang
from spinformer.sampling.local import HeatBath
from spinformer.sampling.sampled import SampledEquilibrium
from spinformer.thermo.statistics import estimate

DATA = Path(__file__).parents[1] / "data"
F64 = torch.float64
LIMIT = 4.0
Record = dict[str, Any]

pytestmark = pytest.mark.stochastic


def records(file: str, name: str, **params: Any) -> list[Record]:
    found = [
        r
        for r in json.loads((DATA / file).read_text())
        if r["name"] == name and all(r["params"][key] == value for key, value in params.items())
    ]
    assert found, (name, params)
    return found


def law(dim: int) -> sf.SiteLaw:
    return sf.Ising() if dim == 1 else sf.Sphere(dim, radius=1.0)


def sample(system: sf.SpinSystem, **options: Any) -> SampledEquilibrium:
    options = {"chains": 192, "sweeps": 150, "warmup": 50, "seed": 1} | options
    options.setdefault("correlations", False)
    equilibrium = sf.MonteCarlo(**options).solve(system)
    if options.get("on_failure") != "ignore":
        assert bool(equilibrium.converged.all()), equilibrium.diagnostics
    return equilibrium


def z_score(equilibrium: SampledEquilibrium, name: str, exact: Tensor | float) -> Tensor:
    value = getattr(equilibrium, name)
    value = value if isinstance(value, Tensor) else value()
    return (value - exact) / equilibrium.standard_error(name)


def check(z: Tensor) -> None:
    assert bool((z.abs() < LIMIT).all()), z


def column(found: list[Record], *path: str) -> Tensor:
    values = found
    for key in path:
        values = [value[key] for value in values]
    return torch.tensor(values, dtype=F64)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 64])
def test_single_spins(dim: int) -> None:
    # Of Ising spins down with a chance of exp(-2 kappa), as many as the errors need must be seen.
    largest = 4 if dim == 1 else 100
    found = [
        r
        for r in records("special.json", "single_spin", D=dim)
        if r["params"]["R"] == 1 and 0.05 < r["params"]["kappa"] < largest
    ]
    field = torch.zeros(len(found), 1, dim, dtype=F64)
    field[:, 0, 0] = column(found, "params", "kappa")
    system = sf.SpinSystem(torch.zeros(1, 1, dtype=F64), field, 1.0, law(dim))
    # Given its neighbours a single spin is known exactly: measure the spin itself.
    equilibrium = sample(system, conditional=False)
    exact = column(found, "value", "A")
    check(z_score(equilibrium, "magnetization", pad(exact[:, None, None], (0, dim - 1))))
    check(z_score(equilibrium, "internal_energy", -field[:, 0, 0] * exact))


@pytest.mark.parametrize("dim", [1, 2, 3, 8])
def test_pairs_without_field(dim: int) -> None:
    found = [
        r for r in records("zero_field.json", "pair_zero_field", D=dim) if r["params"]["R"] == 1
    ]
    strength = column(found, "params", "K")
    bond = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
    system = sf.SpinSystem(
        strength[:, None, None] * bond, torch.zeros(2, dim, dtype=F64), 1.0, law(dim)
    )
    equilibrium = sample(system, conditional=False)
    check(z_score(equilibrium, "internal_energy", column(found, "value", "energy_times_beta")))


@pytest.mark.parametrize("dim", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [3, 8, 16])
def test_rings_without_field(dim: int, size: int) -> None:
    found = records("zero_field.json", "ring_zero_field", D=dim, N=size)
    strength = column(found, "params", "K")
    system = sf.SpinSystem(
        sf.couplings.ring(size, strength=strength),
        torch.zeros(size, dim, dtype=F64),
        1.0,
        law(dim),
    )
    # Triangles of negative couplings are frustrated: clusters are useless there, but exact.
    equilibrium = sample(system, moves=[HeatBath(), SwendsenWang(frustrated="allow")])
    bonds = column(found, "value", "bond")
    check(z_score(equilibrium, "internal_energy", -size * strength * bonds))
    heat = column(found, "value", "specific_heat_per_spin")
    check(z_score(equilibrium, "specific_heat_per_spin", heat))


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("shape", ["ring", "chain"])
def test_rings_and_chains_in_a_field(dim: int, shape: str) -> None:
    name = {"ring": "ring_field", "chain": "open_chain_field"}[shape]
    found = records("lattices.json", name, D=dim, N=8)
    field = torch.zeros(len(found), 8, dim, dtype=F64)
    field[..., -1] = column(found, "params", "b")[:, None]
    make = sf.couplings.ring if shape == "ring" else sf.couplings.chain
    couplings = make(8, strength=column(found, "params", "K"))
    equilibrium = sample(sf.SpinSystem(couplings, field, 1.0, law(dim)))
    exact = column(found, "value", "m").reshape(len(found), -1).expand(-1, 8)
    check(z_score(equilibrium, "magnetization", pad(exact[..., None], (dim - 1, 0))))
    if shape == "ring":
        bonds = 8 * couplings.strength * column(found, "value", "bond")
        energy = -bonds - (field[..., -1] * exact).sum(-1)
        check(z_score(equilibrium, "internal_energy", energy))


@pytest.mark.parametrize("size", [8, 12])
def test_enumerated_ising_spins(size: int) -> None:
    found = records("ising.json", "ising_enumeration", N=size)
    i = torch.arange(1, size + 1, dtype=F64)
    formulas = {
        "J_ij=cos(i*j)/N": torch.cos(i[:, None] * i) / size,
        "J_ij=sin(i*j+i+j)/sqrt(N)": torch.sin(i[:, None] * i + i[:, None] + i) / math.sqrt(size),
        "J_ij=1/(1+|i-j|)^2": (1 + (i[:, None] - i).abs()) ** -2,
    }
    couplings = torch.stack([formulas[r["params"]["J_formula"]] for r in found])
    in_field = [r["params"]["h_formula"] == "h_i=1*0.5*sin(i)" for r in found]
    field = torch.tensor(in_field, dtype=F64)[:, None, None] * (0.5 * torch.sin(i))[:, None]
    system = sf.SpinSystem(couplings, field, column(found, "params", "beta"), sf.Ising())
    # The coldest have valleys that a chain does not leave: 128 of them know their error together.
    equilibrium = sample(system, correlations="components", on_failure="ignore")
    check(z_score(equilibrium, "internal_energy", column(found, "value", "U")))
    check(z_score(equilibrium, "specific_heat", column(found, "value", "C_v")))
    check(z_score(equilibrium, "magnetization", column(found, "value", "m")[..., None]))
    off = ~torch.eye(size, dtype=torch.bool)
    check(z_score(equilibrium, "correlations", column(found, "value", "corr"))[:, off])
    if "chi" in found[0]["value"]:
        chi = column(found, "value", "chi").reshape(-1, size, 1, size, 1)
        check(z_score(equilibrium, "susceptibility", chi))


@pytest.mark.parametrize("dim", [2, 3, 8, 64])
def test_two_spheres_in_fields(dim: int) -> None:
    found = [
        r
        for r in records("two_spins.json", "two_spin_nonparallel", D=dim)
        if r["params"]["R"] == "sqrt(D)"
    ]
    i, a = torch.arange(1, 3, dtype=F64)[:, None], torch.arange(1, dim + 1, dtype=F64)
    scale = [
        float(r["params"]["h_formula"].split("=")[1].split("*")[0]) / math.sqrt(dim) for r in found
    ]
    field = torch.tensor(scale, dtype=F64)[:, None, None] * torch.cos(i * a + i)
    bond = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
    system = sf.SpinSystem(
        column(found, "params", "J")[:, None, None] * bond,
        field,
        column(found, "params", "beta"),
        sf.Sphere(dim),
    )
    equilibrium = sample(system, correlations=True)
    check(z_score(equilibrium, "magnetization", column(found, "value", "m")))
    check(z_score(equilibrium, "internal_energy", column(found, "value", "U")))
    z = z_score(equilibrium, "correlations", column(found, "value", "S1S2")[:, None, None])
    check(z[:, 0, 1])


@pytest.mark.parametrize("dim", [1, 2, 3, 8])
def test_curie_weiss_of_finite_size(dim: int) -> None:
    size = 64
    found = records("curie_weiss.json", "curie_weiss_finite_N", D=dim, N=size)
    field = torch.zeros(len(found), size, dim, dtype=F64)
    field[..., -1] = column(found, "params", "beta_h")[:, None]
    couplings = sf.couplings.curie_weiss(size, strength=column(found, "params", "betaJ0"))
    # Below ordering single spins turn the whole moment slowly, a cluster does so at once, but spins
    # of several components across it slowly. Where all are coupled to all it looks at N^2 bonds, so
    # that few chains have to do.
    moves = SwendsenWang() if dim == 1 else [HeatBath(), SwendsenWang()]
    # Chains of 25 tau and more: too short for each to know its own error, which 24 of them do.
    equilibrium = sample(
        sf.SpinSystem(couplings, field, 1.0, law(dim)),
        moves=moves,
        chains=24,
        on_failure="ignore",
    )
    check(z_score(equilibrium, "internal_energy", column(found, "value", "beta_U")))
    square = estimate(equilibrium.series["moment"].square().sum(-1) / size**2)
    check(square.z_score(column(found, "value", "M2_over_N2")))
    moment = estimate(equilibrium.series["moment"][..., -1] / size)
    check(moment.z_score(column(found, "value", "m")))


def small_lattices() -> list[tuple[str, sf.SpinSystem, float, float]]:
    """Name, system, U and C of every cylinder, torus and cube."""
    found = []
    for r in json.loads((DATA / "lattices.json").read_text()):
        if r["item"] != "item9":
            continue
        p, value = r["params"], r["value"]
        dim = p.get("D", 2)
        if r["name"] == "cylinder":
            couplings = sf.couplings.square(
                (p["W_periodic"], p["L_open"]), (True, False), strength=p["K"], dtype=F64
            )
            bonds = p["n_bonds"]
        elif r["name"] == "xy_torus":
            couplings = sf.couplings.square(p["L"], strength=p["K"], dtype=F64)
            bonds = 2 * p["L"] ** 2
        else:
            couplings = sf.couplings.cubic(2, False, strength=p["K"], dtype=F64)
            bonds = 12
        n = couplings.num_spins
        heat = value.get("specific_heat_total", n * value.get("specific_heat_per_site", 0.0))
        system = sf.SpinSystem(couplings, torch.zeros(n, dim, dtype=F64), 1.0, law(dim))
        name = f"{r['name']} of {n}, D = {dim}, K = {p['K']}"
        found.append((name, system, -p["K"] * bonds * value["mean_bond"], heat))
    return found


@pytest.mark.parametrize(
    ("system", "energy", "heat"), [pytest.param(*r[1:], id=r[0]) for r in small_lattices()]
)
def test_cylinders_tori_and_cubes(system: sf.SpinSystem, energy: float, heat: float) -> None:
    equilibrium = sample(system, moves=[HeatBath(), SwendsenWang()])
    check(z_score(equilibrium, "internal_energy", energy))
    check(z_score(equilibrium, "specific_heat", heat))


@pytest.mark.parametrize("size", [4, 16, 32])
def test_square_ising_lattices(size: int) -> None:
    """Kaufman's finite tori, at K_c too."""
    found = records("lattices.json", "ising2d_kaufman", L=size)
    n = size**2
    couplings = sf.couplings.square(size, strength=column(found, "params", "K"))
    system = sf.SpinSystem(couplings, torch.zeros(n, 1, dtype=F64), 1.0, sf.Ising())
    equilibrium = sample(system, moves=SwendsenWang(), chains=16, sweeps=300)
    # Their energies are in units of J: ours, with beta = 1, in units of temperature.
    energy = n * column(found, "params", "K") * column(found, "value", "u")
    check(z_score(equilibrium, "internal_energy", energy))
    check(z_score(equilibrium, "specific_heat_per_spin", column(found, "value", "c")))


def test_errors_are_right() -> None:
    """Calibration: z-scores of 200 short runs have mean 0 and variance 1, within their own errors.

    Runs of 4 chains and 40 to 100 autocorrelation times each, where tau is known to a tenth only.
    """
    runs, size = 200, 8
    exact = records("ising.json", "ising_ring_field", N=size, K=1.0, b=0.1)[0]["value"]
    couplings = sf.couplings.ring(size, strength=1.0, dtype=F64)
    field = torch.full((runs, size, 1), 0.1, dtype=F64)
    system = sf.SpinSystem(couplings, field, 1.0, sf.Ising())
    equilibrium = sf.MonteCarlo(
        HeatBath(), chains=4, sweeps=600, seed=5, on_failure="ignore", conditional=False
    ).solve(system)
    tau = equilibrium.diagnostics.tau["energy"]
    assert 3 < float(tau.mean()) < 20  # correlated, or the test would say little
    energy = -size * exact["bond"] - 0.1 * size * exact["m"]
    moment = estimate(equilibrium.series["moment"][..., 0])
    for z in (
        z_score(equilibrium, "internal_energy", energy),
        z_score(equilibrium, "magnetization", exact["m"])[:, 0, 0],
        moment.z_score(size * exact["m"]),
    ):
        assert abs(float(z.mean())) < LIMIT / math.sqrt(runs)
        # The variance of a sample variance of n normal numbers is 2 / (n - 1).
        assert abs(float(z.var()) - 1) < LIMIT * math.sqrt(2 / (runs - 1)), z.var()


def crossing(dim: int, exact: float, sizes: tuple[int, int]) -> tuple[float, float]:
    """Where the Binder cumulants of two cubes cross, relative to K_c, and its standard error."""
    x = torch.linspace(-0.02, 0.02, 7, dtype=F64)
    strength = exact * (1 + x)
    cumulants, errors = [], []
    for size in sizes:
        couplings = sf.couplings.cubic(size, strength=strength.float())
        system = sf.SpinSystem(couplings, torch.zeros(size**3, dim), 1.0, law(dim))
        equilibrium = sample(
            system,
            moves=[HeatBath(), SwendsenWang()],
            chains=8,
            sweeps=700,
            warmup=200,
            conditional=False,
        )
        cumulants.append(equilibrium.binder_cumulant().double())
        errors.append(equilibrium.standard_error("binder_cumulant").double())
    difference = cumulants[1] - cumulants[0]
    weight = 1 / (errors[0] ** 2 + errors[1] ** 2)
    # A parabola through the differences, by weighted least squares: cumulants bend. Its zero next
    # to the middle, and the error of that.
    design = torch.stack([torch.ones_like(x), x, x**2], -1)
    covariance = torch.linalg.inv(design.T @ (weight[:, None] * design))
    offset, slope, bend = covariance @ design.T @ (weight * difference)
    assert slope > LIMIT * covariance[1, 1].sqrt()  # the larger lattice is steeper
    zero = -2 * offset / (slope + torch.sqrt(slope**2 - 4 * offset * bend))
    gradient = torch.stack([torch.ones_like(zero), zero, zero**2]) / (slope + 2 * bend * zero)
    return float(zero), float((gradient @ covariance @ gradient).sqrt())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "name", "nu", "omega"),
    [
        (1, "ising_sc_Kc", 0.630, 0.83),
        (2, "xy_sc_Kc", 0.672, 0.79),
        (3, "heisenberg_sc_Kc", 0.711, 0.76),
        (4, "o4_sc_Kc", 0.749, 0.75),
    ],
)
def test_critical_couplings_of_the_cubic_lattice(
    dim: int, name: str, nu: float, omega: float
) -> None:
    """Binder cumulants of sizes L and 2 L cross at K_c, but for corrections to scaling.

    The crossing is off by a L^(-1/nu - omega), which two pairs of sizes get rid of (exponents of
    Pelissetto & Vicari, Phys. Rep. 368, 549 (2002)). What is left is of the next order: a tenth of
    the smaller pair's is allowed for.
    """
    exact = records("lattices.json", name)[0]["value"]["K_c"]
    small, small_error = crossing(dim, exact, (4, 8))
    large, large_error = crossing(dim, exact, (6, 12))
    share = 1 / ((6 / 4) ** (1 / nu + omega) - 1)
    limit = large + share * (large - small)
    error = math.hypot((1 + share) * large_error, share * small_error)
    assert abs(limit) < 0.1 * abs(small) + LIMIT * error, (small, large, limit, error)
