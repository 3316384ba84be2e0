"""Layers for PyTorch: spin systems, energy descent and the plain Transformer, behind one interface.

Every block is called as ``block(x, src_mask=None, src_key_padding_mask=None, is_causal=False)`` and
goes where :class:`torch.nn.TransformerEncoderLayer` was.
"""

from spinformer.nn.descent_block import energy_along_depth
from spinformer.nn.encoder import Encoder
from spinformer.nn.energy_descent import EnergyDescentBlock
from spinformer.nn.energy_transformer import EnergyTransformerBlock
from spinformer.nn.free_energy import FreeEnergyBlock
from spinformer.nn.hopfield import HopfieldBlock
from spinformer.nn.report import BlockReport
from spinformer.nn.score import field_score
from spinformer.nn.transformer import TransformerBlock

__all__ = [
    "BlockReport",
    "Encoder",
    "EnergyDescentBlock",
    "EnergyTransformerBlock",
    "FreeEnergyBlock",
    "HopfieldBlock",
    "TransformerBlock",
    "energy_along_depth",
    "field_score",
]
