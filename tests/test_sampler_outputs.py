"""What the sampler makes of vLLM's outputs, without an engine."""

from types import SimpleNamespace

import numpy as np
import pytest

from rllib_exgrpo.sampler import Sample, VLLMSampler, _to_sample, check_log_probs


def output(token_ids, logprobs, *, of_tokens=None, finish_reason="stop"):
    """As vLLM returns a completion with flat log-probs."""
    flat = SimpleNamespace(
        token_ids=token_ids if of_tokens is None else of_tokens, logprobs=logprobs
    )
    return SimpleNamespace(
        token_ids=token_ids, logprobs=flat, finish_reason=finish_reason
    )


@pytest.mark.parametrize(
    ("finish_reason", "truncated"), [("stop", False), ("length", True)]
)
def test_the_finish_reason_tells_what_was_truncated(finish_reason, truncated):
    # Bug report 18: the end token 7 is one of several, and stays in the completion.
    sample = _to_sample(output([5, 7], [-0.2, -0.1], finish_reason=finish_reason))
    assert sample.truncated == truncated
    assert sample.token_ids.tolist() == [5, 7]
    assert sample.logp.tolist() == pytest.approx([-0.2, -0.1])


def test_log_probs_of_other_tokens_are_refused():
    # Bug report 20: token 382 was sampled, 13 is the likeliest.
    assert _to_sample(output([382], [-4.2])).logp.tolist() == pytest.approx([-4.2])
    for tokens in ([13, 382], [382, 13]):
        with pytest.raises(RuntimeError, match="other tokens than the sampled"):
            _to_sample(output([382], [-0.7, -4.2], of_tokens=tokens))


@pytest.mark.parametrize("bad", [np.nan, None, -np.inf])
def test_a_missing_log_prob_stops_the_rollout(bad):
    # Bug report 19: never smoothed over.
    sample = _to_sample(output([4, 5, 6], [-0.2, bad, -0.1]))
    good = Sample(np.array([4], np.int32), np.zeros(1, np.float32), False)
    message = "for token 1 of .* prompt 'q2' in iteration 3"
    with pytest.raises(RuntimeError, match=message):
        check_log_probs([[good], [good, sample]], ["q1", "q2"], iteration=3)
    check_log_probs([[good], [good]], ["q1", "q2"], iteration=3)


def test_a_prefix_cache_that_stays_stops_training():
    # Bug report 30: vLLM answers False while requests hold blocks.
    sampler = object.__new__(VLLMSampler)
    sampler._llm = SimpleNamespace(reset_prefix_cache=lambda: False)
    with pytest.raises(RuntimeError, match="kept its prefix cache"):
        sampler.sample([np.array([1], np.int32)], [1], temperature=1.0, seed=0)
