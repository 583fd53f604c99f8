"""A few completions of an evaluation as text, for trackers and reports."""

from collections.abc import Mapping, Sequence
from typing import Any

from rllib_exgrpo.records import Group

SAMPLES = "evaluation_samples"
"""Where a result holds them."""

_NUM_SAMPLES = 4
_MAX_CHARACTERS = 4000


def sample_texts(groups: Sequence[Group], tokenizer: Any) -> dict[str, Any]:
    """Takes the first completion of some groups, the same ones in every evaluation.

    Args:
        groups: of one evaluation.
        tokenizer: of the model.

    Returns:
        Row number to prompt, completion, reward and length: a nested dict and not a
        list, because Tune's loggers take lists for histograms.
    """
    step = max(1, len(groups) // _NUM_SAMPLES)
    return {
        str(number): _row(group, tokenizer)
        for number, group in enumerate(groups[::step][:_NUM_SAMPLES])
    }


def rows_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows in a result; empty if it holds no evaluation."""
    return list(result.get(SAMPLES, {}).values())


def _row(group: Group, tokenizer: Any) -> dict[str, Any]:
    completion = group.completions[0]
    return {
        "prompt": tokenizer.decode(group.prompt_token_ids)[:_MAX_CHARACTERS],
        "completion": tokenizer.decode(completion.token_ids)[:_MAX_CHARACTERS],
        "reward": float(completion.reward),
        "tokens": len(completion),
    }
