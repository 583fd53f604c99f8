import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_exgrpo.token_scorer import TokenScorer

TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def plain_scores(head, hidden, targets, temperature):
    """All logits at once, gradients by autograd."""
    log_probs = (head(hidden).float() / temperature).log_softmax(-1)
    logp = log_probs.gather(1, targets[:, None])[:, 0]
    return logp, -(log_probs.exp() * log_probs).sum(-1)


@given(
    num_tokens=st.integers(1, 20),
    tokens_per_chunk=st.integers(1, 25),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40)
def test_values_and_gradients_are_the_plain_ones(
    num_tokens, tokens_per_chunk, temperature, has_bias, seed
):
    torch.manual_seed(seed)
    head = torch.nn.Linear(8, 37, bias=has_bias)
    hidden = torch.randn(num_tokens, 8, requires_grad=True)
    targets = torch.randint(37, (num_tokens,))
    scorer = TokenScorer(
        head, temperature=temperature, logits_per_chunk=37 * tokens_per_chunk
    )
    by_logp, by_entropy = torch.randn(2, num_tokens)

    def values_and_gradients(logp, entropy):
        loss = (by_logp * logp + by_entropy * entropy).sum()
        gradients = torch.autograd.grad(loss, [hidden, *head.parameters()])
        return [logp, entropy, *gradients]

    expected = values_and_gradients(*plain_scores(head, hidden, targets, temperature))
    actual = values_and_gradients(*scorer(hidden, targets))
    for own, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, plain, **TIGHT)


def test_a_frozen_head_gets_no_gradient():
    head = torch.nn.Linear(4, 9).requires_grad_(False)
    hidden = torch.randn(3, 4, requires_grad=True)
    logp, _ = TokenScorer(head)(hidden, torch.tensor([1, 2, 3]))
    logp.sum().backward()
    assert hidden.grad.abs().sum() > 0
    assert head.weight.grad is None


def test_bfloat16_heads_score_in_float32():
    head = torch.nn.Linear(16, 50, bias=False).bfloat16()
    hidden = torch.randn(6, 16).bfloat16().requires_grad_()
    targets = torch.arange(6)
    logp, entropy = TokenScorer(head, logits_per_chunk=100)(hidden, targets)
    assert logp.dtype == entropy.dtype == torch.float32
    expected, _ = plain_scores(head, hidden, targets, 1.0)
    torch.testing.assert_close(logp, expected, **TIGHT)
    logp.sum().backward()
    assert head.weight.grad.dtype == torch.bfloat16


def test_no_tokens_give_no_scores_but_a_gradient():
    head = torch.nn.Linear(4, 9)
    logp, entropy = TokenScorer(head)(torch.zeros(0, 4), torch.zeros(0).long())
    assert len(logp) == len(entropy) == 0
    logp.sum().backward()
    assert head.weight.grad.abs().sum() == 0


def test_the_weight_stays_one_parameter():
    head = torch.nn.Linear(4, 9)
    module = torch.nn.ModuleList([head, TokenScorer(head)])
    assert len(list(module.parameters())) == 2  # weight and bias, once each


@pytest.mark.parametrize("value", [0.0, 1e4])
def test_extreme_logits_stay_finite(value):
    head = torch.nn.Linear(2, 5, bias=False)
    with torch.no_grad():
        head.weight[:, 0] = torch.tensor([value, 0, 0, 0, -value])
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    logp, entropy = TokenScorer(head)(hidden, torch.tensor([4]))
    (logp + entropy).sum().backward()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(hidden.grad).all()
