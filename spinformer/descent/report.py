"""What a run of steps does to an energy: where it was bound to fall, fell anyway, or rose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from spinformer.descent.algorithms import (
    AIM,
    Algorithm,
    ProximalAIM,
    aligned,
    rounding,
    terms_of,
)
from spinformer.descent.energy import Energy, SumEnergy, check_tokens, clear
from spinformer.descent.guarantees import (
    aim_bound,
    apollonius,
    gradient_ratio,
    proximal_bound,
    proximal_deficit,
    proximal_kappa,
)
from spinformer.descent.proximal import Proximal, penalty_of

__all__ = ["Constants", "DescentReport", "Verdict", "descend", "monitor"]


class Verdict(IntEnum):
    """Of one step of one system."""

    UNDEFINED = -1
    """One of the two energies is NaN, or both are the same infinity."""
    ROSE = 0
    """By more than rounding."""
    FELL = 1
    """Did not rise by more than rounding, though no test promised it."""
    GUARANTEED = 2
    """Was proven not to rise before its energy was looked at, and did not."""


@dataclass(frozen=True)
class Constants:
    """Of ``h = f + g``, f the first term of a sum and g the rest; scalars or ``(...)``.

    Attributes:
        lipschitz_f, lipschitz_g: of the gradients of f and g.
        lipschitz_h: an upper bound for the Hessian of h, which may be negative.
        convexity_h: a lower bound for it; Lemma 4.3 needs a positive one.
    """

    lipschitz_f: Tensor
    lipschitz_g: Tensor
    lipschitz_h: Tensor
    convexity_h: Tensor

    @staticmethod
    def of(energy: Energy, count: int) -> Constants:
        """From the Hessian bounds of the terms, for states of at most ``count`` tokens."""
        first, *rest = terms_of(energy)
        lower_f, upper_f = first.hessian_bounds(count)
        lower, upper = energy.hessian_bounds(count)
        slope_g = torch.zeros_like(upper)
        if rest:
            lower_g, upper_g = SumEnergy(*rest).hessian_bounds(count)
            slope_g = torch.maximum(lower_g.abs(), upper_g.abs())
        return Constants(
            lipschitz_f=torch.maximum(lower_f.abs(), upper_f.abs()),
            lipschitz_g=slope_g,
            lipschitz_h=upper,
            convexity_h=lower,
        )


@dataclass(frozen=True, repr=False)
class DescentReport:
    """The books of a run of T steps, for systems ``(...)``.

    Tests of ``region``, each true where it proves that the step does not raise the energy:

    * ``"algorithm"``: the algorithm cannot raise this energy from any state;
    * ``"majorizer"``: the quadratic upper bound of the energy at the state does not rise. It holds
      for any step, whatever made it;
    * ``"theorem_4_1"``: ``delta <= bound``, of AIM;
    * ``"lemma_4_3"``: the state lies in the region of Apollonius, of AIM, where ``minima`` are
      given and the sum is strongly convex;
    * ``"theorem_5_1"``: ``delta <= bound``, of proximal AIM, with the sharp constant and ``kappa``.
      The test of the printed theorem, which lies inside of this one for the ReLU, is
      ``delta <= proximal_bound(..., kappa=-deficit, printed=True)``.

    ``print(report)`` shows :meth:`table`.

    Attributes:
        energy: the total with the penalty, ``(T + 1, ...)``.
        terms: its terms, in order, the penalty last if there is one, ``(K, T + 1, ...)``.
        names: of the terms: their classes, numbered where one occurs twice, and ``"penalty"``.
        delta: ``|grad f| / |grad h|`` before each step, ``(T, ...)``; NaN without a second term.
        bound: L of Theorem 4.1 or L' of Theorem 5.1, ``(T, ...)``; NaN for other algorithms.
        kappa: :func:`proximal_kappa`, ``(T, ...)``; NaN without a penalty.
        deficit: :func:`proximal_deficit` of ``a2 grad h`` and the state, likewise.
        region: the tests that apply, ``(T, ...)`` each.
        verdict: codes of :class:`Verdict`, ``(T, ...)``.
        threshold: what counts as rounding: ``factor eps (1 + sum_k |E_k| + |Y|^2)``, ``(T, ...)``.
        state: the last, ``(..., N, d)``, with its graph.
        states: all, ``(T + 1, ..., N, d)``; None unless asked for.
    """

    energy: Tensor
    terms: Tensor
    names: tuple[str, ...]
    delta: Tensor
    bound: Tensor
    kappa: Tensor
    deficit: Tensor
    region: dict[str, Tensor]
    verdict: Tensor
    threshold: Tensor
    state: Tensor
    states: Tensor | None = None

    @property
    def rise(self) -> Tensor:
        """``E_(t+1) - E_t``, ``(T, ...)``."""
        return self.energy[1:] - self.energy[:-1]

    @property
    def guaranteed(self) -> Tensor:
        """Where some test holds, ``(T, ...)``, whatever the energy then did."""
        held = torch.zeros_like(self.verdict, dtype=torch.bool)
        for test in self.region.values():
            held = held | test
        return held

    def __repr__(self) -> str:
        found = ", ".join(f"{name} {count}" for name, count in self.counts().items() if count)
        systems = tuple(self.energy.shape[1:])
        return f"DescentReport(steps={len(self.verdict)}, systems={systems}: {found or 'nothing'})"

    def __str__(self) -> str:
        return self.table()

    def counts(self) -> dict[str, int]:
        """How many steps of all systems have each verdict, and how many broke a promise."""
        found = {each.name.lower(): int((self.verdict == each).sum()) for each in Verdict}
        broken = self.guaranteed & (self.verdict == Verdict.ROSE)
        return found | {"broken": int(broken.sum())}

    def table(self, system: int | tuple[int, ...] | None = None) -> str:
        """The run as text, one row a step.

        Args:
            system: the index of one system of a batch. None for all: means over the systems that
                are not NaN, and how many were guaranteed, fell anyway, rose and have no verdict.
        """
        if self.energy.dim() == 1:
            system = ()
        return self._batch() if system is None else self._single(system)

    def _single(self, system: int | tuple[int, ...]) -> str:
        place = (system,) if isinstance(system, int) else system

        def at(series: Tensor, t: int) -> Tensor:
            return series[t][place]

        columns = ["step", "energy", *self.names]
        columns += ["delta", "bound", "kappa", "verdict", "tests that hold"]
        rows = []
        for t in range(len(self.energy)):
            row = [str(t)]
            row += [_number(at(series, t).item()) for series in (self.energy, *self.terms)]
            if t < len(self.verdict):
                row += [_number(at(x, t).item()) for x in (self.delta, self.bound, self.kappa)]
                row.append(Verdict(int(at(self.verdict, t))).name.lower())
                row.append(" ".join(name for name, test in self.region.items() if at(test, t)))
            rows.append(row)
        return _layout(columns, rows)

    def _batch(self) -> str:
        columns = ["step", "mean energy", *(f"mean {name}" for name in self.names)]
        columns += ["median delta", "median bound"]
        columns += [each.name.lower() for each in reversed(Verdict)]
        rows = []
        for t in range(len(self.energy)):
            row = [str(t)]
            row += [_number(x[t].nanmean().item()) for x in (self.energy, *self.terms)]
            if t < len(self.verdict):
                row += [_number(x[t].nanmedian().item()) for x in (self.delta, self.bound)]
                verdict = self.verdict[t]
                row += [str(int((verdict == each).sum())) for each in reversed(Verdict)]
            rows.append(row)
        return _layout(columns, rows)


def descend(
    energy: Energy,
    Y: Tensor,
    algorithm: Algorithm,
    steps: int,
    mask: Tensor | None = None,
    *,
    constants: Constants | None = None,
    minima: tuple[Tensor, Tensor] | None = None,
    keep_states: bool = False,
    factor: float = 64.0,
) -> DescentReport:
    """Run an algorithm, and report what every step did and what was known before it.

    Cost: besides the steps one energy and one gradient of every term a state. States are kept only
    on demand; the last one carries derivatives.

    Args:
        energy: a sum shows its terms; f of the theorems is the first of them.
        Y: the first state, ``(..., N, d)``.
        algorithm: what makes the steps. The penalty of a proximal one belongs to the energy.
        steps: T.
        mask: boolean ``(..., N)``, True where there is no token.
        constants: of the theorems; None takes the energy's own Hessian bounds.
        minima: the minima of f and of h, ``(..., N, d)`` each, for Lemma 4.3.
        keep_states: keep all states.
        factor: of the rounding threshold, see :class:`DescentReport`.

    Raises:
        TypeError: what is no energy, no tokens or no algorithm, or one tensor of minima.
        ValueError: ``steps`` is negative.
    """
    if steps < 0:
        raise ValueError(f"steps={steps} must not be negative")
    # monitor() takes None.
    _check_algorithm(algorithm)

    def run() -> Iterator[Tensor]:
        state = check_tokens(Y, mask)
        yield state
        for _ in range(steps):
            state = algorithm.step(energy, state, mask)
            yield state

    return monitor(
        run(),
        energy,
        algorithm,
        mask,
        constants=constants,
        minima=minima,
        keep_states=keep_states,
        factor=factor,
    )


def _check_algorithm(algorithm: object) -> None:
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"algorithm={algorithm!r} is no Algorithm: pass MajorizeMinimize(), AIM(0.1) or another"
        )


def monitor(
    states: Tensor | Iterable[Tensor],
    energy: Energy,
    algorithm: Algorithm | None = None,
    mask: Tensor | None = None,
    *,
    constants: Constants | None = None,
    minima: tuple[Tensor, Tensor] | None = None,
    keep_states: bool = False,
    factor: float = 64.0,
) -> DescentReport:
    """The report of :func:`descend` for a trajectory obtained elsewhere, as the layers of a block.

    Args:
        states: T + 1 states ``(..., N, d)``, at least one; taken one at a time.
        energy: the energy to judge them by.
        algorithm: what made the states; it says which theorems apply. None: only the majorizer's
            test does.
        mask, constants, minima, keep_states, factor: as :func:`descend`.

    Raises:
        TypeError: what is no energy or no algorithm, or one tensor of minima.
        ValueError: no states.
    """
    if not isinstance(energy, Energy):
        raise TypeError(
            f"energy is {type(energy).__name__}: pass an Energy, of several their sum f + g, and "
            "the state after it"
        )
    if algorithm is not None:
        _check_algorithm(algorithm)
    if isinstance(minima, Tensor):
        raise TypeError("minima is one tensor: pass two, the minima of the first term and of all")
    books = _Books(energy, algorithm, mask, constants, minima, factor, keep_states)
    state = None
    for state in states:
        with torch.no_grad():
            books.record(clear(state, mask).detach())
    if state is None:
        raise ValueError("states is empty: pass at least the first state")
    return books.close(clear(state, mask))


@dataclass
class _Books:
    """One pass over the states; what a state says about its step waits for the next one."""

    model: Energy
    algorithm: Algorithm | None
    mask: Tensor | None
    constants: Constants | None
    minima: tuple[Tensor, Tensor] | None
    factor: float
    keep_states: bool
    terms: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    regions: dict[str, list[Tensor]] = field(default_factory=dict)
    previous: Tensor | None = None

    @property
    def prox(self) -> ProximalAIM | None:
        return self.algorithm if isinstance(self.algorithm, ProximalAIM) else None

    @property
    def penalty(self) -> Proximal | None:
        return None if self.algorithm is None else self.algorithm.penalty

    def record(self, state: Tensor) -> None:
        terms = [term.energy(state, self.mask) for term in terms_of(self.model)]
        if self.penalty is not None:
            terms.append(penalty_of(self.penalty, state, self.mask))
        self.terms.append(_stacked(terms))
        if self.keep_states:
            self.states.append(state.expand(*self.terms[-1].shape[1:], *state.shape[-2:]))
        if self.previous is not None:
            self._judge(self.previous, state)
        self.previous = state

    def _judge(self, before: Tensor, after: Tensor) -> None:
        """The step between two states."""
        gradients = [term.gradient(before, self.mask) for term in terms_of(self.model)]
        total = _stacked(gradients).sum(0)
        system = total.new_zeros(total.shape[:-2])
        nothing = torch.full_like(system, torch.nan)
        row = dict.fromkeys(("delta", "bound", "kappa", "deficit"), nothing)
        if len(gradients) > 1:
            row["delta"] = gradient_ratio(gradients[0], total)
        region = {"majorizer": self._majorized(before, after, total)}
        if self.algorithm is not None:
            always = self.algorithm.guaranteed(self.model, before.shape[-2])
            region["algorithm"] = always.to(system.device).expand(system.shape)
        # The theorems are about gradient steps of two terms.
        plain = self.algorithm
        if isinstance(plain, ProximalAIM):
            plain = plain.alternating
        if isinstance(plain, AIM) and not plain.own and len(gradients) == 2:
            self._theorems(plain, before, total, row, region)
        held = torch.stack(list(region.values())).any(0)
        old, new = self.terms[-2], self.terms[-1]
        row["threshold"] = rounding(old, before, self.factor)
        start, end = old.sum(0), new.sum(0)
        verdict = torch.where(held, int(Verdict.GUARANTEED), int(Verdict.FELL))
        verdict = verdict.masked_fill(end > start + row["threshold"], int(Verdict.ROSE))
        unknown = torch.isnan(end - start)
        row["verdict"] = verdict.masked_fill(unknown, int(Verdict.UNDEFINED))
        for name, value in row.items():
            self.rows.setdefault(name, []).append(value)
        for name, value in region.items():
            self.regions.setdefault(name, []).append(value)

    def _majorized(self, before: Tensor, after: Tensor, gradient: Tensor) -> Tensor:
        moved = after - before
        curvature = self.model.curvature(before, self.mask)
        change = (gradient * moved).sum((-2, -1))
        change = change + (curvature * moved.square().sum(-1)).sum(-1) / 2
        if self.penalty is not None:
            change = change + self.terms[-1][-1] - self.terms[-2][-1]
        return change <= 0

    def _theorems(
        self,
        algorithm: AIM,
        before: Tensor,
        gradient: Tensor,
        row: dict[str, Tensor],
        region: dict[str, Tensor],
    ) -> None:
        """Writes L or L', kappa and the tests of the theorems into ``row`` and ``region``."""
        system = row["delta"]
        size_f, size_g = (
            torch.as_tensor(x, dtype=system.dtype, device=system.device)
            for x in algorithm.sizes_of(self.model)
        )
        if self.constants is None:
            self.constants = Constants.of(self.model, before.shape[-2])
        known = self.constants
        if self.prox is None:
            bound = aim_bound(size_f, size_g, known.lipschitz_g, known.lipschitz_h)
            row["bound"] = bound.to(system.dtype).expand(system.shape)
            region["theorem_4_1"] = system <= row["bound"]
            if self.minima is not None:
                ratio = known.convexity_h * row["bound"] / known.lipschitz_f
                inside = apollonius(*self.minima, ratio).contains(before)
                region["lemma_4_3"] = inside & (known.convexity_h > 0)
            return
        step = aligned(size_g) * gradient
        moved = self.prox.project(before - step, size_g, self.mask)
        row["kappa"] = proximal_kappa(before, moved, step)
        row["deficit"] = proximal_deficit(step, before)
        bound = proximal_bound(
            size_f, size_g, known.lipschitz_g, row["kappa"], known.lipschitz_h,
            convexity=self.prox.penalty.convexity,
        )  # fmt: skip
        row["bound"] = bound.to(system.dtype).expand(system.shape)
        region["theorem_5_1"] = system <= row["bound"]

    def _names(self) -> tuple[str, ...]:
        kinds = [type(term).__name__ for term in terms_of(self.model)]
        names = [
            f"{kind} {kinds[:k].count(kind) + 1}" if kinds.count(kind) > 1 else kind
            for k, kind in enumerate(kinds)
        ]
        return tuple(names + ["penalty"] * (len(self.terms[0]) - len(names)))

    def close(self, state: Tensor) -> DescentReport:
        terms = torch.stack(self.terms, 1)
        empty = terms.new_zeros(0, *terms.shape[2:])
        rows = {name: torch.stack(value) for name, value in self.rows.items()}
        return DescentReport(
            energy=terms.sum(0),
            terms=terms,
            names=self._names(),
            delta=rows.get("delta", empty),
            bound=rows.get("bound", empty),
            kappa=rows.get("kappa", empty),
            deficit=rows.get("deficit", empty),
            region={name: torch.stack(value) for name, value in self.regions.items()},
            verdict=rows.get("verdict", empty.long()),
            threshold=rows.get("threshold", empty),
            state=state,
            states=torch.stack(self.states) if self.keep_states else None,
        )


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of what may have other batch axes each."""
    return torch.stack(torch.broadcast_tensors(*tensors))


# An energy that is NaN throughout shows as blank.
_KEPT = ("energy", "mean energy")


def _number(x: float) -> str:
    return "" if x != x else f"{x:.6g}"


def _layout(columns: list[str], rows: list[list[str]]) -> str:
    filled = [row + [""] * (len(columns) - len(row)) for row in rows]
    # What no row has a value for (the bound of a theorem, say) takes no column.
    shown = [k for k, name in enumerate(columns) if any(row[k] for row in filled) or name in _KEPT]
    columns = [columns[k] for k in shown]
    filled = [[row[k] for k in shown] for row in filled]
    widths = [max(map(len, column)) for column in zip(columns, *filled, strict=True)]
    lines = (
        "  ".join(x.rjust(width) for x, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *filled)
    )
    return "\n".join(lines)
