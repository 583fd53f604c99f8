"""Text environments with verifiable rewards; plain Gymnasium, without Ray.

The classes are imported when first used, so that importing the package stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arithmetic import ArithmeticEnv
    from .base import Problem, UnknownPromptError, VerifiableTextEnv
    from .countdown import CountdownEnv
    from .generated import GeneratedEnv
    from .gsm8k import GSM8KEnv
    from .math import MathEnv
    from .multiple_choice import MultipleChoiceEnv
    from .pooled import PooledEnv
    from .reasoning_gym import ReasoningGymEnv
    from .spaces import TextSpace
    from .tables import TableEnv
    from .verdict import Reason, Verdict
    from .verifiers import VerifiersEnv

__all__ = [
    "ArithmeticEnv",
    "CountdownEnv",
    "GSM8KEnv",
    "GeneratedEnv",
    "MathEnv",
    "MultipleChoiceEnv",
    "PooledEnv",
    "Problem",
    "Reason",
    "ReasoningGymEnv",
    "TableEnv",
    "TextSpace",
    "UnknownPromptError",
    "Verdict",
    "VerifiableTextEnv",
    "VerifiersEnv",
]

_MODULES = {
    "ArithmeticEnv": "arithmetic",
    "CountdownEnv": "countdown",
    "GSM8KEnv": "gsm8k",
    "GeneratedEnv": "generated",
    "MathEnv": "math",
    "MultipleChoiceEnv": "multiple_choice",
    "PooledEnv": "pooled",
    "Problem": "base",
    "Reason": "verdict",
    "ReasoningGymEnv": "reasoning_gym",
    "TableEnv": "tables",
    "TextSpace": "spaces",
    "UnknownPromptError": "base",
    "Verdict": "verdict",
    "VerifiableTextEnv": "base",
    "VerifiersEnv": "verifiers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
