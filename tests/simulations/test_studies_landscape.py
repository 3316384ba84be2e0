"""The function that steepest descent minimizes, and the path to its minimum."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

import simulations.landscape as study
import spinformer as sf
from simulations.study import parser_of


def run(out: Path, *words: str) -> int:
    words = ("--quick", "--out", str(out), *words)
    return study.STUDY.run(parser_of(study.STUDY).parse_args(words))


@pytest.mark.parametrize("dim", [1, 5])
@pytest.mark.parametrize(("beta", "strength"), [(0.3, 0.0), (1.0, 0.3), (3.0, 1.0)])
def test_the_lowest_point_of_a_curve_is_the_free_energy(
    beta: float, strength: float, dim: int
) -> None:
    entry = study.shared(beta, strength, 10)
    field = torch.zeros(study.RING, dim, dtype=torch.float64)
    field[:, 0] = strength * math.sqrt(dim)  # in units of the spin
    site = sf.Ising() if dim == 1 else sf.Sphere(dim)
    system = sf.SpinSystem(study.ring(), field, beta, site)
    equilibrium = sf.SteepestDescent(auxiliary="shared").solve(system)
    height = float(equilibrium.log_partition) / (study.RING * dim)
    assert entry["path"]["phi"][-1] == pytest.approx(height, rel=1e-12)
    assert entry["path"]["t"][-1][0] == pytest.approx(float(equilibrium.solution.value), rel=1e-10)
    assert min(entry["curve"]["phi"]) >= height - 1e-12
    assert entry["pole"] == pytest.approx(2.0)


@pytest.mark.parametrize("beta", [1.0, 10.0])
def test_paths_of_two_sites_end_at_the_solution_of_the_solver(beta: float) -> None:
    entry = study.sites(beta, 20)
    couplings, field = study.pair()
    system = sf.SpinSystem(couplings, math.sqrt(2) * field, beta, sf.Sphere(2))
    equilibrium = sf.SteepestDescent().solve(system)
    for path in entry["paths"].values():
        assert path["t"][-1] == pytest.approx(equilibrium.solution.value.tolist(), rel=1e-8)
        assert path["phi"][-1] == pytest.approx(float(equilibrium.log_partition) / 4, rel=1e-12)
        # Every point is one step after the last, inside the cone, and residuals end quadratically.
        assert all(t[0] * t[1] > 1 for t in path["t"])
        assert len({tuple(t) for t in path["t"]}) == len(path["t"])
        near = [r for r in path["residual"] if 1e-13 < r < 0.1]
        assert all(later < earlier**1.5 for earlier, later in itertools.pairwise(near))
    assert entry["paths"]["far start"]["t"][0] == pytest.approx(study.FAR)


def test_a_map_is_infinite_outside_its_wall() -> None:
    entry = study.sites(1.0, 30)
    axis = entry["axis"]
    for i, j in itertools.product(range(30), repeat=2):
        # Rows are t2, columns t1.
        assert (entry["phi"][j][i] is None) == (axis[i] * axis[j] <= 1)
    # One value by hand, from the inverse of a 2 x 2 matrix: fields are at a right angle.
    x, y = axis[20], axis[25]
    determinant = x * y - 1
    (a, b) = study.PAIR_FIELDS
    expected = x + y - 2 - math.log(determinant) + (y * a**2 + x * b**2) / determinant
    assert entry["phi"][25][20] == pytest.approx(expected / 4, rel=1e-12)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [entry["beta"] for entry in results["sites"]] == list(study.PAIR_BETAS)
    assert (tmp_path / "landscape.png").stat().st_size > 10_000
    assert "pair, beta 10, far start" in capsys.readouterr().out


def test_an_interrupt_keeps_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(beta: float, points: int) -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "sites", stop)
    assert run(tmp_path) == 130
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["interrupted"]
    assert results["sites"] == []
    assert (tmp_path / "landscape.png").exists()
