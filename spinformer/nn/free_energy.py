r"""A Transformer block that is a spin system: tokens are fields, magnetizations are the output."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spinformer.equilibrium.iteration import check_initial
from spinformer.equilibrium.mean_field import (
    MeanField,
    MeanFieldEquilibrium,
    mean_field_map,
)
from spinformer.errors import OnFailure, WarnOnce, check_choice, check_on_failure, strict_options
from spinformer.nn.amortized import Amortization
from spinformer.nn.approximations import check_approximation, make_approximation, make_site
from spinformer.nn.couplings import AttentionCouplings, FusedHeads, HeadMixture, Heads
from spinformer.nn.interactions import (
    AMORTIZED,
    COUPLINGS,
    Interaction,
    Mixture,
    check_interaction,
    make_correction,
    make_interaction,
    reported_couplings,
)
from spinformer.nn.layers import ACTIVATIONS, MLP, NORMS, make_norm
from spinformer.nn.masks import Masks, check_heads, merge_masks, to_batch
from spinformer.nn.neural_force import Mixing, NeuralForce, NeuralSystem, SteadyState
from spinformer.nn.report import BlockReport
from spinformer.nn.streamed import StreamedHeads
from spinformer.nn.total_derivative import check_total, coupling_term
from spinformer.solve.fixed_point import FixedPointSolver, unroll
from spinformer.solve.solution import Solution
from spinformer.spins.couplings import Couplings
from spinformer.spins.site import Radius
from spinformer.spins.system import SpinSystem
from spinformer.thermo.equilibrium import Equilibrium

__all__ = ["FreeEnergyBlock"]


@strict_options
class FreeEnergyBlock(nn.Module):
    r"""Drop-in Transformer layer whose output is the magnetization of a spin system.

    The token stream is the external field, :math:`h_i`, of one spin a token (and a head). The
    couplings are computed from the normalized tokens, as attention is, and the block returns

    .. math:: m_i = -\frac{\partial F}{\partial h_i},\qquad
              \text{mean field:}\quad m_i = \phi\Big(\beta h_i + \beta\sum_{j\ne i} J_{ij} m_j\Big).

    The residual connection is the field, token mixing the couplings, and the normalization the
    response :math:`\phi` of a spin on a sphere, which bounds the output. The fixed point is
    differentiated implicitly: memory does not grow with iterations.

    Args:
        d_model: width of the token stream.
        nhead: number of heads, a divisor of ``d_model``.
        approximation: ``"mean_field"``; or, with symmetric couplings of split heads, ``"tap"``,
            ``"adaptive_tap"`` or ``"steepest_descent"``, which keep what mean field leaves out
            (:class:`~spinformer.TAP`, :class:`~spinformer.AdaptiveTAP`,
            :class:`~spinformer.SteepestDescent`).
        couplings: ``"softmax"`` (row-normalized attention, asymmetric: a nonequilibrium steady
            state without free energy; every mask), ``"symmetric"`` (half the sum of it and its
            transpose; masks must be symmetric, a causal one is not), ``"linear"`` (a symmetric
            kernel of rank 2 d_model / nhead that is never written down, of padding masks only:
            time and memory of mean field and of steepest descent are linear in N,
            :class:`~spinformer.nn.couplings.LinearCouplings`), ``"fixed"`` (a symmetric
            parameter for ``num_spins`` tokens), ``"matrix"`` (blocks :math:`J_{ij}` of D x D
            parameters that mix the channels of a head, for ``num_spins`` tokens; mean field) or
            ``"mixer"`` (:math:`\sum_j J_{ij} m_j` replaced by an MLP across the ``num_spins``
            tokens, the same for all channels of a head; mean field, no free energy, no mask over
            pairs).
        heads: ``"split"``: each head is a spin system of dimension d_model / nhead with scalar
            couplings, acting on its channels. ``"mixed"`` (mean field only): one system of
            dimension d_model with :math:`J_{ij} = \sum_h A^h_{ij} O_h V_h`, multi-head attention
            with its projections inside the field; with ``"symmetric"`` or ``"fixed"`` couplings
            :math:`O_h = V_h^{\mathsf T}`, so that a free energy exists.
        derivative: ``"partial"``: m with the couplings held fixed. ``"total"``: minus the total
            derivative of the free energy, of all heads together, in the tokens x,

            .. math:: -\frac{\mathrm dF}{\mathrm dx_i} = m_i + \tfrac12 \sum_h\sum_{m \ne n}
                      \langle S^h_m\cdot S^h_n\rangle \frac{\partial J^h_{mn}}{\partial x_i},

            whose second term mixes channels: every head's couplings see all of them. The
            correlations are those of the approximation, without a second solve. The MLP's output
            counts as a given shift of the field, and dropout as given. Needs ``"symmetric"``
            couplings (``"fixed"`` ones add nothing), a solved equilibrium and the plain stream;
            takes 1.4 to 1.7 times as long with mean field and steepest descent, three times with
            TAP. The report shows the second term.
        stream: what flows between blocks. ``"plain"``: field in, magnetization out.
            ``"magnetization"``: magnetization in (strictly inside the ball, else ``ValueError``),
            lifted by the inverse response, magnetization out. ``"field"``: field in, conjugate
            field :math:`h_i + \sum_j J_{ij} m_j` out, so that a block that adds nothing is the
            identity. :class:`~spinformer.nn.Encoder` applies the response where a stack needs it.
        steps: None solves to the fixed point; K applies the map K times to the start and is
            differentiated through (mean field only).
        fused: whether amortized couplings stay unwritten. With ``steps`` (softmax couplings):
            ``True`` and ``"auto"`` use torch's fused attention kernel, which cannot be
            differentiated twice: a second derivative raises. At the fixed point of mean field:
            ``True`` computes them again, in blocks, at every iteration, with memory linear in N and
            two to three times the time; ``"auto"`` does so beyond 1 GiB of couplings and otherwise
            computes them once. ``False`` writes them down always. Weights that dropout acts on
            are written down, whatever is asked for; ``"linear"`` couplings never are.
        beta: inverse temperature at first, one a head (one in all for mixed heads).
        learnable_beta: whether training moves it (its logarithm is the parameter).
        response: ``"exact"`` (Bessel functions) or ``"large_d"`` (closed form). Steepest descent
            has its own, the closed form.
        radius: length of the spins; None is sqrt(dimension), ``"large_d"`` sqrt(dimension/2 - 1).
            Spins of dimension 1 are Ising spins, of length 1.
        dim_feedforward: hidden width of a position-wise MLP; None for none. It is added to the
            field: of the block's own system for the first two streams, to the outgoing one for
            ``"field"`` (couplings first, as in a Transformer).
        activation: of every MLP: ``"gelu"``, ``"relu"`` or ``"silu"``.
        dropout: probability, in training, on coupling weights (``"linear"`` ones have none that are
            written down), hidden units and the MLP's output.
        norm: ``"layer"`` or ``"rms"``, of what amortized couplings, the MLP and the learned start
            see.
        bias: whether linear maps have biases.
        initial: where the solve starts. None: the magnetization without couplings. ``"learned"``:
            the response to a linear map of the normalized tokens (the values). A tensor that
            broadcasts to (B, N, d_model): kept as a buffer. Not for steepest descent, whose minimum
            is unique.
        num_spins: number of tokens, for ``couplings`` ``"fixed"``, ``"matrix"`` and ``"mixer"``.
        symmetric_between: of ``"matrix"``: :math:`J_{ij} = J_{ji}^{\mathsf T}`, so that a free
            energy exists. Only independent entries are parameters. True unless set.
        symmetric_within: of ``"matrix"``: :math:`J_{ij} = J_{ij}^{\mathsf T}` in every block. False
            unless set.
        dim_mixer: hidden width of ``"mixer"``; None is twice the number of tokens.
        correction: ``"mlp"`` subtracts a position-wise MLP of the magnetization from the field, a
            learned Onsager term: :math:`m_i = \phi(\beta(h_i + \sum_j J_{ij} m_j - f(m_i)))`. Mean
            field, with any couplings; there is no free energy then. Dropout leaves it alone.
        dim_correction: its hidden width; None is twice the dimension of a spin.
        solver, damping, tolerance, max_iterations: of the fixed point of mean field, TAP and
            adaptive TAP; tolerance and max_iterations also of steepest descent.
        auxiliary: ``"site"`` or ``"shared"``, of :class:`~spinformer.SteepestDescent`.
        on_failure: ``"warn"`` (once a block, the backward pass included), ``"raise"``,
            ``"ignore"`` or a function of the message.
        batch_first: whether three-axes inputs are (B, N, d_model) or (N, B, d_model).
        device, dtype: of the parameters. The solve runs in float32 or better.

    Cost: that of the couplings, O(B N^2 d), and of each iteration, O(B N^2 d); steepest descent
    O(B nhead N^3) instead.

    Raises:
        TypeError: an unknown option.
        ValueError: options that contradict each other; the message says which and what to use.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        approximation: Literal[
            "mean_field", "tap", "adaptive_tap", "steepest_descent"
        ] = "mean_field",
        couplings: Literal[
            "softmax", "symmetric", "linear", "fixed", "matrix", "mixer"
        ] = "softmax",
        heads: Literal["split", "mixed"] = "split",
        stream: Literal["plain", "magnetization", "field"] = "plain",
        *,
        derivative: Literal["partial", "total"] = "partial",
        steps: int | None = None,
        fused: bool | Literal["auto"] = "auto",
        beta: float = 1.0,
        learnable_beta: bool = True,
        response: Literal["exact", "large_d"] = "exact",
        radius: Radius = None,
        dim_feedforward: int | None = None,
        activation: Literal["gelu", "relu", "silu"] = "gelu",
        dropout: float = 0.0,
        norm: Literal["layer", "rms"] = "layer",
        bias: bool = True,
        initial: Literal["learned"] | Tensor | None = None,
        num_spins: int | None = None,
        symmetric_between: bool | None = None,
        symmetric_within: bool | None = None,
        dim_mixer: int | None = None,
        correction: Literal["none", "mlp"] = "none",
        dim_correction: int | None = None,
        solver: FixedPointSolver = "anderson",
        damping: float = 1.0,
        tolerance: float | None = 1e-4,
        max_iterations: int = 200,
        auxiliary: Literal["site", "shared"] = "site",
        on_failure: OnFailure = "warn",
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        head_dim = check_heads(d_model, nhead)
        check_choice("couplings", couplings, COUPLINGS)
        check_choice("heads", heads, ("split", "mixed"))
        check_choice("stream", stream, ("plain", "magnetization", "field"))
        check_choice("derivative", derivative, ("partial", "total"))
        if not (isinstance(fused, bool) or fused == "auto"):
            raise ValueError(f"fused={fused!r} must be True, False or 'auto'")
        check_choice("response", response, ("exact", "large_d"))
        check_choice("norm", norm, tuple(NORMS))
        check_choice("activation", activation, tuple(ACTIVATIONS))
        check_on_failure(on_failure)
        if steps is not None and not (
            isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
        ):
            raise ValueError(f"steps={steps!r} must be None (the fixed point) or an integer >= 1")
        check_approximation(approximation, couplings, heads, steps, initial, auxiliary)
        if derivative == "total":
            check_total(couplings, stream, steps, symmetric_between)
        check_interaction(
            approximation,
            couplings,
            heads,
            derivative,
            steps,
            fused,
            num_spins,
            correction,
            symmetric_between=symmetric_between,
            symmetric_within=symmetric_within,
            dim_mixer=dim_mixer,
            dim_correction=dim_correction,
        )
        if not (initial is None or isinstance(initial, (str, Tensor))):
            raise TypeError(f"initial is {type(initial).__name__}: None, 'learned' or a tensor")
        if on_failure == "warn":
            on_failure = WarnOnce()
        if not 0 < beta < math.inf:
            raise ValueError(f"beta={beta!r} must be a positive finite number")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout={dropout!r} must be a probability, from 0 to 1")

        self.d_model, self.nhead = d_model, nhead
        self.couplings, self.heads, self.stream = couplings, heads, stream
        self.derivative = derivative
        self.steps, self.damping, self.fused = steps, damping, fused
        self.tolerance = 0.0 if tolerance is None else tolerance
        self.approximation = make_approximation(
            approximation, solver, damping, tolerance, max_iterations, auxiliary, on_failure
        )
        systems, dim = (nhead, head_dim) if heads == "split" else (1, d_model)
        self.site = make_site(approximation, dim, radius, response)

        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.self_attn: Interaction = make_interaction(
            couplings,
            d_model,
            nhead,
            dim,
            num_spins,
            symmetric_between,
            symmetric_within,
            dim_mixer,
            activation,
            dropout,
            bias,
            batch_first,
            **options,
        )
        self.correction = make_correction(
            correction, dim, systems, dim_correction, activation, bias, **options
        )
        self.norm1: nn.LayerNorm | nn.RMSNorm | None = None
        # Other couplings don't read the tokens: a parameter without a gradient would stop training
        # on several devices.
        if couplings in AMORTIZED or initial == "learned":
            self.norm1 = make_norm(norm, d_model, device, dtype)
        self.log_beta = nn.Parameter(torch.empty(systems, **options), requires_grad=learnable_beta)
        self._initial_beta = float(beta)
        self.value: nn.Parameter | None = None
        self.out: nn.Parameter | None = None
        if heads == "mixed":
            self.value = nn.Parameter(torch.empty(d_model, d_model, **options))
            if couplings == "softmax":
                self.out = nn.Parameter(torch.empty(d_model, d_model, **options))
        self.mlp: MLP | None = None
        self.norm2: nn.LayerNorm | nn.RMSNorm | None = None
        if dim_feedforward is not None:
            self.mlp = MLP(d_model, dim_feedforward, activation, dropout, bias, **options)
            self.norm2 = make_norm(norm, d_model, device, dtype)
        self.initial_map: nn.Linear | None = None
        self.initial: Tensor | None
        self.register_buffer("initial", initial if isinstance(initial, Tensor) else None)
        if isinstance(initial, str):
            check_choice("initial", initial, ("learned",))
            self.initial_map = nn.Linear(d_model, d_model, bias=bias, **options)
        self.reset_parameters()

    @property
    def batch_first(self) -> bool:
        """Whether three-axes inputs are (B, N, d_model)."""
        return self.self_attn.batch_first

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        self.self_attn.reset_parameters()
        nn.init.constant_(self.log_beta, math.log(self._initial_beta))
        for matrix in (self.value, self.out):
            if matrix is not None:
                nn.init.xavier_uniform_(matrix)
        for module in (self.norm1, self.norm2, self.mlp, self.initial_map, self.correction):
            if module is not None:
                module.reset_parameters()

    # -- the three streams ----------------------------------------------------------------------

    def embed(self, x: Tensor) -> Tensor:
        """What the first block of a stack reads: tokens into the ball for ``"magnetization"``."""
        return self._respond(x) if self.stream == "magnetization" else x

    def readout(self, x: Tensor) -> Tensor:
        """What a stack returns: the response to its field for ``"field"``."""
        return self._respond(x) if self.stream == "field" else x

    def forward(
        self,
        x: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        return_report: bool = False,
    ) -> Tensor | tuple[Tensor, BlockReport]:
        """Solve one spin system a sequence (and head).

        Args:
            x: (B, N, d_model) (see ``batch_first``) or (N, d_model).
            src_mask: (N, N) or (B * nhead, N, N); True, or -inf, where token i must not hear
                token j.
            src_key_padding_mask: (B, N); True, or -inf, where there is no token: no spin.
            is_causal: token i hears ``j <= i`` only.
            return_report: also return a :class:`BlockReport`.

        Raises:
            ConvergenceError: with ``on_failure="raise"``.
            ValueError: an asymmetric mask where symmetric couplings are needed; ``"magnetization"``
                outside the ball.
        """
        tokens, layout = to_batch(x, self.d_model, self.batch_first, self.log_beta)
        masks = merge_masks(tokens, self.nhead, src_mask, src_key_padding_mask, is_causal)
        self._check_masks(masks)
        tokens = masks.clear(tokens).to(self.log_beta.dtype)
        # A sequence that holds NaN, or numbers too large to be squared, gives NaN: it must not
        # reach the weights that others share.
        whole = torch.isfinite(tokens.square().sum((-2, -1)))[:, None, None]
        tokens = torch.where(whole, tokens, 0.0)

        normalized = tokens if self.norm1 is None else self.norm1(tokens)
        couplings: Mixture
        if isinstance(self.self_attn, AttentionCouplings):
            fused = bool(self.fused) and self.steps is not None and not return_report
            total = self.derivative == "total"
            solved = isinstance(self.approximation, MeanField) and self.steps is None
            couplings = self.self_attn(normalized, masks, fused, keep=total, streamed=solved)
        else:
            couplings = self.self_attn(normalized, masks)
        with torch.autocast(x.device.type, enabled=False):
            out, report = self._solve(tokens, normalized, couplings, masks, whole, return_report)
        if self.stream == "field":
            out = out + self._mixing(out, out.dtype)
        out = torch.where(whole, masks.clear(out), torch.nan).to(x.dtype)
        out = layout.leave(out)
        return (out, report) if return_report and report is not None else out

    # -- the solve ------------------------------------------------------------------------------

    def _solve(
        self,
        tokens: Tensor,
        normalized: Tensor,
        heads: Mixture,
        masks: Masks,
        whole: Tensor,
        return_report: bool,
    ) -> tuple[Tensor, BlockReport | None]:
        """Magnetization, or conjugate field, as (B, N, d_model) in float32 or better."""
        working = torch.promote_types(tokens.dtype, torch.float32)
        amortization = heads.amortization if isinstance(heads, Heads) else None
        total = self.derivative == "total"
        field = tokens.to(working)
        if self.stream == "magnetization":
            field = self._lift(field)
        if self.stream != "field":
            field = field + self._mixing(tokens, working)
        heads = heads.with_tensors(*(tensor.to(working) for tensor in heads.tensors()))
        if isinstance(heads, StreamedHeads) and self.fused is not True:
            heads = heads.kept(always=not self.fused, softmax=total)
        if total and isinstance(heads, StreamedHeads):
            assert isinstance(self.self_attn, AttentionCouplings)
            amortization = Amortization.of(heads, self.self_attn.in_proj.weight)
        couplings: Couplings | Mixing = heads
        if self.value is not None:
            assert isinstance(heads, (Heads, FusedHeads, StreamedHeads))
            out_map = None if self.out is None else self.out.to(working)
            couplings = HeadMixture(heads, self.value.to(working), out_map)
        absent = masks.absent
        if absent is not None and self.heads == "split":
            absent = absent[:, None]
        field = self._systems(field)
        beta = self.log_beta.to(working).exp() if self.heads == "split" else self._one_beta(working)
        system: SpinSystem | NeuralSystem
        if self.correction is not None or isinstance(couplings, Mixing):
            force = NeuralForce.of(couplings, self.correction, absent, working)
            system = NeuralSystem(force, field, beta, self.site)
        else:
            system = SpinSystem(couplings, field, beta, self.site, mask=absent, check_finite=False)
        start = self._start(normalized, system)
        equilibrium = self._equilibrium(system, start, return_report)
        m = equilibrium.magnetization
        out = self._tokens(system.force(m) if self.stream == "field" else m)
        term = None
        if total and isinstance(equilibrium, Equilibrium):
            assert isinstance(couplings, Couplings)
            if amortization is None or self.norm1 is None:
                term = torch.zeros_like(out)  # parameters don't depend on the tokens
            else:
                term = coupling_term(equilibrium, couplings, amortization, self.norm1, tokens)
            out = out + term
        if not return_report:
            return out, None
        whole = whole[..., 0]
        solution = equilibrium.solution
        batch = len(tokens), self.log_beta.shape[0]
        return out, BlockReport(
            free_energy=(
                torch.where(whole, equilibrium.free_energy.reshape(batch), torch.nan)
                if isinstance(equilibrium, Equilibrium) and system.couplings.is_symmetric
                else None
            ),
            residual=torch.where(whole, solution.residual.reshape(batch), torch.nan),
            iterations=solution.iterations.reshape(batch),
            converged=solution.converged.reshape(batch) & whole,
            couplings=reported_couplings(heads, len(tokens), masks.absent),
            magnetization=m if self.heads == "split" else m.unsqueeze(1),
            coupling_term=None if term is None else torch.where(whole[..., None], term, torch.nan),
        )

    def _equilibrium(
        self, system: SpinSystem | NeuralSystem, start: Tensor | None, return_report: bool
    ) -> Equilibrium | SteadyState:
        if self.steps is None:
            if isinstance(system, SpinSystem):
                return self.approximation.solve(system, start)
            assert isinstance(self.approximation, MeanField)
            return system.solve(start, self.approximation.fixed_point)
        inputs = (system.field, system.beta[..., None, None], *system.couplings.tensors())
        if isinstance(system, SpinSystem):
            step = mean_field_map(system.site, system.couplings)
            start = None if start is None else check_initial(start, system)
        else:
            step = system.step
        if start is None:
            start = system.site.mean(system.beta[..., None, None] * system.field)
        m = unroll(step, start, inputs, steps=self.steps, damping=self.damping)
        residual = torch.full_like(system.beta, torch.nan)
        if return_report:
            with torch.no_grad():
                change = (step(m, *inputs) - m).abs() / system.site.scale
                residual = change.flatten(-2).amax(-1) if change.numel() else residual * 0
        iterations = torch.full_like(system.beta, self.steps, dtype=torch.int64)
        solution = Solution(m, residual, iterations, residual <= self.tolerance)
        if isinstance(system, SpinSystem):
            return MeanFieldEquilibrium(system, solution)
        return SteadyState(solution)

    def _start(self, normalized: Tensor, system: SpinSystem | NeuralSystem) -> Tensor | None:
        if self.initial_map is not None:
            values = self._systems(self.initial_map(normalized).to(system.field.dtype))
            return system.site.mean(system.beta[..., None, None] * values)
        if self.initial is not None:
            try:
                full = self.initial.to(system.field.dtype).expand_as(normalized)
            except RuntimeError as error:
                raise ValueError(
                    f"initial has shape {tuple(self.initial.shape)}: it must broadcast to "
                    f"(B, N, d_model) = {tuple(normalized.shape)}"
                ) from error
            return self._systems(full)
        return None

    def _mixing(self, x: Tensor, dtype: torch.dtype) -> Tensor | float:
        if self.mlp is None or self.norm2 is None:
            return 0.0
        return self.mlp(self.norm2(x.to(self.log_beta.dtype))).to(dtype)

    def _check_masks(self, masks: Masks) -> None:
        if self.couplings == "softmax" or masks.symmetric:
            return
        needed = None
        if not isinstance(self.approximation, MeanField):
            needed = f"the free energy of {type(self.approximation).__name__} needs"
        elif self.couplings == "symmetric":
            needed = "couplings='symmetric' are"
        elif self.derivative == "total":
            needed = "derivative='total' needs"
        if needed is not None:
            raise ValueError(
                "a causal or otherwise asymmetric mask leaves no symmetric couplings, which "
                f"{needed}: use couplings='softmax' with approximation='mean_field' and "
                "derivative='partial'"
            )

    # -- tokens (B, N, d) and systems (B, H, N, d_h) or (B, N, d) ---------------------------------

    def _systems(self, x: Tensor) -> Tensor:
        if self.heads == "mixed":
            return x
        heads = x.unflatten(-1, (self.nhead, self.d_model // self.nhead))
        return heads.transpose(1, 2).contiguous()

    def _tokens(self, x: Tensor) -> Tensor:
        return x if self.heads == "mixed" else x.transpose(1, 2).flatten(-2)

    def _one_beta(self, dtype: torch.dtype) -> Tensor:
        return self.log_beta.to(dtype).exp()[0]

    def _beta_of_channels(self, dtype: torch.dtype) -> Tensor:
        """beta as a factor on the last two axes of (..., systems, dim)."""
        return self.log_beta.to(dtype).exp()[:, None]

    def _respond(self, x: Tensor) -> Tensor:
        """The magnetization of free spins in the field x, token by token."""
        working = torch.promote_types(x.dtype, torch.float32)
        spins = x.to(working).unflatten(-1, (len(self.log_beta), self.site.dim))
        m = self.site.mean(self._beta_of_channels(working) * spins)
        return m.flatten(-2).to(x.dtype)

    def _lift(self, m: Tensor) -> Tensor:
        """The field whose free spins have magnetization m: the inverse of :meth:`_respond`."""
        spins = m.unflatten(-1, (len(self.log_beta), self.site.dim))
        b = self.site.inverse_response(spins)
        return (b / self._beta_of_channels(m.dtype)).flatten(-2)

    def extra_repr(self) -> str:
        """The options that the children do not show."""
        return (
            f"{type(self.approximation).__name__}, couplings={self.couplings!r}, "
            f"heads={self.heads!r}, stream={self.stream!r}, steps={self.steps}, site={self.site!r}"
        )
