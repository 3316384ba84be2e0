"""The sweep over beta: it shows thermodynamics, and points whose error bars mean something."""

import json
import math
from pathlib import Path

import pytest
import torch

import simulations.beta_sweep as study
import spinformer as sf
from simulations.study import parser_of


def run(out: Path, *words: str) -> int:
    words = ("--quick", "--out", str(out), *words)
    return study.STUDY.run(parser_of(study.STUDY).parse_args(words))


@pytest.fixture(scope="module")
def ring() -> tuple[torch.Tensor, dict]:
    betas = torch.tensor([0.2, 0.4, 1.0], dtype=torch.float64)
    return betas, study.measure(study.Family("ring", 1), betas, 0)


def test_the_exact_ring_is_its_transfer_matrix(ring: tuple[torch.Tensor, dict]) -> None:
    betas, found = ring
    for i, beta in enumerate(betas.tolist()):
        # Z / 2^N = cosh^N (1 + t^N), U = -d log Z / d beta.
        t = math.tanh(beta)
        log_z = 8 * math.log(math.cosh(beta)) + math.log1p(t**8)
        u = -t - t**7 * (1 - t * t) / (1 + t**8)
        exact = found["exact"]
        assert exact["free_energy"][i] == pytest.approx(-log_z / (8 * beta), rel=1e-10)
        assert exact["internal_energy"][i] == pytest.approx(u, rel=1e-10)
        assert exact["entropy"][i] == pytest.approx(beta * u + log_z / 8, rel=1e-9)


def test_mean_field_is_shown_at_its_lowest_free_energy(ring: tuple[torch.Tensor, dict]) -> None:
    """Above its transition at beta = 1/2 it is free spins, below ordered: m = tanh(2 beta m)."""
    _, found = ring
    field = found["mean_field"]["free_energy"]
    assert field[:2] == pytest.approx([0, 0], abs=1e-12)
    m = 1.0
    for _ in range(500):
        m = math.tanh(2 * m)
    assert field[2] == pytest.approx(m * m - math.log(math.cosh(2 * m)), rel=1e-8)
    # The bound of Gibbs and Bogoliubov.
    pairs = zip(field, found["exact"]["free_energy"], strict=True)
    assert all(value > exact for value, exact in pairs)


def test_thermodynamics_hangs_together(ring: tuple[torch.Tensor, dict]) -> None:
    betas, found = ring
    for rows in found.values():
        for i, beta in enumerate(betas.tolist()):
            f, u, s = (rows[name][i] for name in study.QUANTITIES)
            assert s == pytest.approx(beta * (u - f), abs=1e-12)


def test_what_fails_is_not_shown() -> None:
    """TAP of a cold pair has no solution near the field's."""
    betas = torch.tensor([0.2, 3.0], dtype=torch.float64)
    found = study.measure(study.Family("pair", 3), betas, 0)
    assert found["tap"]["free_energy"][0] is not None
    assert found["tap"]["free_energy"][1] is None
    assert "bethe" not in found


@pytest.mark.stochastic
def test_points_agree_with_exact_results() -> None:
    family, betas = study.Family("glass", 1), torch.tensor([0.3, 1.0], dtype=torch.float64)
    row = study.sample(family, betas, 1, 300)
    exact = sf.Exact().solve(family.system(betas, 1))
    for quantity in study.QUANTITIES:
        expected = getattr(exact, f"{quantity}_per_spin").tolist()
        for value, error, target in zip(
            row[quantity], row[f"{quantity}_error"], expected, strict=True
        ):
            assert 0 < error < 0.03
            assert abs(value - target) < 4 * error, quantity


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "FAMILIES", (study.Family("glass", 1), study.Family("ring", 1)))
    assert run(tmp_path, "--sweeps", "40") == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    for column in results["columns"]:
        assert 0 < len(study.scores(column)) <= 2 * len(column["monte_carlo"]["beta"])
    assert (tmp_path / "beta_sweep.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "spin glass, N = 10, Ising: adaptive TAP" in printed
    assert "Monte Carlo, ring of 8" in printed


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = study.measure

    def once(family: study.Family, *rest: object) -> dict:
        if family.dim == 3:
            raise KeyboardInterrupt
        return measure(family, *rest)

    monkeypatch.setattr(study, "measure", once)
    monkeypatch.setattr(study, "FAMILIES", (study.Family("ring", 1), study.Family("ring", 3)))
    assert run(tmp_path) == 130
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["interrupted"]
    assert [column["dim"] for column in results["columns"]] == [1]
    assert (tmp_path / "beta_sweep.png").exists()
