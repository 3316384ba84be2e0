r"""Implicit differentiation: the derivative of a solution, whatever found it.

A solver returns :math:`z` with :math:`F(z, x) = 0`. By the implicit function theorem

.. math:: \mathrm dz = -\left(\frac{\partial F}{\partial z}\right)^{-1}
          \frac{\partial F}{\partial x}\,\mathrm dx,

so a cotangent :math:`g` of :math:`z` becomes
:math:`-(\partial F / \partial x)^{\mathsf T} u` with
:math:`(\partial F / \partial z)^{\mathsf T} u = g`. The memory of it does not depend on how many
iterations the solver took. The adjoint :math:`u` is itself the solution of an equation,
:math:`(\partial F / \partial z)^{\mathsf T} u - g = 0`, so the backward pass differentiates it by
the same rule: derivatives of any order come from one recursion.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

Residual = Callable[..., Tensor]
VectorJacobian = Callable[[Tensor], Tensor]
Adjoint = Callable[[VectorJacobian, Tensor], Tensor]
Linearize = Callable[..., tuple[Tensor, VectorJacobian]]


def implicit(
    value: Tensor,
    residual: Residual,
    inputs: Sequence[Tensor],
    adjoint: Adjoint,
    linearize: Linearize | None = None,
) -> Tensor:
    r"""Attach the implicit derivative to a solved value.

    Args:
        value: ``z`` with ``residual(z, *inputs) = 0``, solved without a graph.
        residual: differentiable function ``F(z, *inputs)`` of the shape of ``z``. Every tensor
            that needs a gradient must be one of ``inputs``: one that is captured would be missed.
        inputs: the tensors that the solution depends on. Those that don't require a gradient get
            none.
        adjoint: ``adjoint(vjp, rhs)`` returns ``u`` with ``vjp(u) = rhs``, where ``vjp`` is the
            linear map :math:`u \mapsto (\partial F/\partial z)^{\mathsf T} u`. It runs without
            a graph. In second and higher derivatives it is called with the transposed map, so an
            adjoint that uses a stored factor needs a symmetric Jacobian, and one that only applies
            ``vjp`` works always.
        linearize: ``linearize(z, *inputs)`` returns ``residual(z, *inputs)`` with its graph, and
            the ``vjp`` that the adjoint of a first derivative is given. None leaves both to
            autograd.

    Returns:
        ``value`` with a graph; ``value`` itself where no input requires a gradient.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        attached: Tensor = _Implicit.apply(residual, adjoint, linearize, value.detach(), *inputs)
        return attached
    return value


class _Implicit(torch.autograd.Function):
    """``z`` as a differentiable function of ``inputs``; see :func:`implicit`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        residual: Residual,
        adjoint: Adjoint,
        linearize: Linearize | None,
        value: Tensor,
        *inputs: Tensor,
    ) -> Tensor:
        output = value.clone()
        ctx.functions = residual, adjoint, linearize  # type: ignore[attr-defined]
        # The output is saved, not the argument: in a second derivative it is part of the graph.
        ctx.save_for_backward(output, *inputs)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        residual, adjoint, linearize = ctx.functions
        value, *arguments = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]  # after the functions and the value
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # New names of the same tensors: ``out`` depends on them only directly, not through
            # the dependence of z on the inputs, and with ``again`` they stay in the outer graph.
            z = _alias(value, again)
            inputs = [
                _alias(tensor, again) if need else tensor.detach()
                for tensor, need in zip(arguments, needed, strict=True)
            ]
            if linearize is None:
                out = residual(z, *inputs)
                vjp = functools.partial(_pull, out, z)
            else:
                out, vjp = linearize(z, *inputs)

            with torch.no_grad():
                u = adjoint(vjp, grad_output)

            if again:
                u = implicit(
                    u,
                    lambda v, g, z, *x: _vjp(residual, v, z, x) - g,
                    (grad_output, value, *arguments),
                    adjoint,
                )
            wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
            grads = iter(
                torch.autograd.grad(out, wanted, -u, create_graph=again, allow_unused=True)
            )
        return (None, None, None, None, *(next(grads) if need else None for need in needed))


def _pull(out: Tensor, z: Tensor, cotangent: Tensor) -> Tensor:
    (product,) = torch.autograd.grad(out, z, cotangent, retain_graph=True)
    return product


def _alias(tensor: Tensor, connected: bool) -> Tensor:
    if connected and tensor.requires_grad:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_()


def _vjp(residual: Residual, u: Tensor, z: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """(dF/dz)^T u as a differentiable function of u, z and the inputs."""
    z = _alias(z, connected=True)
    (product,) = torch.autograd.grad(residual(z, *inputs), z, u, create_graph=True)
    return product


def envelope(function: Callable[..., Tensor], state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    r"""The value of a function at a point where it is stationary.

    With :math:`\partial\Phi/\partial z = 0` at :math:`z(x)`,

    .. math:: \frac{\mathrm d}{\mathrm dx} \Phi(z(x), x) = \frac{\partial\Phi}{\partial x},\qquad
              \frac{\mathrm d^2}{\mathrm dx^2} \Phi = \frac{\partial^2\Phi}{\partial x^2}
              + \frac{\partial^2\Phi}{\partial x\,\partial z} \frac{\mathrm dz}{\mathrm dx} .

    A first derivative holds z fixed and costs no adjoint solve; second and higher ones go through
    the graph of z. An error of z enters the value and its first derivative as its square and
    itself.

    Args:
        function: differentiable ``Phi(z, *inputs)``, any shape. Every tensor that needs a gradient
            must be one of ``inputs``.
        state: ``z``, with the graph of its dependence on the inputs (:func:`implicit`).
        inputs: the tensors that the value depends on.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        value: Tensor = _Envelope.apply(function, state, *inputs)
        return value
    return function(state.detach(), *inputs)


class _Envelope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, function: Callable[..., Tensor], state: Tensor, *inputs: Tensor
    ) -> Tensor:
        ctx.function = function  # type: ignore[attr-defined]
        ctx.save_for_backward(state, *inputs)
        return function(state, *inputs).clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        state, *arguments = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # New names: the derivative is partial, and what depends on ``state`` stays out of it.
            inputs = [
                _alias(tensor, again) if need else tensor.detach()
                for tensor, need in zip(arguments, needed, strict=True)
            ]
            out = ctx.function(state if again else state.detach(), *inputs)
            wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
            grads = iter(
                torch.autograd.grad(out, wanted, grad_output, create_graph=again, allow_unused=True)
            )
        return (None, None, *(next(grads) if need else None for need in needed))
