"""The settings of a replay buffer, and their checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from rllib_exgrpo.buckets import bucket_probabilities

BucketRule: TypeAlias = Literal["successes", "reward_spread"]
PromptSelection: TypeAlias = Literal["bucket", "uniform"]
CompletionSelection: TypeAlias = Literal[
    "lowest_entropy", "highest_entropy", "lowest_nll", "highest_nll", "random", "newest"
]
ScoreKind: TypeAlias = Literal["entropy", "nll"]


@dataclass(kw_only=True, eq=False)
class ReplayKnobs:
    """What a replay buffer is told when it is built; see `ReplayBuffer`.

    Args:
        group_size: G, completions in a group, the replayed one included.
        success_threshold: a completion is correct if its reward is at least this.
        seed: of the buffer's own random generator; None takes entropy from the system.
        mu: pass rate that is drawn most often.
        sigma: spread of the draw, in pass-rate units; None means 1 / G.
        bucket_by: "successes", or "reward_spread" for rewards between 0 and 1; see
            `ReplayBuffer`.
        prompt_selection: "bucket", or "uniform" over buckets 1 to G-1.
        completion_selection: which candidate of a drawn prompt is replayed, by mean
            entropy or mean negative log-likelihood a token under the current weights,
            at random, or the newest. Among equal scores the older one is taken.
        max_completions_per_prompt: above it the oldest ones are evicted.
        max_age: completions whose weights are more than this many versions old are
            evicted at the next draw.
        max_candidates: a drawn prompt offers only its newest ones, at most this many,
            which bounds the cost of scoring.
        recheck_share: share of the retired prompts, rounded to the nearest whole
            number, that is put back among the fresh prompts ...
        recheck_every: ... each time this many iterations have passed; 0 = never.
        mark_failed: whether k = 0 moves a stored prompt to bucket 0; False leaves it
            in the bucket where it was.
        disk_path: keeps tokens and log-probs in memory-mapped files in this folder,
            for buffers larger than memory; None keeps them in memory.
        metadata: saved with the buffer, such as "model", "tokenizer" (a hash) and
            "environment". A saved buffer of another tokenizer is refused.

    Raises:
        ValueError: if a knob is out of range.
    """

    group_size: int
    success_threshold: float = 1.0
    seed: int | None = None
    mu: float = 0.5
    sigma: float | None = None
    bucket_by: BucketRule = "successes"
    prompt_selection: PromptSelection = "bucket"
    completion_selection: CompletionSelection = "lowest_entropy"
    max_completions_per_prompt: int | None = None
    max_age: int | None = None
    max_candidates: int | None = None
    recheck_share: float = 0.0
    recheck_every: int = 0
    mark_failed: bool = True
    disk_path: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the values."""
        bucket_probabilities(self.group_size, self.mu, self.sigma)  # checks the three
        self._check_choice("bucket_by", BucketRule)
        self._check_choice("prompt_selection", PromptSelection)
        self._check_choice("completion_selection", CompletionSelection)
        self._check_least("max_completions_per_prompt", 1)
        self._check_least("max_age", 0)
        self._check_least("max_candidates", 1)
        self._check_least("recheck_every", 0)
        if not 0 <= self.mu <= 1:
            raise ValueError(
                f"`mu` is {self.mu}, but it is a pass rate: use a value from 0 to 1."
            )
        if not 0 < self.success_threshold <= 1:
            raise ValueError(
                f"`success_threshold` is {self.success_threshold}, but rewards lie in "
                "[0, 1]: use a value above 0, up to 1."
            )
        if not 0 <= self.recheck_share <= 1:
            raise ValueError(
                f"`recheck_share` is {self.recheck_share}, but it is a share of the "
                "retired prompts: use a value from 0 to 1."
            )

    @property
    def knobs(self) -> dict[str, Any]:
        """The arguments that make an empty buffer like this one."""
        return {f.name: getattr(self, f.name) for f in fields(ReplayKnobs)}

    @property
    def needs_scores(self) -> ScoreKind | None:
        """Which score of the candidates `choose` has to be given, if any."""
        kind = self.completion_selection.rpartition("_")[2]
        return kind if kind in get_args(ScoreKind) else None  # type: ignore[return-value]

    def _check_choice(self, knob: str, choices: Any) -> None:
        value = getattr(self, knob)
        if value not in get_args(choices):
            names = ", ".join(map(repr, get_args(choices)))
            raise ValueError(f"`{knob}` is {value!r}: use one of {names}.")

    def _check_least(self, knob: str, least: int) -> None:
        value = getattr(self, knob)
        if value is not None and value < least:
            raise ValueError(f"`{knob}` is {value}: use {least} or more.")
