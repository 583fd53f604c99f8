"""Checks whether an environment keeps what training relies on, without a model.

`check_env` returns findings; `assert_conforms` is the same for tests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .conformance_checks import CHECKS, Level, Outcome, Trial, check_other_process, told

__all__ = ["Finding", "Level", "assert_conforms", "check_env"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: what was looked at.
        level: an error breaks training; a warning deserves a look.
        message: what was found, with the remedy.
    """

    check: str
    level: Level
    message: str

    def __str__(self) -> str:
        return f"{self.level:8} {self.check}: {self.message}"


def check_env(
    create: Callable[[Mapping[str, Any]], Any],
    config: Mapping[str, Any] | None = None,
    *,
    heldout_config: Mapping[str, Any] | None = None,
    max_problems: int = 1000,
    other_process: bool = True,
) -> list[Finding]:
    """Checks an environment; takes seconds, with slow verifiers minutes.

    Args:
        create: the environment's class, or what creates it from a config.
        config: the environment's settings.
        heldout_config: what evaluation changes of them. None takes `{"split":
            "heldout"}` if the environment's split is "train".
        max_problems: most gold answers that are judged.
        other_process: also create it in another process, as env runners do; this takes
            most of the time.
    """
    try:
        trial = Trial(create, dict(config or {}), heldout_config, max_problems)
        _ = trial.prompt_ids
    except Exception as error:  # any: the environment is the user's code
        return [Finding("loading", Level.ERROR, told(error))]
    findings = [
        Finding(name, *_outcome(check, trial))
        for name, check in CHECKS
        if other_process or check is not check_other_process
    ]
    trial.env.close()
    return findings


def assert_conforms(
    create: Callable[[Mapping[str, Any]], Any],
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Fails, in a test, with every error that `check_env` finds.

    Args:
        create: as for `check_env`.
        config: as for `check_env`.
        **options: as for `check_env`.

    Raises:
        AssertionError: if there are errors.
    """
    findings = check_env(create, config, **options)
    errors = [str(f) for f in findings if f.level is Level.ERROR]
    assert not errors, "\n".join(errors)


def _outcome(check: Callable[[Trial], Outcome], trial: Trial) -> Outcome:
    try:
        return check(trial)
    except Exception as error:  # any: the environment is the user's code
        return Level.ERROR, told(error)
