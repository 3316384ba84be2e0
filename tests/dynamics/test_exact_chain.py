"""Parallel dynamics of few Ising spins by their Markov chain."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spinformer.dynamics import ExactDynamics, peretto_log_weight
from spinformer.dynamics.exact_chain import all_states
from spinformer.spins.site import Ising, Sphere
from spinformer.spins.system import SpinSystem

DATA = Path(__file__).parents[1] / "data" / "parallel.json"
RECORDS: list[dict[str, Any]] = [
    r for r in json.loads(DATA.read_text()) if r["name"] == "parallel_ising"
]


def reference_system(params: dict[str, Any]) -> SpinSystem:
    i = torch.arange(1, params["N"] + 1, dtype=torch.float64)
    row, column = i[:, None], i[None, :]
    matrix = {
        "sym cos(ij)/N": torch.cos(row * column) / params["N"],
        "asym sin(i+2j)/sqrt(N)": torch.sin(row + 2 * column) / math.sqrt(params["N"]),
    }[params["J"]]
    assert params["h"] == "0.5*sin(i)"
    return SpinSystem(matrix, 0.5 * torch.sin(i)[:, None], params["beta"], Ising())


def random_system(
    num_spins: int, *, symmetric: bool = False, batch: tuple[int, ...] = (), seed: int = 0
) -> SpinSystem:
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, num_spins, num_spins)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(num_spins)
    if symmetric:
        matrix = (matrix + matrix.mT) / 2
    field = 0.5 * torch.randn(*batch, num_spins, 1, generator=generator, dtype=torch.float64)
    return SpinSystem(matrix, field, 0.8, Ising())


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: "{N}-{beta}-{J}".format(**r["params"]))
def test_reference_values(record: dict[str, Any]) -> None:
    system, value = reference_system(record["params"]), record["value"]
    state = ExactDynamics().steady_state(system)
    found = {
        "m_stationary": state.magnetization[..., 0],
        "C": state.correlations(connected=True),
        "D_delay1": state.delayed_correlations(1, connected=True),
        "entropy_production": state.entropy_production,
        "m_transient_from_all_up": ExactDynamics()
        .run(system, len(value["m_transient_from_all_up"]) - 1, "ordered")
        .magnetization[..., 0],
    }
    for name, tensor in found.items():
        # Both sides are sums of at most 2^12 terms of order one in float64.
        torch.testing.assert_close(
            tensor, torch.tensor(value[name], dtype=torch.float64), rtol=0, atol=2e-14, msg=name
        )
    if value["m_gibbs_for_comparison"] is not None:
        gibbs = torch.tensor(value["m_gibbs_for_comparison"], dtype=torch.float64)
        assert (found["m_stationary"] - gibbs).abs().max() > 1e-5


@pytest.mark.parametrize("symmetric", [True, False])
def test_stationary_law_is_that_of_the_long_run(symmetric: bool) -> None:
    system = random_system(5, symmetric=symmetric, batch=(3,))
    state = ExactDynamics().steady_state(system)
    assert float(state.residual.max()) < 1e-15
    torch.testing.assert_close(state.law.sum(-1), torch.ones(3, dtype=torch.float64))
    run = ExactDynamics().run(system, 200, "ordered")
    torch.testing.assert_close(run.laws[-1], state.law, rtol=0, atol=1e-13)
    torch.testing.assert_close(run.magnetization[-1], state.magnetization, rtol=0, atol=1e-13)


def test_symmetric_couplings_are_reversible_and_asymmetric_ones_are_not() -> None:
    for symmetric in (True, False):
        state = ExactDynamics().steady_state(random_system(4, symmetric=symmetric))
        current = state.transition * state.law[None, :]
        largest = (current - current.T).abs().max()
        assert (largest < 1e-16) if symmetric else (largest > 1e-3)


def test_entropy_production_is_the_relative_entropy_of_time_reversal() -> None:
    state = ExactDynamics().steady_state(random_system(4))
    current = state.transition * state.law[None, :]
    expected = (current * (current / current.T).log()).sum()
    torch.testing.assert_close(state.entropy_production, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_second_law_along_a_quench(symmetric: bool) -> None:
    system = random_system(4, symmetric=symmetric, seed=2)
    quench = torch.ones(30, 1, 1, dtype=torch.float64)
    quench[10:] = -1
    run = ExactDynamics().run(system, 30, "ordered", field=quench * system.field)
    assert float(run.entropy_production.min()) >= -1e-14
    # Summed over all transitions, independently.
    for t in (0, 12):
        field = run.fields[t]
        transition = ExactDynamics().steady_state(system.replace(field=field)).transition
        joint = transition * run.laws[t]
        flow = (joint * (transition / transition.T).log()).sum()
        torch.testing.assert_close(run.entropy_flow[t], flow, rtol=1e-12, atol=1e-14)


def test_absent_sites_are_as_if_cut_out() -> None:
    system = random_system(5)
    matrix = system.couplings.to_dense()
    mask = torch.tensor([False, True, False, False, True])
    kept = (~mask).nonzero()[:, 0]
    broken = matrix.clone()
    broken[1], broken[:, 4] = torch.nan, torch.nan
    masked = SpinSystem(broken, system.field, system.beta, Ising(), mask=mask)
    cut = SpinSystem(matrix[kept][:, kept], system.field[kept], system.beta, Ising())
    left, right = (ExactDynamics().steady_state(s) for s in (masked, cut))
    close = {"rtol": 0, "atol": 1e-14}
    torch.testing.assert_close(left.magnetization[kept], right.magnetization, **close)
    assert bool((left.magnetization[mask] == 0).all())
    for lag in (0, 1, 2):
        pairs = left.delayed_correlations(lag)
        torch.testing.assert_close(pairs[kept][:, kept], right.delayed_correlations(lag), **close)
        assert bool((pairs[mask] == 0).all() and (pairs[:, mask] == 0).all())
    torch.testing.assert_close(left.entropy_production, right.entropy_production, **close)
    runs = [ExactDynamics().run(s, 4, "ordered") for s in (masked, cut)]
    torch.testing.assert_close(runs[0].entropy_flow, runs[1].entropy_flow, **close)
    torch.testing.assert_close(runs[0].entropy.diff(dim=0), runs[1].entropy.diff(dim=0), **close)


def test_starts_and_carried_laws() -> None:
    system = random_system(3, batch=(2,))
    spins = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)[:, None]
    whole = ExactDynamics().run(system, 6, spins)
    torch.testing.assert_close(whole.magnetization[0], spins.expand(2, 3, 1))
    first = ExactDynamics().run(system, 2, spins)
    second = ExactDynamics().run(system, 4, first)
    torch.testing.assert_close(second.laws, whole.laws[2:], rtol=0, atol=0)
    third = ExactDynamics().run(system, 4, first.laws[-1])
    torch.testing.assert_close(third.laws, second.laws, rtol=0, atol=0)
    free = ExactDynamics().run(system, 1)
    assert float(free.magnetization[0].abs().max()) < 1e-16


def test_sequence_of_systems_is_a_run_that_carries_on() -> None:
    one, two = random_system(3), random_system(3, seed=5)
    whole = ExactDynamics().run([one, one, two], 3, "ordered")
    part = ExactDynamics().run(two, 1, ExactDynamics().run(one, 2, "ordered"))
    torch.testing.assert_close(whole.laws[-1], part.laws[-1], rtol=0, atol=0)


def test_peretto_weight_by_hand() -> None:
    system = random_system(3, symmetric=True)
    matrix = system.couplings.to_dense()
    for signs in itertools.product((-1.0, 1.0), repeat=3):
        spins = torch.tensor(signs, dtype=torch.float64)[:, None]
        force = system.field + matrix @ spins
        expected = 0.8 * (system.field * spins).sum() + torch.cosh(0.8 * force).log().sum()
        torch.testing.assert_close(peretto_log_weight(system, spins), expected)


@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients(symmetric: bool) -> None:
    system = random_system(3, symmetric=symmetric)

    def quantities(matrix: Tensor, field: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        made = SpinSystem(matrix, field, beta, Ising(), symmetrize=symmetric)
        state = ExactDynamics().steady_state(made)
        flow = ExactDynamics().run(made, 2, "ordered").entropy_flow
        return state.magnetization, state.delayed_correlations(1), state.entropy_production, flow

    inputs = [system.couplings.to_dense(), system.field, system.beta]
    assert torch.autograd.gradcheck(quantities, [x.clone().requires_grad_() for x in inputs])


def test_broken_system_stays_alone() -> None:
    system = random_system(3, batch=(2,))
    matrix = system.couplings.to_dense().clone()
    matrix[0, 1, 2] = torch.nan
    both = SpinSystem(matrix, system.field, 0.8, Ising(), check_finite=False)
    alone = SpinSystem(matrix[1], system.field[1], 0.8, Ising())
    m = ExactDynamics().steady_state(both).magnetization
    assert bool(m[0].isnan().all())
    torch.testing.assert_close(m[1], ExactDynamics().steady_state(alone).magnetization)
    run = ExactDynamics().run(both, 2).magnetization
    assert bool(run[:, 0].isnan().all()) and bool(run[:, 1].isfinite().all())


def test_states_are_numbered_by_their_bits() -> None:
    states = all_states(random_system(2))[..., 0]
    assert states.tolist() == [[-1, -1], [1, -1], [-1, 1], [1, 1]]


def test_bad_input() -> None:
    system = random_system(3)
    with pytest.raises(ValueError, match="Sphere.*use ParallelDynamics"):
        ExactDynamics().steady_state(
            SpinSystem(torch.zeros(2, 2), torch.zeros(2, 3), 1.0, Sphere(3))
        )
    with pytest.raises(ValueError, match="3 spins have 8 states"):
        ExactDynamics(max_spins=2).steady_state(system)
    with pytest.raises(ValueError, match="max_spins=20"):
        ExactDynamics(max_spins=20)
    with pytest.raises(ValueError, match="neither spins"):
        ExactDynamics().run(system, 2, torch.ones(8, dtype=torch.float64))
    with pytest.raises(ValueError, match="holds a spin of 1.5"):
        ExactDynamics().run(system, 2, torch.full((3, 1), 1.5, dtype=torch.float64))
    with pytest.raises(ValueError, match="initial='orderd'.*'ordered'"):
        ExactDynamics().run(system, 2, "orderd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps=0"):
        ExactDynamics().run(system, 0)
    with pytest.raises(ValueError, match="lag=-1"):
        ExactDynamics().steady_state(system).delayed_correlations(-1)
    with pytest.raises(ValueError, match="sequence of 1 systems for steps=2"):
        ExactDynamics().run([system], 2)
    with pytest.raises(ValueError, match="differ"):
        ExactDynamics().run([system, random_system(2)], 2)
    with pytest.raises(ValueError, match="first axis is the step"):
        ExactDynamics().run(system, 2, field=torch.zeros(3, 3, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="field of step 1 is not finite"):
        ExactDynamics().run(
            system, 2, field=lambda t: torch.full((3, 1), [0.0, math.inf][t]).double()
        )
    with pytest.raises(ValueError, match="must broadcast"):
        ExactDynamics().run(system, 2, field=torch.zeros(2, 4, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"systems \(2,\), which do not broadcast"):
        ExactDynamics().run(system, 2, torch.zeros(2, 3, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="holds a spin of nan"):
        ExactDynamics().run(system, 2, torch.full((3, 1), torch.nan, dtype=torch.float64))
    with pytest.raises(TypeError, match="initial must be a tensor, not int"):
        ExactDynamics().run(system, 2, 1)  # type: ignore[arg-type]


def test_stationary_law_is_carried_on() -> None:
    system = random_system(3)
    state = ExactDynamics().steady_state(system)
    laws = ExactDynamics().run(system, 3, state).laws
    torch.testing.assert_close(laws, state.law.expand(4, -1), rtol=0, atol=1e-15)


def test_a_law_lost_in_rounding_is_refused() -> None:
    """Two spins hold each other: the slowest deviation decays in some exp(2 beta) steps."""
    matrix = torch.tensor([[0.0, 1.0], [0.5, 0.0]], dtype=torch.float64)
    field = torch.tensor([[0.1], [0.0]], dtype=torch.float64)
    warm = SpinSystem(matrix, field, 6.0, Ising())
    assert float(ExactDynamics().steady_state(warm).residual) < 1e-15
    for beta in (20.0, 1000.0):
        cold = SpinSystem(matrix, field, beta, Ising())
        with pytest.raises(ValueError, match="Raise the temperature, or follow the law by run"):
            _ = ExactDynamics().steady_state(cold).law


def test_correlations_along_a_run_are_those_of_single_configurations() -> None:
    """One start whose spins are known, so that the first step's spins are independent."""
    system = random_system(3)
    start = torch.tensor([[1.0], [-1.0], [1.0]], dtype=torch.float64)
    run = ExactDynamics().run(system, 2, start)
    mean = run.magnetization[1]
    expected = torch.diagonal_scatter(mean @ mean.mT, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(run.correlations(1), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(run.delayed_correlations(1), mean @ start.mT, rtol=0, atol=1e-15)
    # From the stationary law on they are those of the steady state.
    state = ExactDynamics().steady_state(system)
    rest = ExactDynamics().run(system, 2, state)
    for connected in (False, True):
        for found, right in (
            (rest.correlations(2, connected=connected), state.correlations(connected=connected)),
            (
                rest.delayed_correlations(2, connected=connected),
                state.delayed_correlations(connected=connected),
            ),
        ):
            torch.testing.assert_close(found, right, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="step=3: give 1 ... 2"):
        run.correlations(3)
