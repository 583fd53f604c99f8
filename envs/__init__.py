"""Text environments with verifiable rewards; plain Gymnasium, without Ray.

The classes are imported when first used, so that importing the package stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arithmetic import ArithmeticEnv
    from .base import Problem, UnknownPromptError, VerifiableTextEnv
    from .math import MathEnv
    from .spaces import TextSpace
    from .verdict import Reason, Verdict

__all__ = [
    "ArithmeticEnv",
    "MathEnv",
    "Problem",
    "Reason",
    "TextSpace",
    "UnknownPromptError",
    "Verdict",
    "VerifiableTextEnv",
]

_MODULES = {
    "ArithmeticEnv": "arithmetic",
    "MathEnv": "math",
    "Problem": "base",
    "Reason": "verdict",
    "TextSpace": "spaces",
    "UnknownPromptError": "base",
    "Verdict": "verdict",
    "VerifiableTextEnv": "base",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
