"""What an evaluation samples: sets of problems, each with a role."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rllib_exgrpo.metric_names import find_metric

UNNAMED = "evaluation"
"""The set that `evaluation_config` describes."""

ROLES = ("validation", "test")


@dataclass(frozen=True)
class EvaluationSet:
    """Problems to evaluate on, and how.

    Attributes:
        name: in metrics and files.
        env: the environment's class or name.
        env_config: its settings.
        samples: completions of each problem.
        temperature: of sampling; 0 is greedy.
        max_prompts: take only the first so many; None takes all.
        role: "validation" may choose checkpoints, "test" may not.
    """

    name: str
    env: Any
    env_config: Mapping[str, Any]
    samples: int = 1
    temperature: float = 0.6
    max_prompts: int | None = None
    role: str = "validation"

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: for one out of range.
        """
        if not isinstance(self.samples, int) or self.samples < 1:
            self._reject("samples", "give a whole number of at least 1")
        if not self.temperature >= 0:
            self._reject("temperature", "give 0 (greedy) or more")
        if self.max_prompts is not None and self.max_prompts < 1:
            self._reject("max_prompts", "give at least 1, or None for all")
        if self.role not in ROLES:
            self._reject("role", f"take one of {', '.join(map(repr, ROLES))}")

    def _reject(self, key: str, remedy: str) -> None:
        raise ValueError(
            f"`{key}` of the evaluation set {self.name!r} is {getattr(self, key)!r}: "
            f"{remedy}."
        )

    @property
    def path(self) -> str:
        """Where its metrics are in a result."""
        return UNNAMED if self.name == UNNAMED else f"{UNNAMED}/{self.name}"


_KEYS = [field.name for field in fields(EvaluationSet) if field.name != "name"]


def named_sets(
    described: Mapping[str, Mapping[str, Any]], defaults: EvaluationSet
) -> dict[str, EvaluationSet]:
    """Builds the sets that `evaluation_sets` describes.

    Args:
        described: name to some attributes of `EvaluationSet`.
        defaults: what a description leaves out. Its `env_config` is updated by that of
            a set in the same environment; a set with an `env` of its own has its own.

    Raises:
        ValueError: for a name, key or value that cannot be used.
    """
    return {name: _build(name, keys, defaults) for name, keys in described.items()}


def _build(
    name: str, described: Mapping[str, Any], defaults: EvaluationSet
) -> EvaluationSet:
    if name == UNNAMED or not re.fullmatch(r"[\w.-]+", name) or _is_metric(name):
        raise ValueError(
            f"`evaluation_sets` has a set {name!r}: take letters, digits, '_', '-' and "
            f"'.' for its name, and neither {UNNAMED!r} nor a metric's name."
        )
    for key in described:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"take {_KEYS}."
            raise ValueError(f"the evaluation set {name!r} has {key!r}; {hint}")
    env_config = described.get("env_config", {})
    if "env" not in described:
        env_config = {**defaults.env_config, **env_config}
    return replace(defaults, **{**described, "name": name, "env_config": env_config})


def _is_metric(name: str) -> bool:
    return find_metric(f"{UNNAMED}/{name}") is not None


def check_best_checkpoint_set(
    name: str | None, sets: Mapping[str, EvaluationSet]
) -> None:
    """Checks that a set may choose the best checkpoint.

    Raises:
        ValueError: if it does not exist, or is a test set.
    """
    if name is None:
        return
    if name not in sets:
        raise ValueError(
            f"`best_checkpoint_set` is {name!r}; the evaluation sets are "
            f"{', '.join(map(repr, sets))}."
        )
    if sets[name].role == "test":
        raise ValueError(
            f"`best_checkpoint_set` is {name!r}, a test set: a checkpoint that a test "
            "set has chosen looks better on it than it is. Choose on a set with the "
            "role 'validation'."
        )
