"""Any task of the package reasoning-gym, judged by the task's own scorer."""

from collections.abc import Hashable
from concurrent.futures import Future
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from .answers import boxed_answer
from .base import Problem
from .generated import GeneratedEnv
from .pooled import PooledEnv
from .verdict import Reason, Verdict
from .verifier_pool import VerifierPool, judged

_NUM_ENTRIES = 20_000  # the most that every task accepts
_MAX_ANSWER_CHARS = 10_000


class ReasoningGymEnv(PooledEnv, GeneratedEnv):
    r"""Asks problems that a task of reasoning-gym generates.

    A question belongs to the train or the held-out split by its hash, so that the two
    never share one, whatever their seeds and settings.

    Rewards: what the task's `score_answer` gives for the last answer between
    `<answer>` and `</answer>`, in [0, 1]; 0 without one. Some scorers evaluate
    expressions, so that they run in processes with limits (see `PooledEnv`).

    Settings:
        task: name of the task, such as "chain_sum".
        task_config: settings of the task; its `size` is how many entries it generates
            problems from, 20,000 by default.
        instruction: what follows each question.
        answer_tag: name of the tag around the answer; None takes `\boxed{...}`.
    """

    settings: ClassVar = {
        "task": None,
        "task_config": {},
        "instruction": "\nPut your final answer between <answer> and </answer>.",
        "answer_tag": "answer",
        "verifier_memory_limit_bytes": 4 << 30,
    }

    def draw(self, random: np.random.Generator) -> tuple[Hashable, Problem]:
        """Generates an entry of the task."""
        task, task_config = self._source
        dataset = open_dataset(task, task_config)
        index = int(random.integers(len(dataset)))
        entry = dataset[index]
        question = entry["question"]
        answer = {"text": entry["answer"], "index": index}
        prompt = question + self.config["instruction"]
        return question, Problem(f"{task}/{index}", prompt, answer, task)

    def build_pool(self, **limits: Any) -> VerifierPool:
        """Builds processes that run the task's scorer."""
        return VerifierPool(**limits, verifier="reasoning_gym:score")

    def submit(self, completion: str, problem: Problem) -> Future[Verdict]:
        """Asks the task's scorer."""
        answer = self._answer(completion)
        if not answer:
            return judged(Verdict.of(Reason.NO_ANSWER))
        return self.pool.submit(*self._source, problem.answer["index"], answer)

    def gold_completion(self, problem: Problem) -> str:
        """Puts the task's own answer where an answer belongs.

        Raises:
            ValueError: for the few tasks that name no answer, only score them.
        """
        tag, text = self.config["answer_tag"], problem.answer["text"]
        if text is None:
            raise ValueError(f"the task {self.config['task']!r} names no gold answer")
        return f"<{tag}>{text}</{tag}>" if tag else rf"\boxed{{{text}}}"

    @property
    def _source(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        return self.config["task"], tuple(sorted(self.config["task_config"].items()))

    def _answer(self, completion: str) -> str | None:
        tag = self.config["answer_tag"]
        if not tag:
            return boxed_answer(completion)
        *_, final = completion.rpartition("</think>")
        _, opening, rest = final.rpartition(f"<{tag}>")
        answer, closing, _ = rest.partition(f"</{tag}>")
        return answer.strip() if opening and closing else None


def score(task: str, task_config: Any, index: int, answer: str) -> Verdict:
    """Scores an answer to an entry of a task, for the processes of the pool."""
    if len(answer) > _MAX_ANSWER_CHARS:
        return Verdict.of(Reason.ANSWER_UNPARSED, f"{len(answer)} characters")
    dataset = open_dataset(task, tuple((name, value) for name, value in task_config))
    reward = float(dataset.score_answer(answer=answer, entry=dataset[index]))
    return Verdict(reward, Reason.OK if reward >= 1.0 else Reason.WRONG)


def warm_up() -> None:
    """Imports reasoning-gym, which forked workers inherit."""
    _import_package()


@lru_cache(maxsize=16)
def open_dataset(task: str, task_config: tuple[tuple[str, Any], ...]) -> Any:
    """Returns a task's data set; equal arguments give equal entries.

    Raises:
        ValueError: for an unknown task, with the nearest name, or settings that it does
            not take.
        ImportError: without the package.
    """
    package = _import_package()
    tasks = package.factory.DATASETS
    if task not in tasks:
        near = get_close_matches(str(task), tasks, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"take one of {sorted(tasks)}."
        raise ValueError(
            f"`task` is {task!r}, which reasoning-gym does not have; {hint}"
        )
    settings = {"size": _NUM_ENTRIES, "seed": 0, **dict(task_config)}
    try:
        return package.create_dataset(task, **settings)
    except (TypeError, AssertionError) as error:
        raise ValueError(
            f"`task_config` of {task!r} cannot be used: {error}"
        ) from error


def _import_package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "`ReasoningGymEnv` needs the package reasoning-gym: install "
            'it with `pip install "rllib_exgrpo[reasoning-gym]"`.'
        ) from error
    return reasoning_gym
