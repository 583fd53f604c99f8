"""How the rollout talks to an environment, ours or any single-step text environment."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.prompt_format import Message, PromptFormatter
from rllib_exgrpo.records import PromptId

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """The environment's word on one completion.

    Attributes:
        reward: in [0, 1]; NaN without a verdict.
        reason: "ok", "wrong", "timeout", ... as the verifier puts it.
        message: details for a log.
    """

    reward: float
    reason: str
    message: str = ""


def prompt_ids(env: Any) -> Sequence[PromptId]:
    """Returns the ids of an environment's problems.

    Raises:
        ValueError: if the environment does not name them.
    """
    ids = getattr(env.unwrapped, "prompt_ids", None)
    if ids is None or len(ids) == 0:
        raise ValueError(
            f"`env`: {type(env.unwrapped).__name__} has no `prompt_ids`. ExGRPO needs "
            "to name each problem to come back to it. Subclass "
            "`rllib_exgrpo.envs.VerifiableTextEnv`, or give the environment a sequence "
            "`prompt_ids` and let `reset(options={'prompt_id': ...})` choose by it."
        )
    return ids


def read_prompt(env: Any, prompt_id: PromptId) -> tuple[list[Message], str]:
    """Returns a problem's chat messages and the name of its data set."""
    observation, info = env.reset(options={"prompt_id": prompt_id})
    messages = info.get("messages") or [{"role": "user", "content": observation}]
    return messages, str(info.get("source", ""))


def judge(
    env: Any, completions: Sequence[str], ids: Sequence[PromptId]
) -> list[Judgement]:
    """Rewards completions, in order.

    An environment that can verify many at once is asked once; any other is reset and
    stepped for each completion.

    Args:
        env: the environment.
        completions: texts.
        ids: the problem of each completion.

    Raises:
        RuntimeError: if the verifier itself broke on a completion.
    """
    if env is env.unwrapped and hasattr(env, "verify_many"):
        problems = [env.problem(i) for i in ids]
        verdicts = env.verify_many(completions, problems)
        judgements = [
            Judgement(float(env.reward(v)), str(v.reason), v.message) for v in verdicts
        ]
    else:
        judgements = [_step(env, c, i) for c, i in zip(completions, ids, strict=True)]
    _raise_if_broken(env, judgements)
    return judgements


def answer_keys(env: Any, completions: Sequence[str]) -> list[str | None] | None:
    """Returns what each completion answers, for votes; None if it cannot be told.

    An environment can tell if it has a method `answer_key(completion)`.
    """
    answer_key = getattr(env.unwrapped, "answer_key", None)
    return None if answer_key is None else [answer_key(c) for c in completions]


def _step(env: Any, completion: str, prompt_id: PromptId) -> Judgement:
    env.reset(options={"prompt_id": prompt_id})
    _, reward, _, _, info = env.step(completion)
    reason = info.get("reason") or ("ok" if reward >= 1 else "wrong")
    return Judgement(float(reward), str(reason), str(info.get("message", "")))


def _raise_if_broken(env: Any, judgements: Sequence[Judgement]) -> None:
    broken = [j.message for j in judgements if j.reason == "error"]
    if broken:
        raise RuntimeError(
            f"The verifier of {type(env.unwrapped).__name__} failed on {len(broken)} "
            f"of {len(judgements)} completions, first with: {broken[0]}. A wrong "
            "answer must be a reward of 0, not an exception."
        )


class PromptBook:
    """The prompts of an environment as token ids, checked against the length limit.

    Args:
        env: the environment.
        formatter: turns messages into token ids.
        max_prompt_tokens: longest prompt.
        long_prompts: "error" refuses longer prompts, "drop" leaves them out.

    Attributes:
        ids: the usable prompt ids, in the environment's order.
        tokenizer: that of the formatter.

    Raises:
        ValueError: if there are longer prompts and `long_prompts` is "error", or if
            none is left.
    """

    def __init__(
        self,
        env: Any,
        formatter: PromptFormatter,
        *,
        max_prompt_tokens: int,
        long_prompts: str = "error",
    ) -> None:
        self._env = env
        self._formatter = formatter
        self.tokenizer = formatter.tokenizer
        all_ids = prompt_ids(env)
        lengths = [len(self.token_ids(i)) for i in all_ids]
        self.ids: list[PromptId] = [
            i
            for i, length in zip(all_ids, lengths, strict=True)
            if length <= max_prompt_tokens
        ]
        if len(self.ids) < len(all_ids):
            self._report(all_ids, lengths, max_prompt_tokens, long_prompts)

    def token_ids(self, prompt_id: PromptId) -> NDArray[np.int32]:
        """Returns the (T,) int32 token ids of a prompt."""
        messages, _ = read_prompt(self._env, prompt_id)
        return self._formatter.token_ids(messages)

    def _report(
        self,
        all_ids: Sequence[PromptId],
        lengths: Sequence[int],
        limit: int,
        long_prompts: str,
    ) -> None:
        long = [
            f"{i!r} ({n})" for i, n in zip(all_ids, lengths, strict=True) if n > limit
        ]
        name = type(self._env.unwrapped).__name__
        found = (
            f"{len(long)} of {len(all_ids)} prompts of {name} have more than "
            f"`max_prompt_tokens`={limit} tokens after formatting: "
            f"{', '.join(long[:5])}{', ...' if len(long) > 5 else ''}."
        )
        if long_prompts == "error" or not self.ids:
            raise ValueError(
                f"{found} Raise `max_prompt_tokens` to {max(lengths)}, or set "
                "`long_prompts`='drop' to leave them out."
            )
        logger.warning("%s They are left out.", found)
