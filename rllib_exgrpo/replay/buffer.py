"""The replay buffer's rules: what is stored, what is drawn, what retires."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.buckets import bucket_probabilities, draw_bucket_counts
from rllib_exgrpo.records import Completion, Group, PromptId
from rllib_exgrpo.replay.prompt_table import Members, PromptTable
from rllib_exgrpo.replay.store import NONE, CompletionStore, Spill

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
        candidates: the stored completions to choose from, oldest first.
        completion_ids: (len(candidates),) int64, the buffer's own ids for them.
        weights_version: current weights at the time of the draw.
    """

    prompt_id: PromptId
    bucket: int
    probability: float
    candidates: list[Completion]
    completion_ids: NDArray[np.int64]
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
        spill: see `CompletionStore`.

    Raises:
        ValueError: if a knob is out of range.
    """

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
        spill: Spill | None = None,
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
        self._spill = spill
        self.seed = seed
        self._rng = np.random.default_rng(seed)
        self._clear()

    def _clear(self) -> None:
        self.prompts = PromptTable(self.group_size + 1)
        self.store = CompletionStore(spill=self._spill)
        self.sources: dict[str, int] = {}
        self._revision = 0  # how often something changed
        self._next_id = 0
        self._iteration = 0
        self._newest_version = 0

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
        """Returns the stored completions of a prompt, oldest first."""
        row = self.prompts.row(prompt_id)
        rows = [] if row is None else self._rows_of(row)
        return [self.store.completion(r) for r in rows]

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
        draws = [
            self._draw_of(row, k, float(chance_each[k - 1]), weights_version)
            for k in range(1, self.group_size)
            for row in self._members_at_random(k, int(counts[k - 1]))
        ]
        return [draws[i] for i in self._rng.permutation(len(draws))]

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
            picks = [self._pick_scored(d, np.asarray(s)) for d, s in pairs]
        self._revision += 1
        for draw, pick in zip(draws, picks, strict=True):
            self._count_replay(draw, pick)
        return [d.candidates[pick] for d, pick in zip(draws, picks, strict=True)]

    def _members_at_random(self, bucket: int, count: int) -> list[int]:
        members = self.prompts.members[bucket]
        if count == 0:
            return []
        places = self._rng.choice(len(members), count, replace=False)
        return [members[place] for place in places]

    def _draw_of(self, row: int, bucket: int, chance: float, version: int) -> Draw:
        rows = self._rows_of(row)
        if self.max_candidates is not None:
            rows = rows[-self.max_candidates :]
        return Draw(
            prompt_id=self.prompts.id(row),
            bucket=bucket,
            probability=chance,
            candidates=[self.store.completion(r) for r in rows],
            completion_ids=self.store.table["id"][rows],
            weights_version=version,
        )

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
        self._keep_scores(draw, scores)
        lowest = self.completion_selection.startswith("lowest")
        return int(scores.argmin() if lowest else scores.argmax())

    def _keep_scores(self, draw: Draw, scores: NDArray) -> None:
        columns = self.store.table.columns
        kept = columns[self.needs_scores or ""]
        rows = self._rows_of_ids(draw)
        for number, score in zip(draw.completion_ids.tolist(), scores, strict=True):
            if number in rows:
                kept[rows[number]] = score
                columns["scored_version"][rows[number]] = draw.weights_version
                columns["changed"][rows[number]] = True

    def _count_replay(self, draw: Draw, pick: int) -> None:
        row = self._rows_of_ids(draw).get(int(draw.completion_ids[pick]))
        if row is not None:
            self.store.table["times_replayed"][row] += 1
            self.store.table["changed"][row] = True

    def _rows_of_ids(self, draw: Draw) -> dict[int, int]:
        """Returns completion id -> row, for what is still stored of a draw."""
        row = self.prompts.row(draw.prompt_id)
        rows = [] if row is None else self._rows_of(row)
        return dict(zip(self.store.table["id"][rows].tolist(), rows, strict=True))

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
        for completion in self._rows_of(row):
            self.store.discard(completion)
        self.prompts.table["newest"][row] = NONE
        self.prompts.table["count"][row] = 0
        self._touch(row, self.group_size, iteration)

    def _store_successes(
        self, group: Group, row: int | None, k: int, iteration: int
    ) -> None:
        fresh = [c for c in group.completions if self._is_correct(c) and len(c)]
        if row is None:
            if not fresh:
                return
            row = self._add_prompt(group, k, iteration)
        columns = self.prompts.table.columns
        rows = self._rows_of(row)
        for completion in fresh:
            if not self.store.holds(rows, completion.token_ids):
                older = rows[-1] if rows else NONE
                rows.append(self.store.add(self._next_id, row, older, completion))
                self._next_id += 1
                self._newest_version = max(
                    self._newest_version, completion.weights_version
                )
        columns["newest"][row] = rows[-1]
        columns["count"][row] = len(rows)
        self._evict_over_cap(row, rows)
        self._touch(row, k, iteration)

    def _add_prompt(self, group: Group, bucket: int, iteration: int) -> int:
        source = self.sources.setdefault(group.source, len(self.sources))
        values = (NONE, 0, iteration, source, False, True)
        return self.prompts.add(group.prompt_id, bucket, values)

    def _touch(self, row: int, bucket: int | None, iteration: int) -> None:
        if bucket is not None:
            self.prompts.move(row, bucket)
        self.prompts.table["iteration"][row] = iteration
        self.prompts.table["changed"][row] = True

    def _evict_over_cap(self, prompt: int, rows: list[int]) -> None:
        if self.max_completions_per_prompt is not None:
            for row in rows[: -self.max_completions_per_prompt]:
                self._discard(prompt, row)

    def _evict_before(self, version: int) -> None:
        for row in self.store.older_than(version):
            prompt = int(self.store.table["prompt"][row])
            self._discard(prompt, row)
            if self.prompts.table["count"][prompt] == 0:
                self.prompts.remove(prompt)
        self.store.compact()

    def _discard(self, prompt: int, row: int) -> None:
        """Takes one completion out of its prompt's chain and forgets it."""
        older = self.store.table["older"]
        newest = self.prompts.table["newest"]
        if newest[prompt] == row:
            newest[prompt] = older[row]
        else:
            rows = self._rows_of(prompt)
            older[rows[rows.index(row) + 1]] = older[row]
        self.prompts.table["count"][prompt] -= 1
        self.store.discard(row)

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
        links = self.store.set_state(state["completions"], len(state["prompts"]["ids"]))
        self.prompts.table["newest"][:] = links[:, 0]
        self.prompts.table["count"][:] = links[:, 1]


_KNOBS = [
    name
    for name in inspect.signature(ReplayBuffer.__init__).parameters
    if name not in ("self", "spill")
]


def _check_choice(knob: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        names = ", ".join(map(repr, get_args(choices)))
        raise ValueError(f"`{knob}` is {value!r}: use one of {names}.")


def _check_least(knob: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"`{knob}` is {value}: use {least} or more.")
