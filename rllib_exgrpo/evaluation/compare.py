"""Paired comparison of two sides, question by question, over one or more runs each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.evaluation.estimators import NUM_RESAMPLES, percentile_interval
from rllib_exgrpo.evaluation.questions import Question


@dataclass(frozen=True)
class Comparison:
    """The difference of two sides on one evaluation set.

    Attributes:
        num_questions: that all runs answered.
        pass_at_1_a: mean of side A over questions and runs.
        pass_at_1_b: the same of side B.
        low: lower end of the 95 % interval of A - B.
        high: upper end.
    """

    num_questions: int
    pass_at_1_a: float
    pass_at_1_b: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """A - B."""
        return self.pass_at_1_a - self.pass_at_1_b

    @property
    def verdict(self) -> str:
        """What the interval says."""
        if self.low > 0:
            return "A is better"
        return "B is better" if self.high < 0 else "no difference shown"


def compare(
    side_a: Sequence[Sequence[Question]],
    side_b: Sequence[Sequence[Question]],
    seed: int = 0,
) -> Comparison:
    """Compares pass@1 of two sides on the questions that all their runs share.

    Each resample draws questions within their sources, the same for both sides. Where a
    side has several runs, it draws runs too.

    Args:
        side_a: for each run, its questions of one evaluation of one set.
        side_b: the same of the other side.
        seed: of the resampling.

    Raises:
        ValueError: if the runs share no question.
    """
    runs = [{q.prompt_id: q for q in run} for run in (*side_a, *side_b)]
    shared = [i for i in runs[0] if all(i in run for run in runs)]
    if not shared:
        raise ValueError(
            "The runs share no question: compare evaluations on the same data."
        )
    rates_RP = np.array([[run[i].pass_rate for i in shared] for run in runs])
    rates_a, rates_b = rates_RP[: len(side_a)], rates_RP[len(side_a) :]
    sources_P = np.array([runs[0][i].source for i in shared])
    low, high = percentile_interval(_differences(rates_a, rates_b, sources_P, seed))
    return Comparison(
        len(shared), float(rates_a.mean()), float(rates_b.mean()), float(low),
        float(high),
    )  # fmt: skip


def _differences(
    rates_a: NDArray[np.float64],
    rates_b: NDArray[np.float64],
    sources_P: NDArray[np.str_],
    seed: int,
) -> NDArray[np.float64]:
    """Returns (NUM_RESAMPLES,) resampled differences of the means."""
    random = np.random.default_rng(seed)
    strata = [np.flatnonzero(sources_P == name) for name in np.unique(sources_P)]
    differences = np.empty(NUM_RESAMPLES)
    for i in range(NUM_RESAMPLES):
        drawn = np.concatenate([random.choice(rows, len(rows)) for rows in strata])
        mean_a, mean_b = (
            rates[random.integers(len(rates), size=len(rates))][:, drawn].mean()
            for rates in (rates_a, rates_b)
        )
        differences[i] = mean_a - mean_b
    return differences
