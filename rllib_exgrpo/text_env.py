"""How the rollout talks to an environment, ours or any single-step text environment."""

from collections.abc import Iterator, Sequence
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


def questions(env: Any) -> Iterator[Any]:
    """Yields sequences, or Arrow arrays, of an environment's question texts, in order.

    An environment that offers none is reset to each of its problems.
    """
    if hasattr(env.unwrapped, "question_texts"):
        yield from env.unwrapped.question_texts()
    else:
        yield [read_prompt(env, i)[0][-1]["content"] for i in prompt_ids(env)]


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
