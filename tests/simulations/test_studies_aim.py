"""Alternating steps of two energies: maps, ends and counts against formulas of their own."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import simulations.aim as study
from simulations.aim import count_attention, count_quadratics, rose, systems, with_noise
from simulations.aim_problem import (
    KINDS,
    Plane,
    Problem,
    aim_step,
    kinds_of,
    problem,
    proximal_step,
)
from simulations.study import parser_of
from spinformer.descent import AIM, PairwiseEnergy, descend


def run(out: Path, *words: str) -> int:
    words = ("--quick", "--out", str(out), *words)
    return study.STUDY.run(parser_of(study.STUDY).parse_args(words))


def arguments(seed: int) -> argparse.Namespace:
    return argparse.Namespace(seed=seed, quick=True)


def norm(Y: torch.Tensor) -> torch.Tensor:
    return Y.square().sum((-2, -1)).sqrt()


def by_hand(case: Problem, Y: torch.Tensor) -> dict[str, torch.Tensor]:
    """The energies and gradients of Y, from S, W, B1 and B2."""
    f = norm(case.S @ Y).square() + norm(Y - case.B1).square()
    g = norm(Y @ case.W).square() + norm(Y - case.B2).square()
    grad_f = 2 * (case.S.mT @ case.S @ Y + Y - case.B1)
    grad_g = 2 * (Y @ case.W @ case.W.mT + Y - case.B2)
    return {"h": f + g, "f'": grad_f, "g'": grad_g, "h'": grad_f + grad_g}


def spectrum(case: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues of the Hessians of f and g, from singular values."""
    return tuple(
        2 * (1 + np.linalg.svd(matrix.numpy(), compute_uv=False) ** 2)
        for matrix in (case.S, case.W)
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_minima_are_stationary(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    case = problem(generator)
    minima = case.minima()
    for name in "fgh":
        assert by_hand(case, minima[name])[f"{name}'"].abs().max() < 1e-12
    Y = torch.randn(5, *case.B1.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(case.h.energy(Y), by_hand(case, Y)["h"])
    # The merged energy differs from the sum by a constant.
    apart = case.energies()["h"].energy(Y) - case.h.energy(Y)
    torch.testing.assert_close(apart, apart[:1].expand(5))


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_the_fixed_point_is_where_aim_stops(ratio: float, generator: torch.Generator) -> None:
    case = problem(generator)
    sizes = case.sizes(ratio, 0.8)
    end, eigenvalues = case.fixed_point(sizes)
    torch.testing.assert_close(descend(case.h, case.B2, AIM(sizes), 600).state, end)
    # The two halves of a step act from the left and from the right: they commute, and the
    # eigenvalues are products of two numbers between zero and one. Nothing circles.
    f, g = spectrum(case)
    products = np.outer(1 - sizes[0] * f, 1 - sizes[1] * g).flatten()
    np.testing.assert_allclose(np.sort(eigenvalues.real.numpy()), np.sort(products), rtol=1e-10)
    assert eigenvalues.imag.abs().max() < 1e-12
    assert 0 < products.min() <= products.max() < 1


def test_the_gap_is_of_first_order(generator: torch.Generator) -> None:
    """For small equal sizes ``y - y_h* = (F + G)^-1 a G (F b2 - G b1) (...)``, mode by mode."""
    case = problem(generator)
    gaps = []
    for share in (1e-3, 5e-4):
        end, _ = case.fixed_point(case.sizes(1.0, share))
        gaps.append((end - case.minima()["h"]) / share)
    torch.testing.assert_close(gaps[0], gaps[1], rtol=2e-3, atol=2e-5)
    assert gaps[0].norm() > 0.01
    # In the eigenbasis: gap = 2 a c (x b2 - c b1) / ((x + c) (x + c - 2 a x c)).
    x, left = torch.linalg.eigh(case.S.mT @ case.S)
    c, right = torch.linalg.eigh(case.W @ case.W.mT)
    x, c = x[:, None] + 1, c + 1
    b1, b2 = left.mT @ case.B1 @ right, left.mT @ case.B2 @ right
    a = case.sizes(1.0, 0.7)[0]
    modes = 2 * a * c * (x * b2 - c * b1) / ((x + c) * (x + c - 2 * a * x * c))
    end, _ = case.fixed_point((a, a))
    torch.testing.assert_close(end - case.minima()["h"], left @ modes @ right.mT)


@pytest.mark.parametrize(("ratio", "share"), [(0.1, 1.0), (1.0, 1.0), (1.0, 0.3)])
def test_the_map_of_one_step(ratio: float, share: float, generator: torch.Generator) -> None:
    case = problem(generator)
    a1, a2 = sizes = case.sizes(ratio, share)
    f, g = spectrum(case)
    assert a2 == pytest.approx(share / (f.max() + g.max()))
    minima = case.minima()
    plane = Plane.through(minima["h"], minima["g"], minima["f"])
    # Wide enough for the ball, fine enough for the surroundings of the minimum.
    spread = 10 ** torch.empty(4000, dtype=torch.float64).uniform_(-2, 1, generator=generator)
    x, y = spread * torch.randn(2, 4000, generator=generator, dtype=torch.float64)
    Y = plane.states(x, y)
    numbers, arrays = aim_step(case, sizes, Y)

    before = by_hand(case, Y)
    bound = a2 / (a2 - a1 + a1 * a2 * g.max())
    theorem = norm(before["f'"]) <= bound * norm(before["h'"])
    part = (f.min() + g.min()) * bound / f.max()
    lemma = norm(Y - minima["f"]) <= part * norm(Y - minima["h"])
    middle = Y - a1 * before["f'"]
    after = middle - a2 * by_hand(case, middle)["g'"]
    change = by_hand(case, after)["h"] - before["h"]
    kind = np.array(KINDS)[arrays["kind"]]
    np.testing.assert_array_equal(kind == "rose", change > 1e-11)
    np.testing.assert_array_equal(kind == "inner", lemma)
    np.testing.assert_array_equal(kind == "outer", theorem & ~lemma)
    assert numbers["ratio"] == pytest.approx(part)
    assert numbers["rose_in_outer"] == numbers["rose_in_inner"] == numbers["inner_not_outer"] == 0
    # All kinds are there: the claims are not empty, and more would be too much.
    assert min(numbers[name] for name in ("inner", "outer", "fell", "rose")) > 20
    assert numbers["in_outer"] == int(theorem.sum())


def test_a_broken_promise_is_counted() -> None:
    promised = torch.tensor([True, True, False, True])
    rises = torch.tensor([True, False, True, False])
    outside = torch.tensor([False, False, False, True])
    numbers, arrays = kinds_of(promised, promised, rises, outside)
    assert (numbers["in_inner"], numbers["rose_in_inner"]) == (2, 1)
    assert [KINDS[code] for code in arrays["kind"]] == ["rose", "inner", "rose", "outside"]
    numbers, _ = kinds_of(promised, ~promised, rises, outside)
    assert (numbers["inner_not_outer"], numbers["rose_in_outer"]) == (2, 1)


@pytest.mark.parametrize("second", [2.0, -3.5])
def test_the_map_of_a_proximal_step(second: float, generator: torch.Generator) -> None:
    case = study.flat_problem(second)
    a1, a2 = sizes = case.sizes(0.7, 1.0)
    Y = 3 * torch.rand(4000, 1, 2, generator=generator, dtype=torch.float64) - 0.3
    # Many on the border, where a ReLU holds states.
    Y[::3, 0, 1] = 0.0
    numbers, arrays = proximal_step(case, sizes, Y)
    before = by_hand(case, Y)
    outside = (Y < 0).flatten(1).any(1)
    moved = a2 * before["h'"]
    deficit = (Y.square() - moved.square()).clamp_max(0).sum((-2, -1)) / moved.square().sum(
        (-2, -1)
    )
    _, g = spectrum(case)
    noise = (a2 - a1 + a1 * a2 * g.max()) / a2
    delta = norm(before["f'"]) / norm(before["h'"])
    printed = ~outside & (delta <= torch.sqrt((1 + deficit) / 2) / noise) & (deficit > -1)
    middle = Y - a1 * before["f'"]
    after = (middle - a2 * by_hand(case, middle)["g'"]).relu()
    rises = ~outside & (by_hand(case, after)["h"] - before["h"] > 1e-12)
    kind = np.array(KINDS)[arrays["kind"]]
    np.testing.assert_array_equal(kind == "outside", outside)
    np.testing.assert_array_equal(kind == "inner", printed)
    np.testing.assert_array_equal(kind == "rose", rises)
    np.testing.assert_allclose(arrays["kappa"][~outside], -deficit[~outside])
    assert np.isnan(arrays["kappa"][outside]).all()
    assert numbers["rose_in_outer"] == numbers["inner_not_outer"] == 0
    assert min(numbers["inner"], numbers["outer"], numbers["rose"], numbers["outside"]) > 0


@pytest.mark.parametrize("second", [2.0, -3.5])
def test_constrained_minima(second: float) -> None:
    """No entry is negative, and the gradient is zero, or upwards where it is held at zero."""
    case = study.flat_problem(second)
    for name, energy in case.energies().items():
        Y = study.constrained_minimum(energy)
        gradient = by_hand(case, Y)[f"{name}'"]
        assert (Y >= 0).all()
        assert gradient[Y > 0].abs().max() < 1e-9
        assert (gradient[Y == 0] >= 0).all()
    assert (Y[0, 1] == 0) == (second < 0)


def test_planes(generator: torch.Generator) -> None:
    origin, first, second = torch.randn(3, 5, 3, generator=generator, dtype=torch.float64)
    plane = Plane.through(origin, first, second)
    for point in (origin, first, second):
        torch.testing.assert_close(plane.states(*plane.coordinates(point)), point)
    assert plane.share(torch.stack([first, second])) == pytest.approx(1.0)
    assert (plane.coordinates(second) > 0).all()
    x, y, states = plane.grid(torch.tensor([1.0, -2.0]), 0.5, 4)
    torch.testing.assert_close(plane.coordinates(states)[2, 3], torch.stack([x[3], y[2]]))
    assert (float(x[0]), float(y[-1])) == (0.5, -1.5)
    # Distances in the plane are distances of states.
    apart = (states[0, 0] - states[3, 3]).norm()
    assert float(apart) == pytest.approx(math.sqrt(2))
    many = torch.randn(50, 5, 3, generator=generator, dtype=torch.float64)
    centred = (many - origin).flatten(1)
    squares = torch.linalg.svdvals(centred).square()
    share = Plane.through(origin, *many).share(many)
    assert share == pytest.approx(float(squares[:2].sum() / squares.sum()))


def test_the_trajectory_and_its_end() -> None:
    numbers, arrays = study.trajectory(arguments(0))
    aim = numbers["runs"]["AIM"]
    assert aim["end_to_fixed_point"] < 1e-4 * numbers["gap"]
    assert aim["end_to_minimum"] == pytest.approx(numbers["gap"], rel=1e-4)
    # It falls to below its end, and rises from there on.
    assert aim["lowest"] < 0.95 * numbers["gap_energy"]
    assert aim["last"] == pytest.approx(numbers["gap_energy"], rel=1e-4)
    rises = np.diff(arrays["AIM_energy"]) > 0
    assert rises.sum() == aim["rose"] == study.STEPS - aim["lowest_step"]
    kind = np.array(KINDS)[arrays["AIM_kind"]]
    np.testing.assert_array_equal(kind == "rose", rises)
    assert aim["starts_that_rose"] > 0.2 * numbers["starts"]
    for name, other in numbers["runs"].items():
        if name != "AIM":
            assert other["rose"] == other["starts_that_rose"] == other["steps_that_rose"] == 0
            assert other["end_to_minimum"] < 1e-5
    # Half the step, half the gap, up to the next order.
    (_, last), (_, before) = numbers["gaps"][-1], numbers["gaps"][-2]
    assert before / last == pytest.approx(2, rel=0.03)
    assert numbers["eigenvalues_imaginary"] < 1e-12
    # The path's end lies on the energy that the contours say.
    assert arrays["end_h"].min() >= 0
    assert numbers["share_end"] > 0.99


def test_the_counterexample_and_its_neighbours() -> None:
    numbers, arrays = study.attention(arguments(0))
    assert numbers["change"]["printed"] == pytest.approx(0.4626, abs=5e-5)
    assert numbers["change"]["corrected"] < 0
    assert arrays["printed_run"][1] == pytest.approx(numbers["change"]["printed"])
    assert (np.diff(arrays["corrected_run"]) <= 0).all()
    assert (np.diff(arrays["corrected_along"]) <= 0).all()
    # By hand: a pair at a and one token at b, with w = exp(-(a - b)^2 / 2).
    a, b = np.meshgrid(arrays["a"], arrays["b"])
    w = np.exp(-((a - b) ** 2) / 2)
    pair, single = (2 * a + w * b) / (2 + w), (2 * w * a + b) / (1 + 2 * w)
    change = -4 * (np.exp(-((pair - single) ** 2) / 2) - w)
    change += pair**2 - a**2 + (single**2 - b**2) / 2
    np.testing.assert_allclose(arrays["change"], change, atol=1e-10)
    # Of sums of 3 |y|^2 up to 768, in which 64 roundings may add up.
    limit = 64 * np.finfo(float).eps * (10 + 2 * (2 * a**2 + b**2))
    sure = (change > 2 * limit).sum()
    assert 0 < sure <= numbers["rose"] <= (change > limit / 4).sum()
    assert numbers["rose_corrected"] == 0


def test_the_smallest_counterexample() -> None:
    """The tip of the region of triples (a, a, b): 6.3242, 3.51, and no rise at a smaller a."""
    right, printed = PairwiseEnergy(data_weight=1.0), PairwiseEnergy()

    def change(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        Y = torch.stack([a, a, b], -1)[..., None]
        return right.energy(printed.step(Y)) - right.energy(Y)

    a = torch.linspace(0, 6.32, 300, dtype=torch.float64)
    b = torch.linspace(-8, 8, 600, dtype=torch.float64)
    assert change(*torch.meshgrid(a, b, indexing="ij")).max() < 1e-12
    tip = torch.tensor([6.33, 3.52], dtype=torch.float64)
    assert change(*tip) > 0
    # The update follows a common shift and |Y|^2 does not: the rise grows without bound.
    far = torch.arange(12.0, 400, 10, dtype=torch.float64)
    assert (change(far, far - 2).diff() > 0.5).all()


def test_counts_of_attention(generator: torch.Generator) -> None:
    rows = {(row["energy"], row["step"]): row for row in count_attention(8, generator)}
    total = 28 * 12 * 8
    assert {row["systems"] for row in rows.values()} == {total}
    never = [
        row["rose"]
        for (energy, step), row in rows.items()
        if step.startswith("corrected")
        or (energy == "E_rho" and step in ("printed", "printed, a = 1.9"))
    ]
    assert len(never) == 6
    assert sum(never) == 0
    assert rows["E_rho", "printed, a = 2.5"]["rose"] > total / 10
    assert rows["E_rho", "softmax without beta"]["rose"] > 0
    assert rows["E_rho + |Y|^2 / 2", "printed"]["rose"] > 0


def test_systems_cover_scales_and_offsets(generator: torch.Generator) -> None:
    Y = systems(4, 3, 50, generator).unflatten(0, (6, 2, 50))
    spread = (Y - Y.mean(-2, keepdim=True)).square().mean((2, 3, 4)).sqrt()
    # A variance of four tokens has three degrees of freedom.
    expected = torch.tensor([0.1, 0.2, 0.5, 1, 2, 5], dtype=torch.float64) * math.sqrt(3 / 4)
    torch.testing.assert_close(spread, expected[:, None].expand(6, 2), rtol=0.15, atol=0)
    far = Y.mean(-2).square().mean((2, 3)).sqrt() / spread
    assert (far[:, 0] < 1).all()
    assert (far[:, 1] > 8).all()
    near = systems(4, 3, 50, torch.Generator().manual_seed(1), offset=0.0)
    torch.testing.assert_close(near.unflatten(0, (6, 2, 50))[:, 0], Y[:, 0])
    assert near.mean(-2).square().mean() < Y.mean(-2).square().mean() / 20


def test_the_noise_in_place_of_the_gradient() -> None:
    """f = (y + 1)^2, g = (y - .7)^2 at y = 0: covered by |Delta| <= L |grad h|, and it rises."""
    zero = torch.zeros(1, 1, dtype=torch.float64)
    case = Problem(S=zero, W=zero, B1=zero - 1, B2=zero + 0.7)
    covered, rises = with_noise(case, (0.25, 0.25), zero[None])
    assert covered.item() and rises.item()
    numbers, _ = aim_step(case, (0.25, 0.25), zero[None])
    assert numbers["in_outer"] == 0
    assert numbers["rose"] == 1


def test_counts_of_quadratics(generator: torch.Generator) -> None:
    found = count_quadratics(60, 50, generator)
    for name in ("Lemma 4.3", "Theorem 4.1", "Theorem 5.1", "5.1, sharp"):
        assert found[name]["covered"] > 500
        assert found[name]["rose"] == 0
    assert found["4.1 with the noise"]["rose"] > 0
    assert found["Theorem 4.1"]["covered"] > found["Lemma 4.3"]["covered"]
    assert found["5.1, sharp"]["covered"] > found["Theorem 5.1"]["covered"]


def test_a_rise_below_rounding_is_none() -> None:
    energy = PairwiseEnergy(data_weight=1.0)
    Y = torch.full((2, 3, 1), 12.0, dtype=torch.float64)
    after = torch.stack([Y[0] * (1 + 1e-16), Y[0] * (1 + 1e-10)])
    assert rose(energy, Y, after).tolist() == [False, True]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("aim")
    assert run(out) == 0
    return out, json.loads((out / "results.json").read_text(encoding="utf-8"))


def test_the_command(finished: tuple[Path, dict[str, Any]]) -> None:
    out, results = finished
    assert list(results["sections"]) == list(study.SECTIONS)
    for name in ("regions", "trajectory", "energy", "proximal", "attention"):
        assert (out / f"aim_{name}.png").stat().st_size > 10_000
    panels = results["sections"]["regions"]["panels"]
    assert [panel["wide"]["ratio"] < 1 for panel in panels] == [True] * 3 + [False] * 3
    for panel in panels:
        for window in ("wide", "zoom"):
            assert panel[window]["rose"] > 0
            assert panel[window]["rose_in_outer"] == panel[window]["inner_not_outer"] == 0
    with np.load(out / "maps.npz") as maps:
        kinds = maps["regions/wide2_kind"]
    assert kinds.shape == (81, 81)
    assert (kinds == KINDS.index("rose")).sum() == panels[2]["wide"]["rose"]


def test_the_table(finished: tuple[Path, dict[str, Any]]) -> None:
    table = study.render(finished[1])
    lines = {
        line[: line.index("  ")]: line.split() for line in table.splitlines()[2:] if line[0] != " "
    }
    assert lines["Theorem 4.1, 12 maps"][-2:] == ["never", "rises"]
    assert lines["printed: E_rho + |Y|^2 / 2"][-1] == "fails"
    assert lines["Theorem 3.1, tokens 12, 12, 10"][-2:] == ["1", "+0.4626"]


def test_an_interrupt_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(args: argparse.Namespace) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(study.SECTIONS, "trajectory", stop)
    assert run(tmp_path) == 130
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["interrupted"]
    assert list(results["sections"]) == ["regions"]
    assert (tmp_path / "aim_regions.png").exists()
    assert not (tmp_path / "aim_energy.png").exists()
