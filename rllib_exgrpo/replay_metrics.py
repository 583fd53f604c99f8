"""Metrics of what a step replayed. Pure numpy."""

import re
from collections.abc import Sequence

import numpy as np

from rllib_exgrpo.replay.drawing import Choice
from rllib_exgrpo.replay.knobs import ScoreKind

_CODE = re.compile(
    r"```|^\s*(?:import \w+|from \w+ import |def \w+\(|print\()", re.MULTILINE
)


def replay_metrics(
    choices: Sequence[Choice], texts: Sequence[str], score: ScoreKind | None
) -> dict[str, float]:
    """Summarises the replayed completions of a step.

    Args:
        choices: what is replayed.
        texts: the completions as text.
        score: what the choices were made by.

    Returns:
        Metric name to value. NaN where nothing is replayed, and of entropies also where
        the choice was not made by them.
    """
    ages = np.array([choice.age for choice in choices], float)
    by_entropy = choices if score == "entropy" else []
    return {
        "age_p50": float(np.quantile(ages, 0.5)) if choices else np.nan,
        "age_p90": float(np.quantile(ages, 0.9)) if choices else np.nan,
        "code_block_fraction": _mean([has_code(text) for text in texts]),
        "chosen_entropy_mean": _mean([c.score for c in by_entropy]),
        "candidate_entropy_mean": _mean([c.mean_score for c in by_entropy]),
    }


def has_code(text: str) -> bool:
    """Tells whether a completion has a code block, or a line of bare Python.

    Code that adds nothing marks lucky guesses; replaying them spreads it, which the
    paper calls the snowball effect (section 3.2).
    """
    return _CODE.search(text) is not None


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else np.nan
