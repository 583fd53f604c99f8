"""How the rollout talks to an environment, ours or any single-step text environment."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_exgrpo.prompt_format import Message
from rllib_exgrpo.records import PromptId


@dataclass(frozen=True)
class Judgement:
    """The environment's word on one completion.

    Attributes:
        reward: in [0, 1]; NaN without a verdict.
        reason: "ok", "wrong", "timeout", ... as the verifier puts it.
        message: details for a log.
        seconds: wall time that it took.
    """

    reward: float
    reason: str
    message: str = ""
    seconds: float = 0.0


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


def questions(env: Any) -> Iterator[Any]:
    """Yields sequences, or Arrow arrays, of an environment's question texts, in order.

    An environment that offers none is reset to each of its problems.
    """
    if hasattr(env.unwrapped, "question_texts"):
        yield from env.unwrapped.question_texts()
    else:
        yield [read_prompt(env, i)[0][-1]["content"] for i in prompt_ids(env)]


def judges_early(env: Any) -> bool:
    """Whether the environment can verify while completions are still being sampled."""
    return env is env.unwrapped and hasattr(env, "start_verifying")


def start_judging(
    env: Any, completions: Sequence[str], ids: Sequence[PromptId]
) -> Callable[[], list[Judgement]]:
    """Starts to reward completions.

    Most environments only begin when the judgements are asked for: one that can verify
    many at once is asked once; any other is reset and stepped for each completion.

    Args:
        env: the environment.
        completions: texts.
        ids: the problem of each completion.

    Returns:
        A function that returns the judgements, in order. It raises RuntimeError if the
        verifier itself broke on a completion.
    """
    if not (env is env.unwrapped and hasattr(env, "verify_many")):
        return lambda: _checked(
            env, [_step(env, c, i) for c, i in zip(completions, ids, strict=True)]
        )
    problems = [env.problem(i) for i in ids]
    verdicts = (
        env.start_verifying(completions, problems)
        if judges_early(env)
        else lambda: env.verify_many(completions, problems)
    )
    return lambda: _checked(env, [_judgement(env, v) for v in verdicts()])


def answer_keys(env: Any, completions: Sequence[str]) -> list[str | None] | None:
    """Returns what each completion answers, for votes; None if it cannot be told.

    An environment can tell if it has a method `answer_key(completion)`.
    """
    answer_key = getattr(env.unwrapped, "answer_key", None)
    return None if answer_key is None else [answer_key(c) for c in completions]


def _judgement(env: Any, verdict: Any) -> Judgement:
    reward, reason = float(env.reward(verdict)), str(verdict.reason)
    return Judgement(reward, reason, verdict.message, verdict.seconds)


def _step(env: Any, completion: str, prompt_id: PromptId) -> Judgement:
    env.reset(options={"prompt_id": prompt_id})
    started = time.perf_counter()
    _, reward, _, _, info = env.step(completion)
    seconds = time.perf_counter() - started
    reason = info.get("reason") or ("ok" if reward >= 1 else "wrong")
    return Judgement(float(reward), str(reason), str(info.get("message", "")), seconds)


def _checked(env: Any, judgements: list[Judgement]) -> list[Judgement]:
    broken = [j.message for j in judgements if j.reason == "error"]
    if broken:
        raise RuntimeError(
            f"The verifier of {type(env.unwrapped).__name__} failed on {len(broken)} "
            f"of {len(judgements)} completions, first with: {broken[0]}. A wrong "
            "answer must be a reward of 0, not an exception."
        )
    return judgements
