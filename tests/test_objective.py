"""The objective on micro-batches: denominators, masks, stored log-probs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rllib_exgrpo.batching import pad, rows_from_groups, shard_mini_batches
from rllib_exgrpo.objective import Objective, accumulate_gradients, score_tokens
from rllib_exgrpo.policy import LanguagePolicy, TokenScores
from rllib_exgrpo.records import Completion, Group
from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.files import ReplayFiles
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.rollout_metrics import rollout_metrics
from rllib_exgrpo.training_engine import TorchEngine, UpdateRules

CPU = torch.device("cpu")


def completion(length, reward, seed=0):
    ids = np.random.default_rng(seed).integers(2, 20, length).astype(np.int32)
    return Completion(
        ids, np.zeros(length, np.float32), reward, 0, truncated=length > 4
    )


def group(rewards_and_lengths, prompt_id="a"):
    members = [
        completion(length, reward, seed)
        for seed, (reward, length) in enumerate(rewards_and_lengths)
    ]
    return Group(prompt_id, np.array([3, 4], np.int32), members)


def objective(aggregation="completion_mean", entropy_coeff=0.0):
    return Objective(
        clip_eps=None,
        shaping_beta=0.1,
        replay_importance_ratio=True,
        entropy_coeff=entropy_coeff,
        aggregation=aggregation,
        max_completion_tokens=10,
    )


def loss_at_ratio_one(rows, aggregation):
    """Loss of rows whose current log-probs are those that sampled them."""
    ((mini_batch,),) = shard_mini_batches([rows], 1, None)
    padded = pad(mini_batch.micro_batches[0])
    scores = TokenScores(padded.behavior_logp, torch.zeros_like(padded.behavior_logp))
    return objective(aggregation).loss(padded, scores, mini_batch)[0].item()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Rows of 4 and 2 tokens with advantages 1 and -2, so terms -4 and 4, over 10
        ("completion_mean", (-4 + 4) / 10 / 2),
        ("completion_sum", (-4 + 4) / 10),
        ("token_mean", (-4 + 4) / 6),
        ("sequence_mean", (-4 / 4 + 4 / 2) / 2),
    ],
)
def test_aggregations(aggregation, expected):
    rows = rows_from_groups([group([(1, 4), (0, 2)])])
    rows = replace(rows, advantages_B=np.array([1, -2], np.float32))
    assert loss_at_ratio_one(rows, aggregation) == pytest.approx(expected)


def test_numerator_and_denominator_count_the_same_tokens():
    # Bug report 15: rows of 4 and 8 tokens, the second one left out, a loss of 1 a
    # token: the mean is 1, not 4 / 12. Lengths are still logged over both.
    groups = [group([(0, 4), (1, 8)])]
    rows = rows_from_groups(groups)
    rows = replace(rows, advantages_B=np.array([-1, -1], np.float32))
    unscored = replace(rows, scored_B=np.array([True, False]))
    weights = np.array([1] * 4 + [0] * 8, np.float32)
    left_out = replace(rows, token_weights=weights)
    for masked in (unscored, left_out):
        assert loss_at_ratio_one(masked, "token_mean") == pytest.approx(1.0)
        assert loss_at_ratio_one(masked, "sequence_mean") == pytest.approx(1.0)
        assert loss_at_ratio_one(masked, "completion_sum") == pytest.approx(0.4)
        assert loss_at_ratio_one(masked, "completion_mean") == pytest.approx(0.4)
    metrics = rollout_metrics(groups, [], success_threshold=1.0)
    assert metrics["completion_length_mean"] == 6
    assert metrics["completion_length_max"] == 8
    assert metrics["truncated_fraction"] == 0.5


def gradients(rows, skip, entropy_coeff):
    policy = LanguagePolicy.from_pretrained("tiny-arithmetic")
    engine = TorchEngine(policy, lr=0.0, rules=UpdateRules())
    ((mini_batch,),) = shard_mini_batches([rows], 1, 64, skip_zero_advantages=skip)
    goal = objective(entropy_coeff=entropy_coeff)
    accumulate_gradients(
        engine, mini_batch, lambda r, s: goal.loss(r, s, mini_batch)[0], CPU
    )
    return mini_batch, [p.grad for p in policy.parameters()]


@pytest.fixture
def half_idle_rows():
    """One group that teaches, one that does not, one row without a verdict."""
    return rows_from_groups(
        [group([(1, 4), (0, 7), (np.nan, 3)]), group([(1, 5), (1, 6), (1, 2)], "b")]
    )


def test_skipping_zero_advantages_is_exact_without_an_entropy_bonus(half_idle_rows):
    all_rows, expected = gradients(half_idle_rows, skip=False, entropy_coeff=0.0)
    fewer, actual = gradients(half_idle_rows, skip=True, entropy_coeff=0.0)
    assert (all_rows.num_skipped, fewer.num_skipped) == (1, 4)  # the unscored one only
    assert sum(map(len, fewer.micro_batches)) == 2
    assert fewer.num_completions == all_rows.num_completions == 5
    for own, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-8)


def test_with_a_bonus_skipping_drops_the_entropy_of_the_skipped_alone(half_idle_rows):
    _, expected = gradients(half_idle_rows, skip=False, entropy_coeff=0.1)
    _, actual = gradients(half_idle_rows, skip=True, entropy_coeff=0.1)
    idle = half_idle_rows.take(np.array([3, 4, 5]))
    _, bonus = gradients(idle, skip=False, entropy_coeff=0.1)
    # 24 tokens count of all, 13 of the idle group: the bonus weighs 13 / 24.
    for own, other, part in zip(actual, expected, bonus, strict=True):
        torch.testing.assert_close(own + part * 13 / 24, other, rtol=1e-4, atol=1e-7)


def test_a_step_without_anything_to_learn_still_makes_its_passes():
    rows = rows_from_groups([group([(1, 4), (1, 7)])])
    mini_batch, grads = gradients(rows, skip=True, entropy_coeff=0.0)
    assert [len(m) for m in mini_batch.micro_batches] == [0]
    assert all((grad == 0).all() for grad in grads)


def test_replayed_tokens_are_weighed_by_their_stored_log_probs(tmp_path):
    # Bug report 22: the ratio is exp(current - stored), not 1, and storing, saving and
    # loading leave the stored log-probs as they were.
    policy = LanguagePolicy.from_pretrained("tiny-arithmetic")
    engine = TorchEngine(policy, lr=0.0, rules=UpdateRules())

    def current_logp(rows):
        with torch.no_grad():
            return score_tokens(engine, pad(rows)).logp[0].numpy()

    one = completion(4, 1.0)
    prompt = np.array([3, 4], np.int32)
    sampled = current_logp(rows_from_groups([Group("a", prompt, [one])]))
    one = replace(one, behavior_logp=sampled)
    buffer = ReplayBuffer(group_size=2, seed=0)
    buffer.record([Group("a", prompt, [one, completion(3, 0.0)])], 0)
    ReplayFiles().save(buffer, Folder.at(str(tmp_path)))
    loaded = ReplayBuffer(group_size=2, seed=0)
    ReplayFiles().load(loaded, Folder.at(str(tmp_path)))

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    (draw,) = loaded.draw(1, 1)
    (choice,) = loaded.choose([draw], [np.zeros(1)])
    stored = choice.completion
    np.testing.assert_array_equal(stored.behavior_logp, sampled)

    rows = rows_from_groups([Group("a", prompt, [completion(3, 0.0)], replayed=stored)])
    expected = np.exp(current_logp(rows.take(np.array([0]))) - sampled).mean()
    ((mini_batch,),) = shard_mini_batches([rows], 1, None)
    padded = pad(mini_batch.micro_batches[0])
    _, totals = objective().loss(padded, score_tokens(engine, padded), mini_batch)
    ratio = totals.sums["replayed/ratio"] / totals.sums["replayed/tokens"]
    assert ratio == pytest.approx(expected, rel=1e-5)
    assert abs(ratio - 1) > 1e-3
