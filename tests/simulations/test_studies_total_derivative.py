from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from simulations.study import parser_of
from simulations.total_derivative import (
    DERIVATIVES,
    LABELS,
    PAIRS,
    Grid,
    TotalDerivative,
    _summary,
    along_depth,
    compared,
    paired_difference,
)
from spinformer.nn import Encoder, FreeEnergyBlock

TINY = Grid(8, 2, 5, 2, 1, (0.2, 0.8), (0.2, 0.8), 2)


def run(out: Path, *words: str) -> int:
    study = TotalDerivative()
    words = ("--quick", "--jobs", "0", "--out", str(out), *words)
    return study.run(parser_of(study).parse_args(words))


def test_from_data_to_figures(
    files: dict[str, Path],
    tiny_plans: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("simulations.total_derivative.QUICK", TINY)
    digits = ("--digits", str(files["digits"]))
    assert run(tmp_path, "--seeds", "2", *digits) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    for errors in results["finite_differences"].values():
        # The formula is right, and the test would see it if the second term were missing.
        assert errors["largest_error"] < 1e-7 < 1e-3 < errors["without_second_term"]
    assert set(results["terms"]["beta"]) == set(results["terms"]["strength"]) == set(LABELS)
    assert list(results["tasks"]) == ["digits"]
    for both in results["tasks"]["digits"]["approximations"].values():
        assert both["partial"]["parameters"] == both["total"]["parameters"]
        # The same initial parameters: the first layer reads the same and has the same terms.
        first = [both[name]["terms"]["before"][0][0]["size"] for name in DERIVATIVES]
        assert first[0] == pytest.approx(first[1], rel=1e-5)
        for row in both.values():
            assert row["seeds"] == [0, 1]
            assert row["terms"]["after"] != row["terms"]["before"]
    assert "total - partial" in capsys.readouterr().out
    for name in ("terms.png", "training.png"):
        pixels = imread(tmp_path / name)
        assert pixels.shape[1] > 800
        assert pixels.std() > 0.05


def test_without_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulations.total_derivative.QUICK", TINY)
    assert run(tmp_path, "--task", "none") == 0
    assert (tmp_path / "terms.png").is_file()
    assert not (tmp_path / "training.png").exists()


def test_size_and_angle() -> None:
    m = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])
    turned = torch.tensor([[[0.0, 1.5], [-2.0, 0.0]]])
    for term, expected in ((m / 2, 0.0), (turned, 90.0), (-m / 2, 180.0)):
        size, angle = compared(m, term)
        assert float(size) == pytest.approx(0.5)
        # An arc cosine near its ends has half of the digits.
        assert float(angle) == pytest.approx(expected, abs=0.05)


def test_points_with_too_few_solved_systems_are_left_out() -> None:
    nan = math.nan
    size, angle = torch.tensor([1.0, 3.0, nan, nan]), torch.tensor([80.0, 90.0, nan, nan])
    assert _summary(size, angle) == {"size": 2.0, "angle": 85.0}
    assert _summary(size[1:], angle[1:]) == {"size": None, "angle": None}


@pytest.mark.parametrize("approximation", PAIRS)
def test_a_stack_is_measured_as_it_is(approximation: str) -> None:
    """The terms of partial derivatives are looked at without changing what the stack computes."""
    torch.manual_seed(0)
    block = FreeEnergyBlock(8, 2, approximation, "symmetric")
    stack, x = Encoder(block, 2), torch.randn(2, 5, 8)
    expected = stack(x)
    first, second = along_depth(stack, x)
    assert [layer.derivative for layer in stack.layers] == ["partial", "partial"]
    torch.testing.assert_close(stack(x), expected)
    total = Encoder(FreeEnergyBlock(8, 2, approximation, "symmetric", derivative="total"), 2)
    total.load_state_dict(stack.state_dict())
    assert along_depth(total, x)[0]["size"] == pytest.approx(first["size"])
    assert along_depth(total, x)[1]["size"] != pytest.approx(second["size"], rel=1e-4)


def test_difference_is_paired_by_seed() -> None:
    both = {
        "partial": {"seeds": [0, 1, 2], "accuracy": {"values": [0.5, 0.6, 0.7]}},
        "total": {"seeds": [2, 1], "accuracy": {"values": [0.8, 0.6]}},
    }
    assert paired_difference(both)["values"] == pytest.approx([0.1, 0.0])
