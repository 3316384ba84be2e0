"""Errors against D: the numbers are those of closed forms, and the powers those of theory."""

import json
import math
from pathlib import Path

import pytest
import torch

import simulations.large_d as study
import spinformer as sf
from simulations.study import parser_of

DATA = Path(__file__).parents[1] / "data" / "steepest_descent.json"


def run(out: Path, *words: str) -> int:
    words = ("--quick", "--out", str(out), *words)
    return study.STUDY.run(parser_of(study.STUDY).parse_args(words))


def records(name: str, **params: float) -> list[dict]:
    found = json.loads(DATA.read_text(encoding="utf-8"))
    return [
        r
        for r in found
        if r["name"] == name and all(r["params"].get(k) == v for k, v in params.items())
    ]


@pytest.mark.parametrize("dim", [1, 16, 128])
def test_the_pair_has_the_errors_of_the_closed_forms(dim: int) -> None:
    (record,) = records("sd_convergence_pair", D=dim, betaJ=1.0)
    found, value = study.measure("pair", dim), record["value"]
    # The records are per component of both spins; ours per spin.
    assert found["sd0"]["log_partition"] == pytest.approx(value["err0_per_D"] / 2, rel=1e-9)
    assert found["sd1"]["log_partition"] == pytest.approx(value["err1_per_D"] / 2, rel=1e-6)
    correlation = value["corr_exact"] - value["corr_SD0"]
    assert found["sd0"]["bond"] == pytest.approx(correlation, rel=1e-9)
    # Mean field has no correlation without a field, TAP that of its second order.
    assert found["mean_field"]["bond"] == pytest.approx(value["corr_exact"], rel=1e-9)
    assert found["tap"]["bond"] == pytest.approx(value["corr_exact"] - 1, rel=1e-9)
    assert found["mean_field"]["log_partition"] == pytest.approx(
        value["logZ_exact"] / (2 * dim), rel=1e-9
    )


@pytest.mark.parametrize(
    ("dim", "zero", "one"), [(3, 2.6889e-2, -1.055e-3), (64, 1.3097e-3, -1.693e-7)]
)
def test_the_ring_has_the_errors_of_the_transfer_matrix(dim: int, zero: float, one: float) -> None:
    found = study.measure("ring", dim)
    assert found["sd0"]["log_partition"] == pytest.approx(zero, rel=1e-4)
    assert found["sd1"]["log_partition"] == pytest.approx(one, rel=1e-3)
    (record,) = records("sd_convergence_ring", D=dim, N=8, betaJ=1.0)
    assert found["exact"] == pytest.approx(record["value"]["logZ_exact"] / (8 * dim), rel=1e-12)


@pytest.mark.parametrize(
    ("dim", "log_partition", "zero", "one"),
    [(2, 0.745725148300, 1.265e-2, -7.195e-3), (32, 11.947163223369, 1.783e-3, -2.868e-5)],
)
def test_the_pair_in_fields_has_the_errors_of_the_quadrature(
    dim: int, log_partition: float, zero: float, one: float
) -> None:
    found = study.measure("fields", dim)
    assert found["exact"] == pytest.approx(log_partition / (2 * dim), rel=1e-11)
    assert found["sd0"]["log_partition"] == pytest.approx(zero / 2, rel=1e-3)
    assert found["sd1"]["log_partition"] == pytest.approx(one / 2, rel=1e-3)
    system = study.build("fields", dim)
    exact = sf.Exact().solve(system).magnetization
    approximate = sf.SteepestDescent().solve(system).magnetization
    error = float((approximate - exact).detach().norm() / exact.detach().norm())
    assert found["sd0"]["magnetization"] == pytest.approx(error, rel=1e-12)


def test_what_the_error_of_the_saddle_tends_to() -> None:
    """-log(1 - c^4) / 4 per spin of a pair, c the golden ratio less one at beta J = 1."""
    found = study.measure("pair", 512)
    c = (math.sqrt(5) - 1) / 2
    assert found["fluctuations"] == pytest.approx(-math.log(1 - c**4) / 4, rel=1e-12)
    assert 512 * found["sd0"]["log_partition"] == pytest.approx(found["fluctuations"], rel=1e-3)


def test_slopes_are_those_of_powers() -> None:
    dims = [2**k for k in range(8)]
    assert study.slope(dims, [3 / d**2 for d in dims], 4) == pytest.approx((-2, 0), abs=1e-12)
    # What is lost in rounding is left out, and the next order bends the line.
    bent = [1 / d + 1 / d**2 if d < 128 else None for d in dims]
    value, error = study.slope(dims, bent, 3) or (0.0, 0.0)
    x = torch.tensor(dims[4:7], dtype=torch.float64).log()
    y = torch.tensor(bent[4:7], dtype=torch.float64).log()
    expected = torch.linalg.lstsq(torch.stack([x, torch.ones(3).double()], 1), y[:, None])
    assert value == pytest.approx(float(expected.solution[0]), rel=1e-12)
    assert 0 < error < 0.02
    assert study.slope(dims[:2], [1.0, 0.5], 4) is None


def test_the_powers_of_theory() -> None:
    dims = [64, 128, 256, 512]
    rows = {name: [study.measure(name, dim) for dim in dims] for name in ("pair", "fields")}
    found = study.slopes(rows, 4)
    assert len(found) == 4 * (2 + 3)
    for fit in found:
        # The next order is smaller by about 1 / D < 0.02 times a factor of a few.
        assert fit["slope"] == pytest.approx(fit["expected"], abs=0.06), fit


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--largest", "8") == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["dims"] == [1, 2, 4, 8]
    assert [row["dim"] for row in results["systems"]["ring"]] == results["dims"]
    assert (tmp_path / "large_d.png").stat().st_size > 10_000
    assert "ring: bond, with fluctuations (SD1)" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = study.measure

    def stop(name: str, dim: int) -> dict:
        if name == "ring":
            raise KeyboardInterrupt
        return measure(name, dim)

    monkeypatch.setattr(study, "measure", stop)
    assert run(tmp_path, "--largest", "8") == 130
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["interrupted"]
    assert list(results["systems"]) == ["pair"]
    assert (tmp_path / "large_d.png").exists()
