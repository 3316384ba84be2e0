"""What happens to the tokens along depth."""

from spinformer.diagnostics.rank import rank_residual

__all__ = ["rank_residual"]
