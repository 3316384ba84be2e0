"""Errors and warnings of the library, and the two checks that make a wrong option loud.

Every public constructor takes typed keyword arguments. A keyword that does not exist raises
``TypeError`` and names the nearest one that does; a string option outside its choices raises
``ValueError`` and does the same.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

OnFailure = Literal["raise", "warn", "ignore"] | Callable[[str], None]

_Class = TypeVar("_Class", bound=type)
_Choice = TypeVar("_Choice", bound=str | None)
_INSIDE = ("spinformer", "torch")


class SpinformerError(Exception):
    """Base of the library's own errors."""


class ConvergenceError(SpinformerError, RuntimeError):
    """An iteration stopped before it reached its tolerance."""


class NotSampledError(SpinformerError, RuntimeError):
    """A Monte Carlo run was asked for what it did not measure."""


class ConvergenceWarning(UserWarning):
    """An iteration stopped before it reached its tolerance, and the caller asked to go on."""


def warn_caller(message: str) -> None:
    """Warn of the line that called the library, however deep inside of it the trouble was found."""
    frame, level = inspect.currentframe(), 1
    # torch: decorators such as no_grad() stand between a method and its caller.
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ConvergenceWarning, stacklevel=level)


class WarnOnce:
    """A policy for ``on_failure``: the first failure warns, later ones are silent."""

    def __init__(self) -> None:
        self.warned = False

    def __call__(self, message: str) -> None:
        if not self.warned:
            self.warned = True
            warn_caller(message)


def check_on_failure(on_failure: OnFailure) -> None:
    """Raise ``ValueError`` unless ``on_failure`` is a name of a policy or a function."""
    if not callable(on_failure):
        check_choice("on_failure", on_failure, ("raise", "warn", "ignore"))


def report_failure(on_failure: OnFailure, message: str) -> None:
    """Raise :class:`ConvergenceError`, warn, stay silent or call, as a user asked."""
    check_on_failure(on_failure)
    if callable(on_failure):
        on_failure(message)
    elif on_failure == "raise":
        raise ConvergenceError(message)
    elif on_failure == "warn":
        warn_caller(message)


def nearest(word: str, choices: Sequence[str]) -> str:
    """Sentence that suggests a choice close to ``word``, if there is one, and lists them all."""
    if not choices:
        return " (there are none)"
    known = ", ".join(repr(choice) for choice in choices)
    return f"{_suggestion(word, choices)} (choose from {known})"


def check_choice(
    name: str, value: _Choice, choices: Sequence[str], *, optional: bool = False
) -> _Choice:
    """Return ``value`` if it is one of ``choices``; else ``ValueError`` names the nearest.

    Args:
        name: of the argument.
        value: what was passed.
        choices: at least one.
        optional: whether None is a choice too.
    """
    if value not in choices and not (optional and value is None):
        known = ", ".join([*map(repr, choices), *(["None"] if optional else [])])
        close = _suggestion(str(value), choices)
        raise ValueError(f"{name}={value!r} is not an option{close} (choose from {known})")
    return value


def _suggestion(word: str, choices: Sequence[str]) -> str:
    folded = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.5)
    return f"; the nearest is {folded[close[0]]!r}" if close else ""


def strict_options(cls: _Class) -> _Class:
    """Class decorator: an unknown keyword of ``__init__`` names the nearest real one."""
    init = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(init)
    known = [
        name
        for name, parameter in signature.parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        # A subclass has its own signature and its own check.
        for option in options:
            if option not in known:
                raise TypeError(
                    f"{type(self).__name__} has no option {option!r}{nearest(option, known)}"
                )
        init(self, *args, **options)

    cls.__init__ = checked  # type: ignore[misc]
    return cls
