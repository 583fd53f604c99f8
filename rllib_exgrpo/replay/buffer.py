"""The replay buffer's rules: what is stored, what is drawn, what retires."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.buckets import bucket_probabilities, draw_bucket_counts
from rllib_exgrpo.records import Completion, Group, PromptId
from rllib_exgrpo.replay.prompt_table import Members, PromptTable
from rllib_exgrpo.replay.store import NONE, SEGMENT_TOKENS, CompletionStore, Spill

PromptSelection: TypeAlias = Literal["bucket", "uniform"]
CompletionSelection: TypeAlias = Literal[
    "lowest_entropy", "highest_entropy", "lowest_nll", "highest_nll", "random", "newest"
]
ScoreKind: TypeAlias = Literal["entropy", "nll"]


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
        rows: where the buffer keeps them, as long as the ids there are these.
        weights_version: current weights at the time of the draw.
    """

    prompt_id: PromptId
    bucket: int
    probability: float
    candidates: list[Completion]
    completion_ids: NDArray[np.int32]
    rows: list[int]
    weights_version: int


class ReplayBuffer:
    """Past successes, kept by prompt, and prompts kept by pass rate (section 3.2).

    A group with k correct of G completions puts its prompt in bucket k. Buckets 1 to
    G-1 are drawn from, with weights Normal(k / G; mu, sigma); bucket 0 is kept but not
    drawn; k = G retires the prompt: its completions go, its id stays known, and later
    groups of it are ignored until it is put back by `recheck_share`. A prompt without
    a stored completion is not in the buffer. Completions of a prompt differ in their
    token ids; of two equal ones the first is kept.

    Args:
        group_size: G, completions in a group, the replayed one included.
        success_threshold: a completion is correct if its reward is at least this.
        seed: of the buffer's own random generator; None takes entropy from the system.
        mu: pass rate that is drawn most often.
        sigma: spread of the draw, in pass-rate units; None means 1 / G.
        prompt_selection: "bucket" as above, or "uniform" over buckets 1 to G-1.
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

    segment_tokens = SEGMENT_TOKENS

    def __init__(
        self,
        *,
        group_size: int,
        success_threshold: float = 1.0,
        seed: int | None = None,
        mu: float = 0.5,
        sigma: float | None = None,
        prompt_selection: PromptSelection = "bucket",
        completion_selection: CompletionSelection = "lowest_entropy",
        max_completions_per_prompt: int | None = None,
        max_age: int | None = None,
        max_candidates: int | None = None,
        recheck_share: float = 0.0,
        recheck_every: int = 0,
        mark_failed: bool = True,
        disk_path: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        bucket_probabilities(group_size, mu, sigma)  # checks the three
        _check_choice("prompt_selection", prompt_selection, PromptSelection)
        _check_choice("completion_selection", completion_selection, CompletionSelection)
        _check_least("max_completions_per_prompt", max_completions_per_prompt, 1)
        _check_least("max_age", max_age, 0)
        _check_least("max_candidates", max_candidates, 1)
        _check_least("recheck_every", recheck_every, 0)
        if not 0 < success_threshold <= 1:
            raise ValueError(
                f"`success_threshold` is {success_threshold}, but rewards lie in "
                "[0, 1]: use a value above 0, up to 1."
            )
        if not 0 <= recheck_share <= 1:
            raise ValueError(
                f"`recheck_share` is {recheck_share}, but it is a share of the retired "
                "prompts: use a value from 0 to 1."
            )
        self.group_size = group_size
        self.success_threshold = success_threshold
        self.mu = mu
        self.sigma = sigma
        self.prompt_selection = prompt_selection
        self.completion_selection = completion_selection
        self.max_completions_per_prompt = max_completions_per_prompt
        self.max_age = max_age
        self.max_candidates = max_candidates
        self.recheck_share = recheck_share
        self.recheck_every = recheck_every
        self.mark_failed = mark_failed
        self.disk_path = disk_path
        self.metadata = dict(metadata or {})
        self.seed = seed
        self._rng = np.random.default_rng(seed)
        self._clear()

    def _clear(self) -> None:
        self.prompts = PromptTable(self.group_size + 1)
        self.store = CompletionStore(self.segment_tokens, self._spill())
        self.sources: dict[str, int] = {}
        self._evicted: list[int] = []  # rows to discard at the end of a step
        self._revision = 0  # how often something changed
        self._next_id = 0
        self._iteration = 0
        self._newest_version = 0

    def _spill(self) -> Spill | None:
        if self.disk_path is None:
            return None
        from rllib_exgrpo.replay.mapped import MappedSegments  # needs pyarrow

        return MappedSegments(self.disk_path)

    # What is in it.

    def __len__(self) -> int:
        """Returns how many prompts are stored, those in bucket 0 included."""
        return int(self.bucket_sizes.sum())

    @property
    def num_completions(self) -> int:
        """Stored completions, over all prompts."""
        return len(self.store)

    @property
    def num_retired(self) -> int:
        """Prompts that were solved by a whole group."""
        return len(self.prompts.members[self.group_size])

    @property
    def bucket_sizes(self) -> NDArray[np.int64]:
        """(G,) prompts in bucket k = 0..G-1."""
        return np.array([len(m) for m in self.prompts.members[:-1]], dtype=np.int64)

    @property
    def retired(self) -> Members:
        """A live, read-only view of the ids of the retired prompts."""
        return Members(self.prompts, self.group_size)

    def is_retired(self, prompt_id: PromptId) -> bool:
        """Whether a prompt was solved by a whole group."""
        return prompt_id in self.retired

    def bucket(self, prompt_id: PromptId) -> int | None:
        """Returns the bucket of a prompt; G if retired, None if it is not known."""
        row = self.prompts.row(prompt_id)
        return None if row is None else int(self.prompts.table["bucket"][row])

    def completions(self, prompt_id: PromptId) -> list[Completion]:
        """Returns the stored completions of a prompt, oldest first, as in a `Draw`."""
        row = self.prompts.row(prompt_id)
        rows = [] if row is None else self._rows_of(row)
        return self.store.completions(rows)

    def get_metrics(self) -> dict[str, float]:
        """Returns the sizes of the buffer, by name."""
        metrics = {
            "prompts": float(len(self)),
            "completions": float(self.num_completions),
            "tokens": float(self.store.num_tokens),
            "retired": float(self.num_retired),
        }
        for k, size in enumerate(self.bucket_sizes):
            metrics[f"bucket_{k}"] = float(size)
        return metrics

    # Drawing.

    @property
    def needs_scores(self) -> ScoreKind | None:
        """Which score of the candidates `choose` has to be given, if any."""
        kind = self.completion_selection.rpartition("_")[2]
        return kind if kind in get_args(ScoreKind) else None  # type: ignore[return-value]

    def draw(self, num_prompts: int, weights_version: int) -> list[Draw]:
        """Draws prompts to replay, without replacement.

        Args:
            num_prompts: how many; fewer are drawn where buckets 1 to G-1 hold fewer.
            weights_version: the current weights, from which ages are counted.

        Returns:
            The draws in random order.
        """
        self._revision += 1
        self._newest_version = max(self._newest_version, weights_version)
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
    ) -> list[Completion]:
        """Picks the completion to replay for each draw, and counts its replay.

        Args:
            draws: what `draw` returned.
            scores: for each draw the score of each candidate, in nats a token, if
                `needs_scores` names one. They are kept with the completions.

        Returns:
            One completion a draw.

        Raises:
            ValueError: if scores are missing, not aligned or not finite.
        """
        if self.needs_scores is None:
            picks = [self._pick_unscored(draw) for draw in draws]
        elif scores is None:
            raise ValueError(
                f"`completion_selection` is {self.completion_selection!r}, which needs "
                f"the {self.needs_scores} of each candidate, but `scores` is None: "
                "score the candidates of the draws first."
            )
        else:
            pairs = zip(draws, scores, strict=True)
            picks = [self._pick_scored(draw, np.asarray(s)) for draw, s in pairs]
            self._keep_scores(draws, scores)
        self._count_replays(draws, picks)
        self._revision += 1
        chosen = [d.candidates[pick] for d, pick in zip(draws, picks, strict=True)]
        # They may be held for long, which must not keep whole segments in memory.
        return [
            replace(
                c, token_ids=c.token_ids.copy(), behavior_logp=c.behavior_logp.copy()
            )
            for c in chosen
        ]

    def _members_at_random(self, bucket: int, count: int) -> list[int]:
        members = self.prompts.members[bucket]
        if count == 0:
            return []
        places = self._rng.choice(len(members), count, replace=False)
        return [members[place] for place in places]

    def _draws_of(
        self, picks: list[tuple[int, int]], chance: NDArray, version: int
    ) -> list[Draw]:
        """Returns draws of (bucket, prompt row); reads all candidates in one go."""
        most = self.max_candidates or 0
        rows_P = [self._rows_of(prompt)[-most:] for _, prompt in picks]
        rows = list(chain.from_iterable(rows_P))
        candidates, ids = self.store.completions(rows), self.store.table["id"][rows]
        ends = list(accumulate(map(len, rows_P), initial=0))
        return [
            Draw(
                prompt_id=self.prompts.id(prompt),
                bucket=bucket,
                probability=float(chance[bucket - 1]),
                candidates=candidates[ends[i] : ends[i + 1]],
                completion_ids=ids[ends[i] : ends[i + 1]],
                rows=rows_P[i],
                weights_version=version,
            )
            for i, (bucket, prompt) in enumerate(picks)
        ]

    def _pick_unscored(self, draw: Draw) -> int:
        last = len(draw.candidates) - 1
        if self.completion_selection == "newest":
            return last
        return int(self._rng.integers(last + 1))

    def _pick_scored(self, draw: Draw, scores: NDArray) -> int:
        if scores.shape != (len(draw.candidates),) or not np.isfinite(scores).all():
            raise ValueError(
                f"The scores of prompt {draw.prompt_id!r} are {scores}, but its "
                f"{len(draw.candidates)} candidates need one finite {self.needs_scores}"
                " each: check the scoring and the weights for NaN."
            )
        lowest = self.completion_selection.startswith("lowest")
        return int(scores.argmin() if lowest else scores.argmax())

    def _keep_scores(self, draws: Sequence[Draw], scores: Sequence[NDArray]) -> None:
        rows, still = self._rows_of_draws(draws)
        sizes = [len(draw.rows) for draw in draws]
        versions = np.repeat([draw.weights_version for draw in draws], sizes)
        table = self.store.table
        table[self.needs_scores or ""][rows] = np.concatenate([[], *scores])[still]
        table["scored_version"][rows] = versions[still]
        table["changed"][rows] = True

    def _count_replays(self, draws: Sequence[Draw], picks: list[int]) -> None:
        replayed = [
            replace(d, rows=[d.rows[i]], completion_ids=d.completion_ids[[i]])
            for d, i in zip(draws, picks, strict=True)
        ]
        rows, _ = self._rows_of_draws(replayed)
        for row in rows.tolist():
            self.store.table["times_replayed"][row] += 1
        self.store.table["changed"][rows] = True

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

    def _rows_of(self, prompt: int) -> list[int]:
        return self.store.chain(int(self.prompts.table["newest"][prompt]))

    # Recording.

    def record(self, groups: Sequence[Group], iteration: int) -> None:
        """Applies the buffer rule to the groups of a step.

        Args:
            groups: whole groups, with rewards. NaN rewards count as not correct.
            iteration: the training iteration that they belong to.

        Raises:
            ValueError: if a group does not have G members or a completion's arrays
                differ in length. Nothing has been recorded then.
        """
        for group in groups:
            self._check(group)
        self._revision += 1
        for group in groups:
            self._record_group(group, iteration)
        self.store.discard(self._evicted)
        self._evicted = []
        self.store.compact()
        self._recheck_until(iteration)

    def _record_group(self, group: Group, iteration: int) -> None:
        k = sum(map(self._is_correct, group.members))
        row = self.prompts.row(group.prompt_id)
        if row is not None and self.is_retired(group.prompt_id):
            return
        if k == self.group_size:
            self._retire(group, row, iteration)
        elif k > 0:
            self._store_successes(group, row, k, iteration)
        elif row is not None:
            self._touch(row, 0 if self.mark_failed else None, iteration)

    def _retire(self, group: Group, row: int | None, iteration: int) -> None:
        if row is None:
            self._add_prompt(group, self.group_size, iteration)
            return
        self._keep(row, self._rows_of(row), 0)
        self._touch(row, self.group_size, iteration)

    def _store_successes(
        self, group: Group, row: int | None, k: int, iteration: int
    ) -> None:
        fresh = [c for c in group.completions if self._is_correct(c) and len(c)]
        if row is None:
            if not fresh:
                return
            row = self._add_prompt(group, k, iteration)
        versions = (int(c.weights_version) for c in fresh)
        self._newest_version = max(self._newest_version, *versions, 0)
        rows = self._rows_of(row)
        self._next_id = self.store.extend(rows, row, fresh, self._next_id)
        self._keep(row, rows, self.max_completions_per_prompt)
        self._touch(row, k, iteration)

    def _add_prompt(self, group: Group, bucket: int, iteration: int) -> int:
        source = self.sources.setdefault(group.source, len(self.sources))
        values = (NONE, iteration, source, False, True)
        return self.prompts.add(group.prompt_id, bucket, values)

    def _touch(self, row: int, bucket: int | None, iteration: int) -> None:
        if bucket is not None:
            self.prompts.move(row, bucket)
        self.prompts.table["iteration"][row] = iteration
        self.prompts.table["changed"][row] = True

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

    def _keep(self, prompt: int, rows: list[int], newest: int | None) -> None:
        """Keeps the newest few of a prompt's completions; None keeps all.

        The others are discarded together at the end of the step, which is faster.
        """
        kept = rows if newest is None else rows[max(len(rows) - newest, 0) :]
        self._evicted += rows[: len(rows) - len(kept)]
        if len(kept) < len(rows):
            self.store.relink(kept)
        self.prompts.table["newest"][prompt] = kept[-1] if kept else NONE

    def _recheck_until(self, iteration: int) -> None:
        """Puts a share of the retired prompts back, if it is time to."""
        every, last = self.recheck_every, self._iteration
        self._iteration = max(last, iteration)
        if every and iteration // every > last // every:
            count = round(self.recheck_share * self.num_retired)
            for row in self._members_at_random(self.group_size, count):
                self.prompts.remove(row)

    def _is_correct(self, completion: Completion) -> bool:
        return completion.reward >= self.success_threshold

    def _check(self, group: Group) -> None:
        if len(group.members) != self.group_size:
            raise ValueError(
                f"The group of prompt {group.prompt_id!r} has {len(group.members)} "
                f"completions, but `group_size` is {self.group_size}: record whole "
                "groups, with one completion fewer beside a replayed one."
            )
        for completion in group.completions:
            if len(completion.token_ids) != len(completion.behavior_logp):
                raise ValueError(
                    f"A completion of prompt {group.prompt_id!r} has "
                    f"{len(completion.token_ids)} token ids but "
                    f"{len(completion.behavior_logp)} log-probs: it needs one for each."
                )

    # State.

    @property
    def knobs(self) -> dict[str, Any]:
        """The arguments that make an empty buffer like this one."""
        return {name: getattr(self, name) for name in _KNOBS}

    def get_counters(self) -> dict[str, Any]:
        """Returns the state apart from prompts and completions."""
        return {
            "rng": self._rng.bit_generator.state,
            "revision": self._revision,
            "next_id": self._next_id,
            "iteration": int(self._iteration),
            "newest_version": int(self._newest_version),
            "sources": list(self.sources),
        }

    def get_state(self) -> dict[str, Any]:
        """Returns all there is to restore, as plain arrays, lists and dicts.

        The token arrays are read-only views, not copies; what they show never changes.
        """
        return {
            "group_size": self.group_size,
            "counters": self.get_counters(),
            "prompts": self.prompts.get_state(),
            "completions": self._completions_state(),
        }

    def _completions_state(self) -> dict[str, Any]:
        state = self.store.get_state()
        columns = state["columns"]
        rows = self.prompts.table.live_rows()
        columns["prompt"] = np.searchsorted(rows, columns["prompt"]).astype(np.int32)
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Replaces the contents by what `get_state` returned.

        Raises:
            ValueError: if the state is of another group size.
        """
        if state["group_size"] != self.group_size:
            raise ValueError(
                f"`group_size` is {self.group_size}, but the replay buffer to restore "
                f"was filled with groups of {state['group_size']}, whose buckets mean "
                "other pass rates: use that group size, or start an empty buffer."
            )
        self._clear()
        counters = state["counters"]
        self._rng.bit_generator.state = counters["rng"]
        self._revision = counters["revision"]
        self._next_id = counters["next_id"]
        self._iteration = counters["iteration"]
        self._newest_version = counters["newest_version"]
        self.sources = {name: i for i, name in enumerate(counters["sources"])}
        self.prompts.set_state(state["prompts"])
        num_prompts = len(state["prompts"]["ids"])
        newest = self.store.set_state(state["completions"], num_prompts)
        self.prompts.table["newest"][np.arange(num_prompts)] = newest

    def __getstate__(self) -> dict[str, Any]:
        return {"knobs": self.knobs, "state": ReplayBuffer.get_state(self)}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        ReplayBuffer.__init__(self, **pickled["knobs"])
        self.set_state(pickled["state"])


_KNOBS = list(inspect.signature(ReplayBuffer).parameters)


def _check_choice(knob: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        names = ", ".join(map(repr, get_args(choices)))
        raise ValueError(f"`{knob}` is {value!r}: use one of {names}.")


def _check_least(knob: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"`{knob}` is {value}: use {least} or more.")
