"""What happens to the tokens along depth."""

from spinformer.diagnostics.attention import collapse_curve, hidden_states, states_by_layer
from spinformer.diagnostics.collapse import (
    CollapseBound,
    collapse_bound,
    lipschitz_bound,
    log_residuals,
)
from spinformer.diagnostics.layer import AttentionLayer, FeedForward, Normalization
from spinformer.diagnostics.models import attention_layers
from spinformer.diagnostics.paths import PathDecomposition, PathSample, path_decomposition
from spinformer.diagnostics.rank import effective_rank, matrix_norm, rank_residual, residual

__all__ = [
    "AttentionLayer",
    "CollapseBound",
    "FeedForward",
    "Normalization",
    "PathDecomposition",
    "PathSample",
    "attention_layers",
    "collapse_bound",
    "collapse_curve",
    "effective_rank",
    "hidden_states",
    "lipschitz_bound",
    "log_residuals",
    "matrix_norm",
    "path_decomposition",
    "rank_residual",
    "residual",
    "states_by_layer",
]
