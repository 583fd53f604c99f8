"""The records that cross between stations of the data flow.

Axes, used as suffixes of names throughout the package:
    _P prompts of a step, _G completions of a group, _T tokens, _B flat rows.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.evaluation.sets import EvaluationSet

PromptId: TypeAlias = Hashable
"""Names a problem inside its environment; unique there, usually an int or a str."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One completion, exactly as the engine sampled it, with its reward.

    Attributes:
        token_ids: (T,) int32, the end-of-sequence token included where the engine
            stopped on one.
        behavior_logp: (T,) float32, log-probability of each token under the policy
            that sampled it, in nats.
        reward: in [0, 1]; NaN where the verifier reached no verdict.
        weights_version: number of the weights that sampled it.
        truncated: whether the length limit, not the model, ended it.
        iteration: training iteration in which it was sampled.
    """

    token_ids: NDArray[np.int32]
    behavior_logp: NDArray[np.float32]
    reward: float
    weights_version: int
    truncated: bool = False
    iteration: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The completions of one prompt that are judged against each other.

    Attributes:
        prompt_id: which problem.
        prompt_token_ids: (T,) int32, as sent to the engine.
        completions: the fresh ones of this step.
        replayed: the stored completion that joins the group, if any. It was never
            sent to the engine.
        source: which data set the problem belongs to, for metrics.
        reasons: the verifier's reason for the reward of each of `completions`.
        verify_seconds: wall time that the verifier took for each of `completions`.
        answers: what each of `completions` answers, None for one without an answer;
            None as a whole where nobody asked, or the environment cannot tell.
    """

    prompt_id: PromptId
    prompt_token_ids: NDArray[np.int32]
    completions: list[Completion] = field(default_factory=list)
    replayed: Completion | None = None
    source: str = ""
    reasons: list[str] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)
    answers: list[str | None] | None = None

    @property
    def members(self) -> list[Completion]:
        """All completions of the group, the replayed one first."""
        replayed = [] if self.replayed is None else [self.replayed]
        return replayed + self.completions

    @property
    def rewards_G(self) -> NDArray[np.float64]:
        """Rewards in the order of `members`; NaN where there is no verdict."""
        return np.array([c.reward for c in self.members], dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRequest:
    """What one env runner is asked to sample.

    Attributes:
        prompt_ids: which problems.
        counts: completions wanted of each.
        temperature: of sampling; 0 is greedy.
        seed: of this request.
        iteration: training iteration, noted in the completions.
        evaluation_set: whose environment holds the problems; None means that of
            training.
    """

    prompt_ids: list[PromptId]
    counts: list[int]
    temperature: float
    seed: int
    iteration: int = 0
    evaluation_set: EvaluationSet | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RolloutResult:
    """What an env runner sampled.

    Attributes:
        groups: one for each prompt asked for, in order.
        weights_version: number of the weights that sampled them.
        seconds: time spent by part ("generate", "verify").
        error: what went wrong, with its traceback; the groups are then empty.
    """

    groups: list[Group]
    weights_version: int
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None


T = TypeVar("T")


def deal(items: Sequence[T], num_shares: int) -> list[list[T]]:
    """Deals items out in turns, so that each share has some of every kind.

    Replayed prompts come first in a step and want a completion less; contiguous shares
    would give some env runners less to do than others.

    Returns:
        The shares, some of them empty where there are few items.
    """
    return [list(items[i::num_shares]) for i in range(num_shares)]


def undeal(shares: Sequence[Sequence[T]]) -> list[T]:
    """Brings the items of dealt shares back into their order."""
    missing = object()
    rounds = chain.from_iterable(zip_longest(*shares, fillvalue=missing))
    return [item for item in rounds if item is not missing]  # type: ignore[misc]


def groups_of(results: Sequence[RolloutResult]) -> list[Group]:
    """Returns the groups of a rollout in the order of the prompts asked for."""
    return undeal([result.groups for result in results])
