"""The replay buffer's rules: what is stored and what retires."""

from collections.abc import Sequence

import numpy as np

from rllib_exgrpo.buckets import spread_buckets
from rllib_exgrpo.records import Completion, Group
from rllib_exgrpo.replay.drawing import Drawing
from rllib_exgrpo.replay.store import NONE


class ReplayBuffer(Drawing):
    """Past successes, kept by prompt, and prompts kept by pass rate (section 3.2).

    A group with k correct of G completions puts its prompt in bucket k. Buckets 1 to
    G-1 are drawn from, with weights Normal(k / G; mu, sigma); bucket 0 is kept but not
    drawn; k = G retires the prompt: its completions go, its id stays known, and later
    groups of it are ignored until it is put back by `recheck_share`. A prompt without
    a stored completion is not in the buffer. Completions of a prompt differ in their
    token ids; of two equal ones the first is kept.

    With `bucket_by` "reward_spread", for rewards that are not just 0 or 1 (section
    5.3), a group with a correct completion puts its prompt in the bucket of its reward
    spread among the groups recorded with it, see `spread_buckets`. All else stays:
    correct completions, those whose reward is at least `success_threshold`, are stored;
    a prompt without any in its latest group is in bucket 0; one with correct ones only
    retires.

    Its arguments are those of `ReplayKnobs`; its contents are in `ReplayContents`; it
    draws as in `Drawing`.
    """

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
        self._changed()
        correct = [sum(map(self._is_correct, group.members)) for group in groups]
        buckets = self._buckets_of(groups, correct)
        for group, k, bucket in zip(groups, correct, buckets, strict=True):
            self._record_group(group, k, bucket, iteration)
        self.store.discard(self._evicted)
        self._evicted = []
        self.store.compact()
        self._recheck_until(iteration)

    def _buckets_of(
        self, groups: Sequence[Group], correct: Sequence[int]
    ) -> Sequence[int]:
        """Returns the buckets of groups with so many correct completions, not all."""
        if self.bucket_by == "successes":
            return correct
        spreads = [np.nan_to_num(group.rewards_G).std() for group in groups]
        return spread_buckets(spreads, self.group_size).tolist()

    def _record_group(self, group: Group, k: int, bucket: int, iteration: int) -> None:
        row = self.prompts.row(group.prompt_id)
        if row is not None and self.is_retired(group.prompt_id):
            return
        if k == self.group_size:
            self._retire(group, row, iteration)
        elif k > 0:
            self._store_successes(group, row, bucket, iteration)
        elif row is not None:
            self._touch(row, 0 if self.mark_failed else None, iteration)

    def _retire(self, group: Group, row: int | None, iteration: int) -> None:
        if row is None:
            self._add_prompt(group, self.group_size, iteration)
            return
        self._keep(row, self._rows_of(row), 0)
        self._touch(row, self.group_size, iteration)

    def _store_successes(
        self, group: Group, row: int | None, bucket: int, iteration: int
    ) -> None:
        fresh = [c for c in group.completions if self._is_correct(c) and len(c)]
        if row is None:
            if not fresh:
                return
            row = self._add_prompt(group, bucket, iteration)
        for completion in fresh:
            self._saw_version(completion.weights_version)
        rows, counts = self._rows_of(row), self._counts
        counts["next_id"] = self.store.extend(rows, row, fresh, counts["next_id"])
        self._keep(row, rows, self.max_completions_per_prompt)
        self._touch(row, bucket, iteration)

    def _add_prompt(self, group: Group, bucket: int, iteration: int) -> int:
        source = self.sources.setdefault(group.source, len(self.sources))
        values = (NONE, iteration, source, 0, False, True)
        return self.prompts.add(group.prompt_id, bucket, values)

    def _touch(self, row: int, bucket: int | None, iteration: int) -> None:
        if bucket is not None:
            self.prompts.move(row, bucket)
        self.prompts.table["iteration"][row] = iteration
        self.prompts.table["changed"][row] = True

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
        every, last = self.recheck_every, self._counts["iteration"]
        self._counts["iteration"] = max(last, int(iteration))
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
