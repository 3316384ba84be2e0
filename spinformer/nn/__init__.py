"""Layers for PyTorch: spin systems, energy descent and the plain Transformer, behind one interface.

Every block is called as ``block(x, src_mask=None, src_key_padding_mask=None, is_causal=False)`` and
goes where :class:`torch.nn.TransformerEncoderLayer` was.
"""

from spinformer.nn.encoder import Encoder
from spinformer.nn.energy_descent import EnergyDescentBlock
from spinformer.nn.free_energy import FreeEnergyBlock
from spinformer.nn.report import BlockReport
from spinformer.nn.score import field_score
from spinformer.nn.transformer import TransformerBlock

__all__ = [
    "BlockReport",
    "Encoder",
    "EnergyDescentBlock",
    "FreeEnergyBlock",
    "TransformerBlock",
    "field_score",
]
