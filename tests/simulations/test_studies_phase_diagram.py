"""The study of phase diagrams: its units, its observables, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import simulations.phase_diagram as study
import spinformer as sf
from simulations.study import parser_of

TINY = study.Plan({"curie_weiss": 6, "glass": 6, "square": 3, "cubic": 3}, 2, 3, 4, 200)


@pytest.mark.parametrize("kind", study.KINDS)
def test_mean_field_orders_at_the_unit_of_temperature(kind: str) -> None:
    """T_0 is where the largest eigenvalue of beta J R^2 / D is 1: twice T_0 for a large glass."""
    temperatures = torch.tensor([1.0], dtype=torch.float64)
    plan = study.Plan({"curie_weiss": 300, "glass": 400, "square": 4, "cubic": 3}, 2, 3, 4, 200)
    system = study.Panel(kind, 3).systems(plan, temperatures, 0.0, seed=0)
    radius = system.site.radius
    assert radius is not None
    strength = system.beta[0] * system.couplings.largest_eigenvalue() * radius**2 / 3
    expected = 2.0 if kind == "glass" else 1.0
    # 1/N of Curie-Weiss; the edge of a semicircle of 400 sites is within 5 % of its limit.
    assert torch.allclose(strength, torch.tensor(expected, dtype=torch.float64), rtol=0.05)


def test_free_spins() -> None:
    """Without couplings chi D T_0 / R^2 = T_0 / T, m / R = beta h R / D, C of a Langevin spin."""
    panel = study.Panel("curie_weiss", 3)
    temperatures = torch.tensor([2.0, 1.0], dtype=torch.float64)
    system = panel.systems(TINY, temperatures, 0.001, seed=0)
    free = system.replace(couplings=sf.couplings.curie_weiss(6, strength=0.0, dtype=torch.float64))
    found = study.observe(sf.MeanField().solve(free))
    # to the order of (beta h R)^2 = 1e-5
    assert torch.allclose(found["susceptibility"][:, 0], 1 / temperatures, rtol=1e-4)
    assert torch.allclose(found["order"][:, 0], 0.001 / temperatures, rtol=1e-4)


@pytest.mark.parametrize("kind", ["curie_weiss", "glass"])
def test_points_agree_with_enumeration(kind: str) -> None:
    temperatures = torch.tensor([1.5, 0.9], dtype=torch.float64)
    panel = study.Panel(kind, 1)
    found = study.measure(panel, TINY, temperatures, 0.1, seed=3)["sampled"]
    exact = study.observe(sf.Exact().solve(panel.systems(TINY, temperatures, 0.1, seed=3)))
    for name, value in exact.items():
        point, error = torch.tensor(found[name]), torch.tensor(found[f"{name}_error"])
        assert bool(((point - value.mean(1)).abs() < 4 * error).all()), name


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(study, "QUICK", TINY)
    words = ("--quick", "--out", str(tmp_path), "--systems", "square")
    assert study.STUDY.run(parser_of(study.STUDY).parse_args(words)) == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [panel["dim"] for panel in results["panels"]] == [1, 3]
    assert (tmp_path / "square.png").stat().st_size > 10_000
    assert "square lattice, D = 3: mean field" in capsys.readouterr().out
