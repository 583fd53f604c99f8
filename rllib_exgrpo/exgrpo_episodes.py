"""Completions as RLlib episodes, for callbacks and RLlib's own interfaces."""

from typing import Any

from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_exgrpo.records import Completion, Group


def episodes_from_group(group: Group, tokenizer: Any) -> list[SingleAgentEpisode]:
    """Makes one terminated single-step episode of each fresh completion.

    The prompt is the observation, the completion the action, both as text; the exact
    token ids and log-probs are in `extra_model_outputs`.
    """
    prompt = tokenizer.decode(group.prompt_token_ids)
    texts = tokenizer.batch_decode(
        [c.token_ids for c in group.completions], skip_special_tokens=True
    )
    return [
        _episode(group, prompt, completion, text)
        for completion, text in zip(group.completions, texts, strict=True)
    ]


def _episode(
    group: Group, prompt: str, completion: Completion, text: str
) -> SingleAgentEpisode:
    info = {"prompt_id": group.prompt_id, "source": group.source}
    return SingleAgentEpisode(
        observations=[prompt, ""],
        actions=[text],
        rewards=[completion.reward],
        infos=[info, {**info, "truncated": completion.truncated}],
        terminated=True,
        extra_model_outputs={
            "prompt_token_ids": [group.prompt_token_ids],
            "token_ids": [completion.token_ids],
            Columns.ACTION_LOGP: [completion.behavior_logp],
            "weights_seq_no": [completion.weights_version],
        },
        len_lookback_buffer=0,  # else the step would count as the past
    )
