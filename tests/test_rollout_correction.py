import numpy as np
import pytest
import torch

from rllib_exgrpo.batching import pad, rows_from_groups, shard_mini_batches
from rllib_exgrpo.records import Completion, Group
from rllib_exgrpo.rollout_correction import RolloutCorrection, rebase

LOG_RATIO = np.log(np.array([0.5, 3.0, 1.0, 4.0], np.float32))
LENGTHS = np.array([2, 2])


def weights(**knobs):
    return RolloutCorrection(**knobs).weights(LOG_RATIO, LENGTHS).tolist()


def test_by_default_all_tokens_weigh_one():
    assert weights() == [1, 1, 1, 1]


def test_truncated_importance_sampling():
    assert weights(cap=2.0) == pytest.approx([0.5, 2, 1, 2])
    # Whole completions: 0.5 * 3 = 1.5 and 1 * 4 = 4.
    assert weights(cap=2.0, level="sequence") == pytest.approx([1.5, 1.5, 2, 2])


def test_outliers_are_left_out():
    assert weights(keep_range=(0.6, 2.0)) == [0, 0, 1, 0]
    assert weights(keep_range=(0.6, 2.0), level="sequence") == [1, 1, 0, 0]
    # Both: what is kept is capped.
    assert weights(keep_range=(0.1, 3.5), cap=2.0) == pytest.approx([0.5, 2, 1, 0])


def test_ratios_of_long_completions_do_not_overflow():
    correction = RolloutCorrection(level="sequence", keep_range=(0.5, 2.0))
    lengths = np.array([8000])
    assert not correction.weights(np.full(8000, 0.5, np.float32), lengths).any()
    assert not correction.weights(np.full(8000, -0.5, np.float32), lengths).any()


@pytest.fixture
def rows():
    def completion(length, reward):
        logp = np.full(length, -1, np.float32)
        return Completion(np.ones(length, np.int32), logp, reward, 0)

    fresh = [completion(2, 0.0), completion(2, 1.0)]
    return rows_from_groups(
        [Group("a", np.ones(1, np.int32), fresh, replayed=completion(3, 1.0))]
    )


def test_replayed_rows_keep_their_stored_log_probs(rows):
    learner_logp = (-1 + LOG_RATIO).astype(np.float32)
    correction = RolloutCorrection(cap=2.0, keep_range=(0.6, 9.0))
    result = rebase(rows, np.array([1, 2]), learner_logp, correction)
    assert result.behavior_logp.tolist() == pytest.approx([-1] * 3 + [*learner_logp])
    assert result.engine_logp.tolist() == [-1] * 7
    assert result.token_weights.tolist() == pytest.approx([1, 1, 1, 0, 2, 1, 2])
    assert rows.token_weights.tolist() == [1] * 7  # the rows given are left alone


def test_tokens_left_out_leave_the_denominators_too(rows):
    learner_logp = (-1 + LOG_RATIO).astype(np.float32)
    correction = RolloutCorrection(level="sequence", keep_range=(0.6, 2.0))
    result = rebase(rows, np.array([1, 2]), learner_logp, correction)
    # Of the fresh rows with c = 1.5 and 4 the second is left out.
    ((share,),) = shard_mini_batches([result], 1, None)
    assert (share.num_completions, share.num_tokens, share.num_skipped) == (2, 5, 1)
    padded = pad(share.micro_batches[0])
    assert torch.equal(padded.loss_mask, padded.token_mask)
