"""Estimates from the samples of questions, with bootstrap intervals. Pure numpy."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 1000
LEVEL = 0.95


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Computes the unbiased estimate of pass@k of one question.

    It is the chance that k of the n samples, drawn without replacement, hold a correct
    one: 1 - C(n - c, k) / C(n, k).

    Args:
        num_samples: n, at least k.
        num_correct: c, from 0 to n.
        k: at least 1.

    Raises:
        ValueError: for numbers outside these ranges.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(
            f"pass@{k} cannot be estimated from {num_correct} correct of {num_samples} "
            "samples: it needs at least k samples."
        )
    misses = math.comb(num_samples - num_correct, k)
    return 1.0 - misses / math.comb(num_samples, k)


def majority_at_k(
    answers_G: Sequence[str | None], is_correct_G: Sequence[bool], k: int
) -> float:
    """Estimates how often the majority of k samples of one question is right.

    The samples are cut into blocks of k, each with a vote of its own. A sample without
    an answer has no vote; a tie counts the share of its answers that are right.

    Args:
        answers_G: what each sample answers; equal texts are the same answer.
        is_correct_G: whether each is correct.
        k: size of a block; a shorter rest is left out.
    """
    starts = range(0, len(answers_G) - k + 1, k)
    return float(
        np.mean([_vote(answers_G[i : i + k], is_correct_G[i : i + k]) for i in starts])
    )


def _vote(answers: Sequence[str | None], is_correct: Sequence[bool]) -> float:
    votes = Counter(a for a in answers if a is not None)
    if not votes:
        return 0.0
    right = Counter(a for a, c in zip(answers, is_correct, strict=True) if c)
    most = max(votes.values())
    # An answer's samples can differ in verdict where the verifier ran out of time.
    shares = [right[a] / most for a, count in votes.items() if count == most]
    return sum(shares) / len(shares)


def powers_of_two(largest: int) -> list[int]:
    """Returns 1, 2, 4, ... up to a number."""
    return [1 << i for i in range(largest.bit_length())] if largest else []


def bootstrap_means(
    values_PM: ArrayLike, strata_P: Sequence[str], seed: int = 0
) -> NDArray[np.float64]:
    """Resamples questions within their strata and averages each resample.

    Args:
        values_PM: (P, M) M values of each question.
        strata_P: the stratum of each question, such as its source.
        seed: of the resampling.

    Returns:
        (NUM_RESAMPLES, M) means over all questions.
    """
    values_PM = np.asarray(values_PM, dtype=np.float64)
    names = np.asarray(strata_P)
    random = np.random.default_rng(seed)
    sums = np.zeros((NUM_RESAMPLES, values_PM.shape[1]))
    for name in np.unique(names):
        values = values_PM[names == name]
        counts = random.multinomial(
            len(values), np.full(len(values), 1 / len(values)), size=NUM_RESAMPLES
        )
        sums += counts @ values
    return sums / len(values_PM)


def percentile_interval(
    means: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the two ends of the 95 % interval along the first axis."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high
