"""Steepest descent with one shared t in a block: how often its couplings are diagonalized."""

import torch

from spinformer.nn import FreeEnergyBlock

F64 = torch.float64


def test_fixed_couplings_are_diagonalized_once_a_change_of_theirs(generator, monkeypatch):
    """Shared t: one eigendecomposition a training step, none in repeated evaluation."""
    block = FreeEnergyBlock(
        8, 2, "steepest_descent", "fixed", num_spins=6, auxiliary="shared", dtype=F64
    )
    calls = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: calls.append(matrix) or eigh(matrix))
    x = torch.randn(3, 6, 8, generator=generator, dtype=F64)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        block(x).sin().sum().backward()
        optimizer.step()
        assert len(calls) == step + 1
    block.eval()
    with torch.no_grad():
        first = block(x)
        assert len(calls) == 4
        torch.testing.assert_close(block(x), first)
    with torch.inference_mode():
        torch.testing.assert_close(block(x), first)
    assert len(calls) == 4
