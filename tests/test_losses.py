import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_exgrpo.losses import (
    MAX_LOG_RATIO,
    entropy_loss,
    mixed_policy_loss,
    shape_ratio,
)


def loss_of(
    log_ratios,
    advantages,
    *,
    replayed=None,
    mask=None,
    clip_eps=0.2,
    shaping_beta=0.1,
    denominator=1.0,
):
    """Loss of rows given by their log-ratios, with behavior log-probs of 0."""
    current = torch.tensor(log_ratios, dtype=torch.float32, requires_grad=True)
    mask = torch.ones_like(current) if mask is None else torch.tensor(mask)
    output = mixed_policy_loss(
        current,
        torch.zeros_like(current),
        torch.tensor(advantages, dtype=torch.float32),
        mask.bool(),
        torch.tensor(replayed or [False] * len(current)),
        clip_eps=clip_eps,
        shaping_beta=shaping_beta,
        denominator=denominator,
    )
    output.loss.backward()
    return output, current.grad


def test_fresh_tokens_follow_the_clipped_objective():
    # A = 2: w = 1.5 is clipped to 1.2 -> -2.4, gradient 0; w = 0.5 stays -> -1.0,
    # gradient -A w = -1.0. Sum -3.4, over the denominator 4: -0.85.
    output, grad = loss_of([[math.log(1.5), math.log(0.5)]], [2.0], denominator=4.0)
    assert output.loss.item() == pytest.approx(-0.85)
    assert grad[0].tolist() == pytest.approx([0.0, -0.25])
    assert output.clipped.tolist() == [[True, False]]


def test_negative_advantage_clips_only_small_ratios():
    # A = -1: w = 0.5 -> max(0.5, 0.8) = 0.8, gradient 0; w = 1.5 -> max(1.5, 1.2) =
    # 1.5, gradient 1.5.
    output, grad = loss_of([[math.log(0.5), math.log(1.5)]], [-1.0])
    assert output.loss.item() == pytest.approx(2.3)
    assert grad[0].tolist() == pytest.approx([0.0, 1.5])


def test_upper_clip_range_may_differ():
    # A = 1, w = 1.25: inside [0.8, 1.3] -> -1.25; with eps_high 0.2 it would be -1.2.
    output, _ = loss_of([[math.log(1.25)]], [1.0], clip_eps=(0.2, 0.3))
    assert output.loss.item() == pytest.approx(-1.25)


def test_without_clipping_the_ratio_is_bare():
    output, grad = loss_of([[math.log(3.0)]], [1.0], clip_eps=None)
    assert output.loss.item() == pytest.approx(-3.0)
    assert grad.item() == pytest.approx(-3.0)


@pytest.mark.parametrize(
    ("ratio", "slope"),
    # w f'(w) = beta w / (w + beta)^2, from the table of the derivation: largest at
    # w = beta, where it is a quarter.
    [(0.01, 0.0826), (0.1, 0.25), (0.3, 0.1875), (1.0, 0.0826), (10.0, 0.0098)],
)
def test_replayed_tokens_are_shaped(ratio, slope):
    output, grad = loss_of([[math.log(ratio)]], [2.0], replayed=[True])
    assert output.loss.item() == pytest.approx(-2 * ratio / (ratio + 0.1), rel=1e-5)
    assert grad.item() == pytest.approx(-2 * slope, abs=2e-4)
    assert not output.clipped.any()


def test_replayed_tokens_without_shaping_weigh_by_the_ratio():
    output, _ = loss_of([[math.log(3.0)]], [1.0], replayed=[True], shaping_beta=None)
    assert output.loss.item() == pytest.approx(-3.0)


def test_masked_tokens_have_no_part():
    output, grad = loss_of([[0.0, 5.0]], [1.0], mask=[[True, False]])
    assert output.loss.item() == pytest.approx(-1.0)
    assert grad[0, 1].item() == 0.0


def test_extreme_ratio_of_a_stale_token_does_not_poison_the_row():
    # Bug report 14: exp(89) overflows, and 0 * inf in backward gives NaN.
    current = torch.tensor([[-0.1, -2.0, 0.0]], requires_grad=True)
    behavior = torch.tensor([[-0.1, -91.0, -200.0]])
    mask = torch.tensor([[True, True, False]])
    for advantage in (1.0, -1.0):
        current.grad = None
        output = mixed_policy_loss(
            current,
            behavior,
            torch.tensor([advantage]),
            mask,
            torch.tensor([False]),
            clip_eps=0.2,
            shaping_beta=0.1,
            denominator=1.0,
        )
        output.loss.backward()
        assert torch.isfinite(output.loss)
        assert torch.isfinite(current.grad).all()
        assert current.grad[0, 2].item() == 0.0
        assert output.clipped.tolist() == [[False, True, False]]


@given(
    log_ratio=st.floats(-200, 200),
    advantage=st.floats(-8, 8),
    replayed=st.booleans(),
    clip_eps=st.sampled_from([None, 0.2]),
    shaping_beta=st.sampled_from([None, 0.1]),
)
@settings(deadline=None, max_examples=200)
def test_finite_inputs_give_finite_loss_and_gradient(
    log_ratio, advantage, replayed, clip_eps, shaping_beta
):
    output, grad = loss_of(
        [[log_ratio, 0.0]],
        [advantage],
        replayed=[replayed],
        clip_eps=clip_eps,
        shaping_beta=shaping_beta,
    )
    assert torch.isfinite(output.loss)
    assert torch.isfinite(grad).all()


def test_a_two_dimensional_replay_mask_means_the_same():
    current = torch.tensor([[0.3, -0.2], [0.1, 0.4]])
    arguments = {
        "clip_eps": None,
        "shaping_beta": 0.1,
        "denominator": 3.0,
    }
    rows = torch.tensor([True, False])
    ones = torch.ones(2, 2, dtype=torch.bool)
    shared = (current, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), ones)
    by_row = mixed_policy_loss(*shared, rows, **arguments)
    by_token = mixed_policy_loss(*shared, rows[:, None].expand(2, 2), **arguments)
    assert by_row.loss.item() == by_token.loss.item()


@given(st.integers(1, 7), st.integers(0, 10_000))
@settings(deadline=None, max_examples=50)
def test_the_loss_does_not_depend_on_how_rows_are_cut(cut, seed):
    generator = torch.Generator().manual_seed(seed)
    current = torch.randn(8, 5, generator=generator).double()
    behavior = torch.randn(8, 5, generator=generator).double()
    advantages = torch.randn(8, generator=generator).double()
    mask = torch.rand(8, 5, generator=generator) > 0.3
    replayed = torch.rand(8, generator=generator) > 0.5

    def loss(part):
        return mixed_policy_loss(
            current[part],
            behavior[part],
            advantages[part],
            mask[part],
            replayed[part],
            clip_eps=0.2,
            shaping_beta=0.1,
            denominator=40.0,
        ).loss.item()

    pieces = loss(slice(0, cut)) + loss(slice(cut, 8))
    assert pieces == pytest.approx(loss(slice(None)), abs=1e-12)


def test_shaping_is_bounded_and_exact():
    log_ratio = torch.tensor([-300.0, 0.0, 300.0], dtype=torch.float64)
    # f(1) = 1 / 1.1
    assert shape_ratio(log_ratio, 0.1).tolist() == pytest.approx([0.0, 1 / 1.1, 1.0])


def test_entropy_loss_is_minus_the_mean_over_counted_tokens():
    entropy = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    mask = torch.tensor([[True, True], [True, False]])
    # -(1 + 2 + 4) / 3
    assert entropy_loss(entropy, mask, denominator=3).item() == pytest.approx(-7 / 3)


def test_ratio_bound_leaves_useful_ratios_alone():
    output, _ = loss_of([[MAX_LOG_RATIO - 1e-3]], [1.0], clip_eps=None)
    assert not output.clipped.any()


def test_token_weights_scale_fresh_tokens_alone():
    # A = 1, w = 1: fresh -1 * 0.5 - 1 * 2, replayed -2 / 1.1.
    output = mixed_policy_loss(
        torch.zeros(2, 2),
        torch.zeros(2, 2),
        torch.ones(2),
        torch.ones(2, 2, dtype=torch.bool),
        torch.tensor([False, True]),
        clip_eps=0.2,
        shaping_beta=0.1,
        denominator=1.0,
        token_weights=torch.tensor([[0.5, 2.0], [9.0, 9.0]]),
    )
    assert output.loss.item() == pytest.approx(-2.5 - 2 / 1.1)
    assert output.weight[0].tolist() == [0.5, 2.0]
    assert output.ratio.tolist() == [[1, 1], [1, 1]]


def test_each_row_may_have_a_denominator_of_its_own():
    output = mixed_policy_loss(
        torch.zeros(2, 2),
        torch.zeros(2, 2),
        torch.ones(2),
        torch.ones(2, 2, dtype=torch.bool),
        torch.tensor([False, False]),
        clip_eps=None,
        shaping_beta=None,
        denominator=torch.tensor([2.0, 4.0]),
    )
    assert output.loss.item() == pytest.approx(-2 / 2 - 2 / 4)
