"""Makes completions and groups for the tests of the replay buffer."""

import numpy as np

from rllib_exgrpo.records import Completion, Group


def completion(tokens, reward=1.0, version=0, iteration=0, truncated=False):
    """A completion whose log-probs tell its token ids: -token / 8."""
    token_ids = np.array(tokens, np.int32)
    return Completion(
        token_ids, (-token_ids / 8).astype(np.float32), reward, version, truncated,
        iteration,
    )  # fmt: skip


def group(prompt_id, correct, size=4, version=0, replayed=None, source="", first=1):
    """A group whose correct completions are [first], [first + 1], ..."""
    fresh = size - (replayed is not None)
    completions = [
        completion([first + i], float(i < correct), version) for i in range(fresh)
    ]
    return Group(prompt_id, np.zeros(2, np.int32), completions, replayed, source)


def key(item):
    """A completion as a plain value; equal keys mean equal completions."""
    return (
        tuple(item.token_ids.tolist()),
        tuple(item.behavior_logp.tolist()),
        item.reward,
        item.weights_version,
        item.truncated,
        item.iteration,
    )


def contents(buffer, prompt_ids):
    """Everything that a buffer shows of some prompts."""
    return {
        p: (buffer.bucket(p), [key(c) for c in buffer.completions(p)])
        for p in prompt_ids
    }
