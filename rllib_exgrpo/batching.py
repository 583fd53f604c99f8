"""Flat rows for the learners: who gets which rows, cut how, padded how.

A row is one completion with its prompt. Rows stay ragged (concatenated tokens and
lengths) until a micro-batch is padded right before the forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from rllib_exgrpo.advantages import group_advantages
from rllib_exgrpo.records import Completion, Group


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """B rows, tokens concatenated over rows.

    Attributes:
        prompt_token_ids: int32, all prompts one after the other.
        token_ids: int32, all completions one after the other.
        behavior_logp: float32, aligned with `token_ids`: what the importance ratio
            compares with.
        engine_logp: float32, aligned too: what the engine reported. The same, unless
            the learner recomputed `behavior_logp`.
        token_weights: float32, aligned too: constant factor of the token in the loss;
            0 leaves it out.
        prompt_lengths_B: int64, tokens of each prompt.
        lengths_B: int64, tokens of each completion.
        advantages_B: float32.
        scored_B: bool, False where the verifier reached no verdict: the row does not
            count in the loss.
        replayed_B: bool, True for replayed completions.
        group_B: int64, number of the row's group, as the caller counts them.
    """

    prompt_token_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    behavior_logp: NDArray[np.float32]
    engine_logp: NDArray[np.float32]
    token_weights: NDArray[np.float32]
    prompt_lengths_B: NDArray[np.int64]
    lengths_B: NDArray[np.int64]
    advantages_B: NDArray[np.float32]
    scored_B: NDArray[np.bool_]
    replayed_B: NDArray[np.bool_]
    group_B: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths_B)

    @property
    def total_lengths_B(self) -> NDArray[np.int64]:
        """(B,) prompt plus completion tokens of each row."""
        return self.prompt_lengths_B + self.lengths_B

    @property
    def counted_lengths_B(self) -> NDArray[np.int64]:
        """(B,) completion tokens of each row that count in the loss."""
        row_of_token = np.repeat(np.arange(len(self)), self.lengths_B)
        counted = self.scored_B[row_of_token] & (self.token_weights > 0)
        return np.bincount(row_of_token[counted], minlength=len(self))

    def take(self, index: NDArray[np.int64]) -> "Rows":
        """Returns the rows at the given positions, in that order."""
        names = [field.name for field in fields(self)]
        return Rows(
            _take_ragged(self.prompt_token_ids, self.prompt_lengths_B, index),
            *(
                _take_ragged(getattr(self, n), self.lengths_B, index)
                for n in names[1:5]
            ),
            *(getattr(self, n)[index] for n in names[5:]),
        )


def _take_ragged(
    values: NDArray, lengths_B: NDArray[np.int64], index: NDArray[np.int64]
) -> NDArray:
    ends = np.cumsum(lengths_B)
    pieces = [values[ends[i] - lengths_B[i] : ends[i]] for i in index]
    return np.concatenate(pieces) if pieces else values[:0]


@dataclass(frozen=True, slots=True, eq=False)
class PaddedRows:
    """A micro-batch of torch tensors, padded on the right.

    Attributes:
        input_ids: (B, L) int64, prompt then completion then padding.
        attention_mask: (B, L) bool, True on prompt and completion.
        prediction_mask: (B, L - 1) bool, True at positions whose next token is a
            completion token; read row by row they give all completion tokens in order.
        token_mask: (B, T) bool, True on completion tokens, in the same order.
        loss_mask: (B, T) bool, True on completion tokens that count in the loss: those
            of scored rows, without the ones of weight 0.
        behavior_logp: (B, T) float32, 0 on padding.
        engine_logp: (B, T) float32, 0 on padding.
        token_weights: (B, T) float32, 0 on padding.
        advantages: (B,) float32.
        scored: (B,) bool.
        replay_mask: (B,) bool.
    """

    input_ids: Tensor
    attention_mask: Tensor
    prediction_mask: Tensor
    token_mask: Tensor
    loss_mask: Tensor
    behavior_logp: Tensor
    engine_logp: Tensor
    token_weights: Tensor
    advantages: Tensor
    scored: Tensor
    replay_mask: Tensor

    def to(self, device: torch.device) -> "PaddedRows":
        """Returns the micro-batch on a device."""
        return PaddedRows(*(getattr(self, f.name).to(device) for f in fields(self)))

    def dense(self, values_N: Tensor) -> Tensor:
        """Lays (N,) values of all completion tokens out as (B, T), 0 on padding."""
        values_BT = values_N.new_zeros(self.token_mask.shape)
        values_BT[self.token_mask] = values_N
        return values_BT


def rows_from_groups(
    groups: Sequence[Group],
    numbers: ArrayLike | None = None,
    *,
    normalize_by_std: bool = False,
) -> Rows:
    """Flattens groups to rows and computes their advantages.

    Args:
        groups: whole groups; within each the replayed completion comes first.
        numbers: of the groups, kept with their rows; None counts from 0.
        normalize_by_std: see `group_advantages`.

    Returns:
        One row a completion, in the order of the groups' members.
    """
    members = [(group, c) for group in groups for c in group.members]
    advantages = [
        group_advantages(group.rewards_G, normalize_by_std=normalize_by_std)
        for group in groups
    ]
    return _rows(
        [group.prompt_token_ids for group, _ in members],
        [completion for _, completion in members],
        np.concatenate(advantages) if advantages else np.zeros(0),
        np.array([completion is group.replayed for group, completion in members], bool),
        np.repeat(
            np.arange(len(groups)) if numbers is None else np.asarray(numbers),
            [len(group.members) for group in groups],
        ),
    )


def rows_from_candidates(
    prompts: Sequence[NDArray[np.int32]], completions: Sequence[Completion]
) -> Rows:
    """Flattens stored completions to rows that are only scored, not trained on.

    Args:
        prompts: the prompt tokens of each completion.
        completions: the completions.
    """
    count = len(completions)
    return _rows(
        prompts, completions, np.zeros(count), np.ones(count, bool), np.arange(count)
    )


def _rows(
    prompts: Sequence[NDArray[np.int32]],
    completions: Sequence[Completion],
    advantages_B: NDArray[np.float64],
    replayed_B: NDArray[np.bool_],
    group_B: NDArray[np.int64],
) -> Rows:
    none = np.zeros(0)
    behavior_logp = np.concatenate([none, *(c.behavior_logp for c in completions)])
    behavior_logp = behavior_logp.astype(np.float32)
    return Rows(
        prompt_token_ids=np.concatenate([none, *prompts]).astype(np.int32),
        token_ids=np.concatenate([none, *(c.token_ids for c in completions)]).astype(
            np.int32
        ),
        behavior_logp=behavior_logp,
        engine_logp=behavior_logp,
        token_weights=np.ones_like(behavior_logp),
        prompt_lengths_B=np.array([len(p) for p in prompts], np.int64),
        lengths_B=np.array([len(c) for c in completions], np.int64),
        advantages_B=advantages_B.astype(np.float32),
        scored_B=np.array([not np.isnan(c.reward) for c in completions], bool),
        replayed_B=replayed_B,
        group_B=group_B.astype(np.int64),
    )


def pad(rows: Rows) -> PaddedRows:
    """Pads rows on the right to one rectangle.

    An empty set of rows becomes one row of two tokens that counts nowhere, so that a
    learner without rows still takes part in the collective calls of the others.
    """
    if len(rows) == 0:
        rows = _PLACEHOLDER
    ends_B = rows.total_lengths_B
    column_L = np.arange(ends_B.max())
    column_T = np.arange(rows.lengths_B.max())
    attention_mask = column_L < ends_B[:, None]
    completion_mask = attention_mask & (column_L >= rows.prompt_lengths_B[:, None])
    token_mask = column_T < rows.lengths_B[:, None]

    input_ids = np.zeros(attention_mask.shape, np.int64)
    input_ids[attention_mask & ~completion_mask] = rows.prompt_token_ids
    input_ids[completion_mask] = rows.token_ids
    ragged = np.zeros((3, *token_mask.shape), np.float32)
    ragged[:, token_mask] = rows.behavior_logp, rows.engine_logp, rows.token_weights
    arrays = (
        input_ids,
        attention_mask,
        completion_mask[:, 1:],
        token_mask,
        token_mask & rows.scored_B[:, None] & (ragged[2] > 0),
        *ragged,
        rows.advantages_B,
        rows.scored_B,
        rows.replayed_B,
    )
    return PaddedRows(*(torch.tensor(array) for array in arrays))


_PLACEHOLDER = Rows(
    prompt_token_ids=np.zeros(1, np.int32),
    token_ids=np.zeros(1, np.int32),
    behavior_logp=np.zeros(1, np.float32),
    engine_logp=np.zeros(1, np.float32),
    token_weights=np.zeros(1, np.float32),
    prompt_lengths_B=np.ones(1, np.int64),
    lengths_B=np.ones(1, np.int64),
    advantages_B=np.zeros(1, np.float32),
    scored_B=np.zeros(1, bool),
    replayed_B=np.zeros(1, bool),
    group_B=np.zeros(1, np.int64),
)


def assign_rows(
    total_lengths_B: NDArray[np.int64], num_learners: int
) -> list[NDArray[np.int64]]:
    """Deals rows to learners so that their numbers of tokens are nearly equal.

    Longest row first, each to the learner with the fewest tokens so far.

    Args:
        total_lengths_B: tokens of each row.
        num_learners: at least 1.

    Returns:
        For each learner the positions of its rows, ascending.
    """
    tokens = np.zeros(num_learners, np.int64)
    shares: list[list[int]] = [[] for _ in range(num_learners)]
    for row in np.argsort(-total_lengths_B, kind="stable"):
        learner = int(tokens.argmin())
        shares[learner].append(int(row))
        tokens[learner] += total_lengths_B[row]
    return [np.array(sorted(share), np.int64) for share in shares]


def cut_micro_batches(
    total_lengths_B: NDArray[np.int64], max_tokens: int | None
) -> list[NDArray[np.int64]]:
    """Cuts rows into micro-batches of similar lengths under a token budget.

    Args:
        total_lengths_B: tokens of each row.
        max_tokens: most tokens of a micro-batch, padding included; a single longer row
            is a micro-batch of its own. None: all rows in one.

    Returns:
        Positions of the rows of each micro-batch.
    """
    cuts = []
    order = np.argsort(-total_lengths_B, kind="stable")
    while len(order):
        longest = max(int(total_lengths_B[order[0]]), 1)
        count = len(order) if max_tokens is None else max(max_tokens // longest, 1)
        cuts.append(order[:count])
        order = order[count:]
    return cuts


def plan_shards(
    total_lengths_B: NDArray[np.int64], num_learners: int, max_tokens: int | None
) -> list[list[NDArray[np.int64]]]:
    """Plans which learner handles which rows in which micro-batch.

    Args:
        total_lengths_B: tokens of each row.
        num_learners: how many learners share the rows.
        max_tokens: token budget of a micro-batch.

    Returns:
        For each learner the row positions of its micro-batches. Where a learner needs
        fewer than another, the rest are empty: all learners must make the same
        collective calls.
    """
    plans = [
        [share[cut] for cut in cut_micro_batches(total_lengths_B[share], max_tokens)]
        for share in assign_rows(total_lengths_B, num_learners)
    ]
    most = max([len(plan) for plan in plans] + [1])
    nothing = np.zeros(0, np.int64)
    return [plan + [nothing] * (most - len(plan)) for plan in plans]


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    """One learner's share of one optimiser update.

    Attributes:
        micro_batches: the rows of this learner, cut by token budget.
        num_completions: completions of the mini-batch with a token that counts, over
            all learners, those included that no learner has to compute.
        num_tokens: completion tokens that count, likewise.
        num_skipped: completions that no learner has to compute.
    """

    micro_batches: list[Rows]
    num_completions: int
    num_tokens: int
    num_skipped: int


def shard_mini_batches(
    mini_batches: Sequence[Rows],
    num_learners: int,
    max_tokens: int | None,
    *,
    skip_zero_advantages: bool = False,
) -> list[list[MiniBatch]]:
    """Prepares all updates of a step for all learners.

    Args:
        mini_batches: the rows of each optimiser update, whole groups.
        num_learners: how many learners share each update.
        max_tokens: token budget of a micro-batch.
        skip_zero_advantages: see `trained_rows`.

    Returns:
        For each learner its share of each update.
    """
    shares: list[list[MiniBatch]] = [[] for _ in range(num_learners)]
    for rows in mini_batches:
        counted_B = rows.counted_lengths_B
        counts = max(int((counted_B > 0).sum()), 1), max(int(counted_B.sum()), 1)
        trained = trained_rows(rows, skip_zero_advantages)
        num_skipped = len(rows) - len(trained)
        lengths_B = rows.total_lengths_B[trained]
        plans = plan_shards(lengths_B, num_learners, max_tokens)
        for share, plan in zip(shares, plans, strict=True):
            micro_batches = [rows.take(trained[index]) for index in plan]
            share.append(MiniBatch(micro_batches, *counts, num_skipped))
    return shares


def trained_rows(rows: Rows, skip_zero_advantages: bool) -> NDArray[np.int64]:
    """Returns the positions of the rows that need a forward and backward pass.

    Args:
        rows: the rows of a mini-batch.
        skip_zero_advantages: leave out rows whose advantage is exactly 0. They have no
            policy gradient; what is lost is their part of the entropy bonus.
    """
    needed_B = rows.counted_lengths_B > 0
    if skip_zero_advantages:
        needed_B &= rows.advantages_B != 0
    return np.flatnonzero(needed_B)
