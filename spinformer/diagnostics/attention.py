"""The tokens of a model layer by layer: as it is, and without skips, MLPs or norms.

The layers are computed again from their description, an
:class:`~spinformer.diagnostics.AttentionLayer`, in one of its variants. Where the model itself is
run, for its embedding, its first layer is compared with the description: a model that looks like a
known one and is another raises.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spinformer.descent.energy import clear
from spinformer.diagnostics.layer import VARIANTS, Variant
from spinformer.diagnostics.models import attention_layers, described
from spinformer.diagnostics.rank import Norm, check_mask, rank_residual, residual
from spinformer.errors import check_choice

__all__ = ["collapse_curve", "hidden_states", "states_by_layer"]


def hidden_states(
    model: Any,
    inputs: Any,
    variant: Variant = "full",
    mask: Tensor | None = None,
    *,
    src_mask: Tensor | None = None,
    norms: bool | None = None,
    biases: bool = True,
) -> Tensor:
    """The tokens before the first layer and after each, ``(layers + 1, batch, n, d)``.

    ``"full"`` gives the model's own hidden states, up to rounding. Dropout is off. A norm at the
    end of the stack is not part of it. Cost: a pass through the layers and, unless ``inputs`` are
    the tokens themselves, one through the model for its embedding.

    Args:
        model: anything that :func:`attention_layers` knows.
        inputs: floating: the tokens ``(batch, n, d)`` or ``(n, d)`` that enter the first layer,
            batch first whatever the model's layout. A mapping, such as a tokenizer's result: the
            model is called as ``model(**inputs)``. Another tensor: as ``model(inputs)``.
        variant: ``"full"``, ``"no_mlp"``, ``"no_skip"`` or ``"attention"``, see
            :mod:`spinformer.diagnostics.layer`.
        mask: boolean ``(batch, n)``, True = absent; absent tokens change nothing and are zero in
            the result. None: where ``inputs["attention_mask"]`` is zero, if there is one.
        src_mask: as in :meth:`AttentionLayer.weights`, the same in all layers.
        norms: whether the norms are kept; None: in all variants but ``"attention"``.
        biases: whether the attention keeps its biases. Those of values and output add one vector
            to all tokens: they do not change the absolute residual, but the relative one.

    Raises:
        TypeError: layers of an unknown kind, or inputs of a wrong one.
        ValueError: an unknown variant, masks that contradict each other, or a model whose first
            layer is not what its description says.
    """
    check_choice("variant", variant, VARIANTS)
    layers = attention_layers(model)
    if not biases:
        layers = tuple(layer.without_biases() for layer in layers)
    x, mask = first_tokens(model, inputs, mask, src_mask)
    states = [x]
    for layer in layers:
        x = layer(x, variant, mask, src_mask, norms=norms)
        states.append(x)
    return torch.stack(states)


def states_by_layer(layers: Any, x: Tensor, **options: Any) -> Tensor:
    """The tokens before the first layer and after each, of any layers that map tokens to tokens.

    For layers that :func:`attention_layers` cannot take apart: spin blocks, energy-descent blocks,
    a user's own. They are called one after another, ``x = layer(x, **options)``; of a tuple the
    first entry is taken. What a stack does before its first and after its last layer (``embed``,
    ``readout``, a norm) is not done.

    Args:
        layers: modules or functions, or a module with the attribute ``layers``.
        x: what enters the first.
        options: passed to every layer, ``src_key_padding_mask=mask`` for example.

    Returns:
        ``(layers + 1, *x.shape)``.

    Raises:
        ValueError: a layer that changes the shape of its tokens.
    """
    states = [x]
    for number, layer in enumerate(getattr(layers, "layers", layers)):
        result = layer(x, **options)
        x = result[0] if isinstance(result, tuple) else result
        if x.shape != states[0].shape:
            raise ValueError(
                f"layer {number} maps tokens of shape {tuple(states[-1].shape)} to {tuple(x.shape)}"
            )
        states.append(x)
    return torch.stack(states)


def collapse_curve(
    model: Any,
    inputs: Any,
    variant: Variant = "full",
    mask: Tensor | None = None,
    *,
    norm: Norm = "1,inf",
    relative: bool = True,
    src_mask: Tensor | None = None,
    norms: bool | None = None,
    biases: bool = True,
) -> Tensor:
    """The rank residual of :func:`hidden_states` by layer, ``(layers + 1, batch)``.

    Args:
        model: as in :func:`hidden_states`.
        inputs: as in :func:`hidden_states`.
        variant: as in :func:`hidden_states`.
        mask: as in :func:`hidden_states`.
        norm: ``"1,inf"`` or ``"fro"``.
        relative: divided by the norm of the tokens, :func:`~spinformer.diagnostics.rank_residual`,
            or not, :func:`~spinformer.diagnostics.residual`.
        src_mask: as in :func:`hidden_states`.
        norms: as in :func:`hidden_states`.
        biases: as in :func:`hidden_states`.

    Source: Dong, Cordonnier & Loukas (2021), section 4.
    """
    check_choice("variant", variant, VARIANTS)
    x, mask = first_tokens(model, inputs, mask, src_mask)
    states = hidden_states(model, x, variant, mask, src_mask=src_mask, norms=norms, biases=biases)
    return (rank_residual if relative else residual)(states, mask, norm)


def first_tokens(
    model: Any, inputs: Any, mask: Tensor | None, src_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """What enters the first layer, ``(..., n, d)`` batch first, and which of it is absent.

    The arguments are those of :func:`hidden_states`. Absent tokens are zero.
    """
    layers, first, sequence_first = described(model)
    x, mask, after = _embedded(model, inputs, mask, first, sequence_first)
    if x.dim() < 2 or x.shape[-1] != layers[0].width:
        raise ValueError(
            f"inputs of shape {tuple(x.shape)} for layers of width {layers[0].width}: tokens are "
            "(batch, n, d)"
        )
    if x.dtype != layers[0].query.dtype:
        raise ValueError(f"inputs are {x.dtype}, the weights {layers[0].query.dtype}: cast one")
    mask = None if mask is None else check_mask(mask, x)
    if after is not None:
        with torch.no_grad():
            own = layers[0](x, "full", mask, src_mask)
            _check_description(model, own, after, mask)
    return clear(x, mask), mask


def _check_description(model: nn.Module, own: Tensor, after: Tensor, mask: Tensor | None) -> None:
    """Raise where the first layer of the model gives something else than its description."""
    size = after.abs().amax()
    error = clear(own - after, mask).abs().amax()
    # Two orders of the same sums differ by a few eps, and lower precisions inside by more.
    if error > torch.finfo(after.dtype).eps ** 0.4 * size:
        raise ValueError(
            f"the first layer of this {type(model).__name__} differs from its description by "
            f"{error:.2g} of {size:.2g}: it has an option that is not described, or a mask of its "
            "own. Pass masks as mask and src_mask; for other layers take states_by_layer"
        )


def _embedded(
    model: Any,
    inputs: Any,
    mask: Tensor | None,
    first: nn.Module | None,
    sequence_first: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The tokens that enter the first layer, which are absent, and, if it was run, its result."""
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        return inputs, mask, None
    options: dict[str, Any] = {}
    positional: tuple[Any, ...] = ()
    if isinstance(inputs, Mapping):
        options = dict(inputs)
        present = options.get("attention_mask")
        if present is not None:
            if mask is not None:
                raise ValueError("mask and inputs['attention_mask'] are both given: pass one")
            if present.dim() != 2:
                raise ValueError(
                    f"inputs['attention_mask'] has shape {tuple(present.shape)}: (batch, n) is "
                    "needed; pass a mask over pairs as src_mask"
                )
            mask = present == 0
    elif isinstance(inputs, Tensor):
        positional = (inputs,)
        if mask is not None and "attention_mask" in inspect.signature(model.forward).parameters:
            # The model's own first layer is to hear what the description hears.
            options["attention_mask"] = (~mask).long()
    else:
        raise TypeError(
            f"inputs is a {type(inputs).__name__}: pass tokens (batch, n, d), token numbers "
            "(batch, n), or a mapping for model(**inputs)"
        )
    if first is None:
        raise TypeError(
            "layers alone have no embedding: pass the model, or as inputs floating tokens "
            "(batch, n, d)"
        )
    caught: list[Tensor] = []

    def catch(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        # A shared layer is reached again and again; the first time counts.
        if not caught:
            if kwargs.get("seg_mat") is not None:
                raise ValueError(
                    "token_type_ids enter the attention of this model, which the description "
                    "lacks: leave them out of inputs"
                )
            caught.append(args[0] if args else next(iter(kwargs.values())))
            caught.append(result[0] if isinstance(result, tuple) else result)

    handle = first.register_forward_hook(catch, with_kwargs=True)
    try:
        with _evaluation(model):
            model(*positional, **options)
    finally:
        handle.remove()
    x, after = (state.transpose(0, 1) if sequence_first else state for state in caught)
    return x, mask, after


@contextlib.contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Dropout is off inside; each module is left in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
