r"""One layer, applied again and again to two points on a circle: do they become one?

A layer is trained to move two opposite points on a circle by a thousandth of a turn. Then it is
applied to its own output. Attention replaces each point by a mean of both, which pulls them
together unless the rest of the layer pushes them apart as much. Then it pushes their middle away,
too, which no example of the exact circle tells it not to do: with noise in training, examples do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from simulations.tables import align
from simulations.training import generator_for
from spinformer.nn import FreeEnergyBlock
from spinformer.nn.couplings import HeadMixture, Heads
from spinformer.nn.layers import MLP
from spinformer.nn.masks import Masks
from spinformer.nn.transformer import SelfAttention

__all__ = [
    "FULL",
    "QUICK",
    "VARIANTS",
    "CircleModel",
    "Plan",
    "arcs",
    "roll",
    "runs",
    "table",
    "train",
]

RADIUS, POINTS = 0.3, 1000
HEADS = 2
_INIT, _NOISE = 10, 11
# Of the diameter: nearer points count as one.
COLLAPSED = 0.1


class Attention(nn.Module):
    """Softmax attention of the points to both, then an MLP or none, and a layer norm at the end.

    Without the skip the MLP has none either. Without the norm the points soon are at infinity.
    """

    def __init__(self, width: int, skip: bool, mlp: bool) -> None:
        super().__init__()
        self.attention = SelfAttention(width, HEADS, bias=False)
        self.mlp = MLP(width, 2 * width) if mlp else None
        self.norm = nn.LayerNorm(width)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        """(B, 2, d) to (B, 2, d)."""
        out, _ = self.attention(x, Masks())
        x = x + out if self.skip else out
        if self.mlp is not None:
            x = x + self.mlp(x) if self.skip else self.mlp(x)
        normalized: Tensor = self.norm(x)
        return normalized


def _block(width: int) -> FreeEnergyBlock:
    return FreeEnergyBlock(
        width, HEADS, heads="mixed", steps=1, response="large_d", norm="rms", bias=False
    )


class Fieldless(nn.Module):
    r"""One step of mean field without the field: :math:`m_i = \phi(\beta\sum_j J_{ij} m^0_j)`.

    The couplings and the start :math:`m^0_i = \phi(\beta h_i)` are those of the block with it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = _block(width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 2, d) to (B, 2, d)."""
        block = self.block
        assert block.norm1 is not None
        assert block.value is not None
        heads = block.self_attn(block.norm1(x), Masks())
        assert isinstance(heads, Heads)
        beta = block.log_beta.exp()
        start = block.site.mean(beta * x)
        couplings = HeadMixture(heads, block.value, block.out)
        return block.site.mean(beta * couplings.apply(start))


VARIANTS: dict[str, Callable[[int], nn.Module]] = {
    "attention": lambda width: Attention(width, skip=False, mlp=False),
    "mlp": lambda width: Attention(width, skip=False, mlp=True),
    "skip": lambda width: Attention(width, skip=True, mlp=False),
    "skip_mlp": lambda width: Attention(width, skip=True, mlp=True),
    "spins": _block,
    "spins_no_field": Fieldless,
}


class CircleModel(nn.Module):
    """Two points (B, 2, 2) to two points: a linear map into the layer and one out of it."""

    def __init__(self, variant: str, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.layer = VARIANTS[variant](width)
        self.leave = nn.Linear(width, 2)

    def forward(self, points: Tensor) -> Tensor:
        """(B, 2, 2)."""
        moved: Tensor = self.leave(self.layer(self.enter(points)))
        return moved


@dataclass(frozen=True)
class Plan:
    """How much is trained.

    Attributes:
        widths: of the layer.
        noises: standard deviation of what is added to the coordinates in training, over the radius.
        moments: training steps after which the layer is applied to its own output.
        rollout: how often.
        learning_rate: of Adam; in the last third of the training it falls linearly to 0.
    """

    widths: dict[float, tuple[int, ...]]
    moments: tuple[int, ...]
    rollout: int
    learning_rate: float = 2e-3


# Noise in training, and the widths that are trained with it.
FULL = Plan({0.0: (32,), 0.1: (32, 64, 128)}, moments=(50, 200, 800, 2000), rollout=500)
QUICK = Plan({0.1: (32,)}, moments=(50, 200, 400), rollout=300)
BATCH = 100


def arcs() -> tuple[Tensor, Tensor]:
    """All pairs of opposite points of half a turn, and where they are to go: (500, 2, 2) twice."""
    angle = torch.arange(POINTS // 2 + 1, dtype=torch.float64) * 2 * math.pi / POINTS
    half = RADIUS * torch.stack([angle.cos(), angle.sin()], dim=-1)
    pairs = torch.stack([half, -half], dim=1).float()
    return pairs[:-1], pairs[1:]


def runs(plan: Plan, seeds: Sequence[int]) -> Iterator[tuple[str, int, float, int]]:
    """Variant, width, noise and seed, seed by seed."""
    for seed in seeds:
        for noise, widths in plan.widths.items():
            for width in widths:
                for variant in VARIANTS:
                    yield variant, width, noise, seed


@torch.no_grad()
def roll(model: CircleModel, steps: int) -> Tensor:
    """The points after 0, 1, ... ``steps`` applications, (steps + 1, 2, 2)."""
    points = arcs()[0][:1]
    path = [points[0]]
    for _ in range(steps):
        points = model(points)
        path.append(points[0])
    return torch.stack(path)


def middle_growth(model: CircleModel) -> float:
    """By how much one step stretches a small shift of both points at once; mean over ten pairs.

    The largest singular value of the derivative of the middle of the points moved in the middle of
    the points. Above 1, a pair that is not quite centered moves away from the center.
    """
    growth = []
    for pair in arcs()[0][::50]:
        slope = torch.autograd.functional.jacobian(lambda p: model(p[None])[0].mean(0), pair)
        growth.append(float(torch.linalg.matrix_norm(slope.sum(1), ord=2)))
    return statistics.fmean(growth)


def train(plan: Plan, run: tuple[str, int, float, int]) -> dict[str, Any]:
    """Train one layer on the mean squared error of one step; roll it out at each moment.

    Returns:
        per moment the error of a step (root mean square, over the length of a step; without noise),
        the distance of the points over the diameter along the roll-out, their distance from the
        circle at its end (over the radius), the growth of their middle, and the roll-out itself.
    """
    variant, width, noise, seed = run
    generator = generator_for(seed, _NOISE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator_for(seed, _INIT).initial_seed())
        model = CircleModel(variant, width)
    start, target = arcs()
    step_length = float((target - start).norm(dim=-1).mean())
    optimizer = torch.optim.Adam(model.parameters(), lr=plan.learning_rate)
    last, every = plan.moments[-1], max(1, plan.rollout // 100)
    moments = []
    for step in range(1, last + 1):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * min(1.0, 3.0 * (last - step + 1) / last)
        chosen = torch.randint(len(start), (BATCH,), generator=generator)
        noisy = start[chosen] + noise * RADIUS * torch.randn(BATCH, 2, 2, generator=generator)
        optimizer.zero_grad()
        loss = (model(noisy) - target[chosen]).square().sum(-1).mean()
        loss.backward()
        optimizer.step()
        if step in plan.moments:
            with torch.no_grad():
                error = float((model(start) - target).square().sum(-1).mean().sqrt())
            path = roll(model, plan.rollout).double()
            distance = (path[:, 0] - path[:, 1]).norm(dim=-1) / (2 * RADIUS)
            moments.append(
                {
                    "step": step,
                    "error": error / step_length,
                    "distance": distance[::every].tolist(),
                    "off": float((path[-1].norm(dim=-1) / RADIUS - 1).abs().mean()),
                    "middle_growth": middle_growth(model),
                    "path": path[::every].tolist(),
                }
            )
    return {
        "variant": variant,
        "width": width,
        "noise": noise,
        "seed": seed,
        "rollout": plan.rollout,
        "moments": moments,
    }


def table(points: Sequence[dict[str, Any]]) -> str:
    """A line for each variant, width and noise, at the first moments and after all of the training.

    Collapsed: the points are nearer to each other than a tenth of the diameter.
    """
    steps = points[0]["rollout"]
    header = ["circle: noise, width, layer", "seeds"]
    for moment in points[0]["moments"]:
        header.append(f"collapsed after {moment['step']}")
    header += [
        "growth of the middle",
        "error of a step",
        f"distance after {steps}",
        "lowest",
        "highest",
    ]
    rows = []
    for kind in dict.fromkeys((r["noise"], r["width"], r["variant"]) for r in points):
        group = [r for r in points if (r["noise"], r["width"], r["variant"]) == kind]
        counts = [
            str(sum(r["moments"][i]["distance"][-1] < COLLAPSED for r in group))
            for i in range(len(points[0]["moments"]))
        ]
        last = [r["moments"][-1] for r in group]
        ends = [moment["distance"][-1] for moment in last]
        rows.append(
            (
                ", ".join(map(str, kind)),
                str(len(group)),
                *counts,
                f"{statistics.fmean(m['middle_growth'] for m in last):.2f}",
                f"{statistics.fmean(m['error'] for m in last):.3g}",
                f"{statistics.fmean(ends):.3f}",
                f"{min(ends):.3f}",
                f"{max(ends):.3f}",
            )
        )
    return align(header, rows)
