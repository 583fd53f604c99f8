import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllib_exgrpo.batching import (
    assign_rows,
    cut_micro_batches,
    pad,
    plan_shards,
    rows_from_groups,
    shard_mini_batches,
)
from rllib_exgrpo.records import Completion, Group

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60).map(np.array)


def completion(tokens, reward, logp=-0.5):
    return Completion(
        token_ids=np.array(tokens, np.int32),
        behavior_logp=np.full(len(tokens), logp, np.float32),
        reward=reward,
        weights_version=1,
    )


@pytest.fixture
def groups():
    return [
        Group(
            prompt_id="a",
            prompt_token_ids=np.array([1, 2], np.int32),
            completions=[completion([3, 4, 5], 0.0), completion([6], 1.0)],
            replayed=completion([7, 8], 1.0, logp=-2.0),
        ),
        Group(
            prompt_id="b",
            prompt_token_ids=np.array([9], np.int32),
            completions=[completion([3], 1.0), completion([4, 4], np.nan)],
        ),
    ]


def test_rows_keep_tokens_and_mark_the_replayed(groups):
    rows = rows_from_groups(groups)
    assert rows.replayed_B.tolist() == [True, False, False, False, False]
    assert rows.scored_B.tolist() == [True, True, True, True, False]
    # Group a has rewards 1 (replayed), 0, 1: mean 2/3. Group b one scored member: 0.
    assert rows.advantages_B.tolist() == pytest.approx([1 / 3, -2 / 3, 1 / 3, 0, 0])
    assert rows.token_ids.tolist() == [7, 8, 3, 4, 5, 6, 3, 4, 4]
    assert rows.prompt_token_ids.tolist() == [1, 2, 1, 2, 1, 2, 9, 9]


def test_take_picks_rows_in_the_given_order(groups):
    rows = rows_from_groups(groups).take(np.array([3, 0]))
    assert rows.token_ids.tolist() == [3, 7, 8]
    assert rows.behavior_logp.tolist() == [-0.5, -2.0, -2.0]
    assert rows.prompt_token_ids.tolist() == [9, 1, 2]


def test_padding_masks_prompt_completion_and_rest(groups):
    padded = pad(rows_from_groups(groups).take(np.array([1, 4])))
    assert padded.input_ids.tolist() == [[1, 2, 3, 4, 5], [9, 4, 4, 0, 0]]
    assert padded.attention_mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    # The last prompt token predicts the first completion token.
    assert padded.prediction_mask.int().tolist() == [[0, 1, 1, 1], [1, 1, 0, 0]]
    assert padded.token_mask.int().tolist() == [[1, 1, 1], [1, 1, 0]]
    assert padded.loss_mask.int().tolist() == [[1, 1, 1], [0, 0, 0]]  # no verdict
    dense = padded.dense(torch.arange(1.0, 6.0))
    assert dense.tolist() == [[1, 2, 3], [4, 5, 0]]


def test_no_rows_become_a_row_that_counts_nowhere(groups):
    padded = pad(rows_from_groups(groups).take(np.zeros(0, np.int64)))
    assert padded.input_ids.shape == (1, 2)
    assert not padded.loss_mask.any()
    assert padded.prediction_mask.sum() == 1


@given(LENGTHS, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 2000)))
def test_every_row_is_handled_once_and_learners_keep_step(lengths, learners, budget):
    plans = plan_shards(lengths, learners, budget)
    assert len(plans) == learners
    assert len({len(plan) for plan in plans}) == 1
    rows = np.concatenate([cut for plan in plans for cut in plan])
    assert sorted(rows) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 2000))
def test_micro_batches_keep_the_token_budget(lengths, budget):
    for cut in cut_micro_batches(lengths, budget):
        assert len(cut) == 1 or len(cut) * lengths[cut].max() <= budget


def tokens_by_learner(lengths, learners):
    return [lengths[share].sum() for share in assign_rows(lengths, learners)]


@given(st.integers(0, 10_000), st.integers(2, 8), st.integers(16, 64))
def test_shares_of_ragged_rows_are_balanced_by_tokens(seed, learners, rows_a_learner):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 501, learners * rows_a_learner)
    tokens = tokens_by_learner(lengths, learners)
    assert max(tokens) <= 1.05 * np.mean(tokens)


@given(LENGTHS, st.integers(1, 8))
def test_no_share_exceeds_the_mean_by_more_than_one_row(lengths, learners):
    tokens = tokens_by_learner(lengths, learners)
    assert max(tokens) <= np.mean(tokens) + lengths.max() * (1 - 1 / learners) + 1e-9


def test_denominators_hold_over_all_learners(groups):
    shares = shard_mini_batches([rows_from_groups(groups)], 2, None)
    assert len(shares) == 2
    for share in shares:
        (mini_batch,) = share
        assert mini_batch.num_completions == 4  # one of five has no verdict
        assert mini_batch.num_tokens == 7  # 2 + 3 + 1 + 1


def test_rows_that_cannot_move_the_weights_are_left_out_but_counted(groups):
    def trained(**kwargs):
        ((share,),) = shard_mini_batches([rows_from_groups(groups)], 1, None, **kwargs)
        (rows,) = share.micro_batches
        assert (share.num_completions, share.num_tokens) == (4, 7)
        return share.num_skipped, rows.total_lengths_B.tolist()

    # Group b has one scored member, so advantage 0, and one without a verdict.
    assert trained() == (1, [5, 4, 3, 2])
    assert trained(skip_zero_advantages=True) == (2, [5, 4, 3])


def test_a_mini_batch_that_teaches_nothing_keeps_the_learners_in_step(groups):
    shares = shard_mini_batches(
        [rows_from_groups(groups[1:])], 3, 10, skip_zero_advantages=True
    )
    assert [[len(m) for m in share[0].micro_batches] for share in shares] == [[0]] * 3
