"""The layers of a model, whoever wrote it, as :class:`~spinformer.diagnostics.AttentionLayer`.

One function for every kind of layer, which knows it by its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spinformer.diagnostics.layer import AttentionLayer, FeedForward, Normalization

__all__ = ["attention_layers"]

# How blocks that keep the name of their activation spell it.
_ACTIVATIONS: MappingProxyType[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
)


def attention_layers(model: Any) -> tuple[AttentionLayer, ...]:
    """The layers of a model as :class:`AttentionLayer`, in the order in which they are applied.

    Known by their attributes, without an import of their libraries:

    * :class:`torch.nn.TransformerEncoderLayer` and stacks of it, ``norm_first`` or not;
    * this package's ``TransformerBlock`` and its ``Encoder``, and models that hold one of these
      stacks as ``encoder``;
    * BERT (MiniLM, RoBERTa, ELECTRA), MPNet (relative position bias), ALBERT (a shared layer is
      listed as often as it is applied) and XLNet (relative attention) of Hugging Face, with or
      without a head on top.

    A look-alike whose parts are those of BERT and whose forward is not (RoFormer) is told apart
    only where the model is run, by :func:`~spinformer.diagnostics.hidden_states` and the others
    that take its inputs.

    The parameters are those of the model, not copies, so that gradients reach them.

    Args:
        model: a model, a layer, or a sequence of layers, of modules or of :class:`AttentionLayer`.

    Raises:
        TypeError: layers of a kind that is not known, for which
            :func:`~spinformer.diagnostics.states_by_layer` needs no description.
        ValueError: a known kind with an option that the description lacks (a decoder, say).
    """
    return described(model)[0]


def described(model: Any) -> tuple[tuple[AttentionLayer, ...], nn.Module | None, bool]:
    """The description, the module that is applied first, and whether it reads (n, batch, d)."""
    modules, extra = _modules(model)
    if not modules:
        raise ValueError("the model has no layers")
    layers = tuple(
        module if isinstance(module, AttentionLayer) else _describe(module, extra)
        for module in modules
    )
    first = modules[0]
    if isinstance(first, AttentionLayer):
        return layers, None, False
    attention = getattr(first, "self_attn", None)
    sequence_first = hasattr(first, "rel_attn") or not getattr(attention, "batch_first", True)
    callable_model = isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList)
    return layers, first if callable_model else None, sequence_first


def _modules(model: Any) -> tuple[list[Any], Any]:
    """The layers in the order in which they are applied, and what holds their positions."""
    if isinstance(model, AttentionLayer):
        return [model], None
    if isinstance(model, Sequence | nn.ModuleList | nn.Sequential):
        return list(model), None
    if _describer(model) is not None:
        return [model], None
    for stack in (model, getattr(model, "encoder", None)):
        layers = getattr(stack, "layers", None)
        if isinstance(layers, Sequence | nn.ModuleList):
            return list(layers), None
    # A head on top of a model of Hugging Face.
    model = getattr(model, "base_model", model)
    if hasattr(model, "relative_positional_encoding") and hasattr(model, "layer"):
        if getattr(model, "attn_type", "bi") != "bi":
            raise ValueError(
                f"attn_type={model.attn_type!r} of {type(model).__name__}: only 'bi' is described"
            )
        return list(model.layer), model
    encoder = getattr(model, "encoder", model)
    if hasattr(encoder, "albert_layer_groups"):
        groups, count = encoder.albert_layer_groups, encoder.config.num_hidden_layers
        spread = [groups[number * len(groups) // count] for number in range(count)]
        return [layer for group in spread for layer in group.albert_layers], None
    if hasattr(encoder, "layer"):
        return list(encoder.layer), encoder
    raise TypeError(
        f"{type(model).__name__} is no model whose layers are known. Where it holds a stack that "
        f"is, pass the stack itself; {_KNOWN}"
    )


_KNOWN = (
    "known are torch.nn.TransformerEncoder, TransformerBlock and Encoder of spinformer.nn, and "
    "BERT, MPNet, ALBERT and XLNet of Hugging Face. For others take states_by_layer, or describe "
    "each layer by an AttentionLayer"
)


def _describe(layer: Any, holder: Any) -> AttentionLayer:
    describer = _describer(layer)
    if describer is None:
        raise TypeError(f"{type(layer).__name__} is no layer that is known; {_KNOWN}")
    return describer(layer, holder)


def _describer(layer: Any) -> Callable[[Any, Any], AttentionLayer] | None:
    """What reads this kind of layer."""
    own = getattr(layer, "self_attn", None)
    if hasattr(own, "in_proj_weight") and hasattr(layer, "linear1"):
        return _torch_layer
    if hasattr(own, "in_proj") and hasattr(own, "out_proj") and hasattr(layer, "mlp"):
        return _spinformer_layer
    if hasattr(layer, "rel_attn"):
        return _xlnet_layer
    if hasattr(layer, "full_layer_layer_norm"):
        return _albert_layer
    attention: Any = getattr(layer, "attention", None)
    if hasattr(attention, "attn") and hasattr(layer, "intermediate"):
        return _mpnet_layer
    # Many models start from the layer of BERT and add to it: these parts and no others.
    if (
        _made_of(layer, "attention", "intermediate", "output", "crossattention")
        and _made_of(attention, "self", "output")
        and _made_of(attention.self, "query", "key", "value", "dropout", "distance_embedding")
        and _made_of(attention.output, "dense", "LayerNorm", "dropout")
        and _made_of(layer.intermediate, "dense", "intermediate_act_fn")
    ):
        return _bert_layer
    return None


def _made_of(module: Any, *names: str) -> bool:
    """Whether the module has children, and all of these names."""
    children = dict(module.named_children()) if isinstance(module, nn.Module) else {}
    return bool(children) and children.keys() <= set(names)


def _torch_layer(layer: Any, _: Any) -> AttentionLayer:
    own = layer.self_attn
    if hasattr(layer, "multihead_attn"):
        raise ValueError(f"{type(layer).__name__} is a decoder's: only encoders are described")
    if own.in_proj_weight is None or own.bias_k is not None or own.add_zero_attn:
        raise ValueError(
            "a MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn is not described"
        )
    biases = own.in_proj_bias
    return AttentionLayer(
        *_heads(own.in_proj_weight.chunk(3), own.out_proj.weight, own.num_heads),
        *_head_biases((None,) * 3 if biases is None else biases.chunk(3), own.num_heads),
        output_bias=own.out_proj.bias,
        scale=(own.embed_dim // own.num_heads) ** -0.5,
        mlp=_mlp(layer.linear1, layer.linear2, layer.activation),
        attention_norm=_norm(layer.norm1),
        mlp_norm=_norm(layer.norm2),
        norm_first=layer.norm_first,
    )


def _spinformer_layer(layer: Any, _: Any) -> AttentionLayer:
    own, mlp = layer.self_attn, layer.mlp
    biases = own.in_proj.bias
    return AttentionLayer(
        *_heads(own.in_proj.weight.chunk(3), own.out_proj.weight, own.nhead),
        *_head_biases((None,) * 3 if biases is None else biases.chunk(3), own.nhead),
        output_bias=own.out_proj.bias,
        scale=own.head_dim**-0.5,
        query_norm=None if own.query_norm is None else _norm(own.query_norm),
        key_norm=None if own.key_norm is None else _norm(own.key_norm),
        mlp=_mlp(mlp.linear1, mlp.linear2, _ACTIVATIONS[mlp.activation]),
        attention_norm=_norm(layer.norm1),
        mlp_norm=_norm(layer.norm2),
        norm_first=True,
    )


def _bert_layer(layer: Any, _: Any) -> AttentionLayer:
    own, out = layer.attention.self, layer.attention.output
    if getattr(layer, "is_decoder", False) or getattr(layer, "add_cross_attention", False):
        raise ValueError(f"{type(layer).__name__} is a decoder's: only encoders are described")
    if getattr(own, "position_embedding_type", "absolute") not in (None, "absolute"):
        raise ValueError(
            f"position_embedding_type={own.position_embedding_type!r}: only 'absolute' is described"
        )
    return replace(
        _linear_heads((own.query, own.key, own.value), out.dense, own.num_attention_heads),
        mlp=_mlp(
            layer.intermediate.dense, layer.output.dense, layer.intermediate.intermediate_act_fn
        ),
        attention_norm=_norm(out.LayerNorm),
        mlp_norm=_norm(layer.output.LayerNorm),
    )


def _mpnet_layer(layer: Any, encoder: Any) -> AttentionLayer:
    own = layer.attention.attn

    def position(queries: Tensor) -> Tensor:
        # One bias for all layers and all sequences; only the number of tokens is read.
        return encoder.compute_position_bias(queries.new_zeros(1, queries.shape[-2], 1))

    return replace(
        _linear_heads((own.q, own.k, own.v), own.o, own.num_attention_heads),
        position=None if encoder is None else position,
        mlp=_mlp(
            layer.intermediate.dense, layer.output.dense, layer.intermediate.intermediate_act_fn
        ),
        attention_norm=_norm(layer.attention.LayerNorm),
        mlp_norm=_norm(layer.output.LayerNorm),
    )


def _albert_layer(layer: Any, _: Any) -> AttentionLayer:
    own = layer.attention
    return replace(
        _linear_heads((own.query, own.key, own.value), own.dense, own.num_attention_heads),
        mlp=_mlp(layer.ffn, layer.ffn_output, layer.activation),
        attention_norm=_norm(own.LayerNorm),
        mlp_norm=_norm(layer.full_layer_layer_norm),
    )


def _xlnet_layer(layer: Any, model: Any) -> AttentionLayer:
    own = layer.rel_attn
    if model is None:
        raise TypeError(
            "a layer of XLNet alone does not know its positions: pass the model, not its layers"
        )

    def position(queries: Tensor) -> Tensor:
        # Entry n - i + j of the 2 n distances is the one from token j to token i.
        count = queries.shape[-2]
        distances = model.relative_positional_encoding(count, count, device=queries.device)
        keys = distances[:, 0].to(own.r.dtype) @ own.r.permute(1, 0, 2)
        scores = (queries + own.r_r_bias.unsqueeze(-2)) @ keys.mT
        place = torch.arange(count, device=queries.device)
        index = count - place.unsqueeze(-1) + place
        return own.scale * scores.gather(-1, index.expand(*scores.shape[:-1], count))

    return AttentionLayer(
        own.q.permute(1, 0, 2),
        own.k.permute(1, 0, 2),
        own.v.permute(1, 0, 2),
        own.o.permute(1, 2, 0),
        query_bias=own.r_w_bias,
        scale=own.scale,
        position=position,
        mlp=_mlp(layer.ff.layer_1, layer.ff.layer_2, layer.ff.activation_function),
        attention_norm=_norm(own.layer_norm),
        mlp_norm=_norm(layer.ff.layer_norm),
    )


def _linear_heads(projections: Sequence[Any], out: Any, heads: int) -> AttentionLayer:
    """The attention of three linear maps, and a fourth for what the heads give."""
    return AttentionLayer(
        *_heads([linear.weight for linear in projections], out.weight, heads),
        *_head_biases([linear.bias for linear in projections], heads),
        output_bias=out.bias,
        scale=(projections[0].out_features // heads) ** -0.5,
    )


def _heads(
    weights: Sequence[Tensor], output: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of linear maps, (out, in), as one matrix a head that multiplies from the right."""
    query, key, value = (weight.unflatten(0, (heads, -1)).mT for weight in weights)
    return query, key, value, output.mT.unflatten(0, (heads, -1))


def _head_biases(
    biases: Sequence[Tensor | None], heads: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    query, key, value = (
        None if bias is None else bias.unflatten(0, (heads, -1)) for bias in biases
    )
    return query, key, value


def _mlp(first: Any, second: Any, activation: Callable[[Tensor], Tensor]) -> FeedForward:
    return FeedForward(first.weight.mT, second.weight.mT, activation, first.bias, second.bias)


def _norm(module: Any) -> Normalization:
    eps = torch.finfo(module.weight.dtype).eps if module.eps is None else module.eps
    centered = not isinstance(module, nn.RMSNorm)
    return Normalization(eps, module.weight, getattr(module, "bias", None), centered)
