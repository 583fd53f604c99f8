"""Drawing from a replay buffer: which prompts, and which of their completions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.buckets import bucket_probabilities, draw_bucket_counts
from rllib_exgrpo.records import Completion, PromptId
from rllib_exgrpo.replay.contents import ReplayContents


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """A prompt that was drawn for replay.

    Attributes:
        prompt_id: which prompt.
        bucket: k of its latest group, 1..G-1.
        probability: chance that a single draw, with all prompts in place, takes this
            prompt: that of its bucket divided by the bucket's size.
        candidates: the stored completions to choose from, oldest first; their arrays
            are read-only views of the buffer.
        completion_ids: (len(candidates),) int32, the buffer's own ids for them.
        scores: (len(candidates),) float32, those that `choose` needs and that are known
            for the current weights; NaN where they are not.
        rows: where the buffer keeps them, as long as the ids there are these.
        weights_version: current weights at the time of the draw.
    """

    prompt_id: PromptId
    bucket: int
    probability: float
    candidates: list[Completion]
    completion_ids: NDArray[np.int32]
    scores: NDArray[np.float32]
    rows: list[int]
    weights_version: int


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The stored completion that is replayed for a drawn prompt, and why it is.

    Attributes:
        prompt_id: which prompt.
        completion: with arrays of its own.
        completion_id: the buffer's own id for it.
        bucket: as in the `Draw`.
        probability: as in the `Draw`.
        num_candidates: completions that there were to choose from.
        score: the one that the choice was made by, in nats a token; NaN where the rule
            needs none.
        mean_score: over the candidates.
        rank: of the score among those of the candidates, from 1, the lowest; 0 where
            the rule needs none.
        age: versions between the weights that sampled it and the current ones.
    """

    prompt_id: PromptId
    completion: Completion
    completion_id: int
    bucket: int
    probability: float
    num_candidates: int
    score: float
    mean_score: float
    rank: int
    age: int


class Drawing(ReplayContents):
    """The part of a replay buffer that draws."""

    def draw(self, num_prompts: int, weights_version: int) -> list[Draw]:
        """Draws prompts to replay, without replacement.

        Args:
            num_prompts: how many; fewer are drawn where buckets 1 to G-1 hold fewer.
            weights_version: the current weights, from which ages are counted.

        Returns:
            The draws in random order.
        """
        self._changed()
        self._saw_version(weights_version)
        if self.max_age is not None:
            self._evict_before(weights_version - self.max_age)
        sizes = self.bucket_sizes[1:]
        if self.prompt_selection == "uniform":
            chance = sizes / max(sizes.sum(), 1)
            num_draws = min(num_prompts, int(sizes.sum()))
            counts = self._rng.multivariate_hypergeometric(sizes, num_draws)
        else:
            chance = bucket_probabilities(
                self.group_size, self.mu, self.sigma, sizes > 0
            )
            counts = draw_bucket_counts(
                self._rng, num_prompts, sizes, self.mu, self.sigma
            )
        chance_each = chance / np.maximum(sizes, 1)
        picks = [
            (k, prompt)
            for k in range(1, self.group_size)
            for prompt in self._members_at_random(k, int(counts[k - 1]))
        ]
        picks = [picks[i] for i in self._rng.permutation(len(picks))]
        return self._draws_of(picks, chance_each, weights_version)

    def choose(
        self, draws: Sequence[Draw], scores: Sequence[NDArray] | None = None
    ) -> list[Choice]:
        """Picks the completion to replay for each draw, and counts its replay.

        Args:
            draws: what `draw` returned.
            scores: for each draw the score of each candidate, in nats a token, if
                `needs_scores` names one. They are kept with the completions.

        Returns:
            One choice a draw.

        Raises:
            ValueError: if scores are missing, not aligned or not finite.
        """
        if self.needs_scores is None:
            choices = [self._choice(d, self._pick_unscored(d)) for d in draws]
        elif scores is None:
            raise ValueError(
                f"`completion_selection` is {self.completion_selection!r}, which needs "
                f"the {self.needs_scores} of each candidate, but `scores` is None: "
                "score the candidates of the draws first."
            )
        else:
            pairs = zip(draws, scores, strict=True)
            choices = [self._choice_by_score(d, np.asarray(s)) for d, s in pairs]
            self._keep_scores(draws, scores)
        self._count_replays(draws, choices)
        self._changed()
        return choices

    def _draws_of(
        self, picks: list[tuple[int, int]], chance: NDArray, version: int
    ) -> list[Draw]:
        """Returns draws of (bucket, prompt row); reads all candidates in one go."""
        most = self.max_candidates or 0
        rows_P = [self._rows_of(prompt)[-most:] for _, prompt in picks]
        rows = list(chain.from_iterable(rows_P))
        candidates, ids = self.store.completions(rows), self.store.table["id"][rows]
        scores = self._known_scores(rows, version)
        ends = list(accumulate(map(len, rows_P), initial=0))
        return [
            Draw(
                prompt_id=self.prompts.id(prompt),
                bucket=bucket,
                probability=float(chance[bucket - 1]),
                candidates=candidates[ends[i] : ends[i + 1]],
                completion_ids=ids[ends[i] : ends[i + 1]],
                scores=scores[ends[i] : ends[i + 1]],
                rows=rows_P[i],
                weights_version=version,
            )
            for i, (bucket, prompt) in enumerate(picks)
        ]

    def _known_scores(self, rows: list[int], version: int) -> NDArray[np.float32]:
        if self.needs_scores is None:
            return np.full(len(rows), np.nan, np.float32)
        table = self.store.table
        current = table["scored_version"][rows] == version
        return np.where(current, table[self.needs_scores][rows], np.float32(np.nan))

    def _pick_unscored(self, draw: Draw) -> int:
        last = len(draw.candidates) - 1
        if self.completion_selection == "newest":
            return last
        return int(self._rng.integers(last + 1))

    def _choice_by_score(self, draw: Draw, scores: NDArray) -> Choice:
        if scores.shape != (len(draw.candidates),) or not np.isfinite(scores).all():
            raise ValueError(
                f"The scores of prompt {draw.prompt_id!r} are {scores}, but its "
                f"{len(draw.candidates)} candidates need one finite {self.needs_scores}"
                " each: check the scoring and the weights for NaN."
            )
        lowest = self.completion_selection.startswith("lowest")
        pick = int(scores.argmin() if lowest else scores.argmax())
        return replace(
            self._choice(draw, pick),
            score=float(scores[pick]),
            mean_score=float(scores.mean()),
            rank=1 + int((scores < scores[pick]).sum()),
        )

    def _choice(self, draw: Draw, pick: int) -> Choice:
        stored = draw.candidates[pick]
        # It may be held for long, which must not keep a whole segment in memory.
        own = replace(
            stored,
            token_ids=stored.token_ids.copy(),
            behavior_logp=stored.behavior_logp.copy(),
        )
        return Choice(
            prompt_id=draw.prompt_id,
            completion=own,
            completion_id=int(draw.completion_ids[pick]),
            bucket=draw.bucket,
            probability=draw.probability,
            num_candidates=len(draw.candidates),
            score=np.nan,
            mean_score=np.nan,
            rank=0,
            age=draw.weights_version - stored.weights_version,
        )

    def _keep_scores(self, draws: Sequence[Draw], scores: Sequence[NDArray]) -> None:
        rows, still = self._rows_of_draws(draws)
        sizes = [len(draw.rows) for draw in draws]
        versions = np.repeat([draw.weights_version for draw in draws], sizes)
        table = self.store.table
        table[self.needs_scores or ""][rows] = np.concatenate([[], *scores])[still]
        table["scored_version"][rows] = versions[still]
        table["changed"][rows] = True

    def _count_replays(self, draws: Sequence[Draw], choices: Sequence[Choice]) -> None:
        chosen = {choice.completion_id for choice in choices}
        rows, _ = self._rows_of_draws(draws)
        ids = self.store.table["id"][rows].tolist()
        for row in (r for r, i in zip(rows.tolist(), ids, strict=True) if i in chosen):
            self.store.table["times_replayed"][row] += 1
            self.store.table["changed"][row] = True
        for choice in choices:
            prompt = self.prompts.row(choice.prompt_id)
            if prompt is not None and self.prompts.count_replay(prompt) == 1:
                self._counts["distinct_prompts_replayed"] += 1

    def _rows_of_draws(self, draws: Sequence[Draw]) -> tuple[NDArray, NDArray]:
        """Returns the rows of all candidates still stored, and which those are."""
        table = self.store.table
        rows = np.array([row for draw in draws for row in draw.rows], np.int64)
        ids = np.concatenate(
            [np.empty(0, np.int32), *(d.completion_ids for d in draws)]
        )
        still = rows < len(table)
        still[still] = table["id"][rows[still]] == ids[still]
        return rows[still], still

    def _evict_before(self, version: int) -> None:
        """Evicts all completions of weights before `version`."""
        old = self.store.older_than(version)
        evicted = set(old)
        for prompt in np.unique(self.store.table["prompt"][old]).tolist():
            rows = [r for r in self._rows_of(prompt) if r not in evicted]
            if rows:
                self.store.relink(rows)
                self.prompts.table["newest"][prompt] = rows[-1]
            else:
                self.prompts.remove(prompt)
        self.store.discard(old)
        self.store.compact()
