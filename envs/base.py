"""The base class of single-step text environments with verifiable rewards."""

import difflib
import math
import time
import traceback
from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
from gymnasium.error import ResetNeeded

from .spaces import TextSpace
from .verdict import Reason, Verdict

Message = Mapping[str, str]
"""A chat message with the keys `role` and `content`."""


@dataclass(frozen=True)
class Problem:
    r"""One problem: what the model reads and what counts as right.

    Attributes:
        prompt_id: unique inside its environment, and stable between runs.
        prompt: a text, or a tuple of chat messages (dicts with `role` and `content`).
        answer: the gold answer, in whatever form the environment's `verify` reads.
        source: which data set the problem belongs to, for metrics.
    """

    prompt_id: Hashable
    prompt: str | tuple[Message, ...]
    answer: Any
    source: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as chat messages; a text becomes one user message."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [dict(message) for message in self.prompt]

    @property
    def text(self) -> str:
        """The prompt text; of chat messages, the last user's content."""
        users = [m["content"] for m in self.messages if m["role"] == "user"]
        return users[-1] if users else self.messages[-1]["content"]


class UnknownPromptError(KeyError):
    """Raised for a prompt id that the environment does not hold."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the message in quotes


class VerifiableTextEnv(gym.Env[str, str]):
    """A text environment of one step: a prompt in, a completion out, a reward back.

    A subclass declares its settings with their defaults in `settings`, and writes
    `load` and `verify`. Everything else is here. With a method `answer_key(completion)`
    that returns what a completion answers as text, or None, evaluations report how
    often the majority of several completions is right.

    Observation Space: any text; the prompt (of chat messages, the last user content).
    Action Space: any text; the completion.
    Starting State: the problem named by `reset(options={"prompt_id": ...})`, else one
        drawn uniformly with the environment's random generator.
    Rewards: what `verify` gives, in [0, 1].
    Episode End: always after one step.
    Information: `prompt_id`, `source`, `messages`; after a step also `reason` and
        `message`, from the verdict.

    Args:
        config: the settings, as RLlib hands them over (`env_config`).
        render_mode: None, or "ansi" for `render` to return the episode as text.
        **kwargs: the settings, as `gymnasium.make` hands them over.

    Raises:
        ValueError: for a setting that the class does not have.
    """

    settings: ClassVar[Mapping[str, Any]] = {"unscored_reward": 0.0}
    """This class's settings and their defaults; those of its parents are added.

    `unscored_reward`: reward of a completion without a verdict; None keeps it NaN.
    """

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012 # the name is Gymnasium's

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = self._merge_settings({**(config or {}), **kwargs})
        self.render_mode = render_mode
        self.observation_space = TextSpace()
        self.action_space = TextSpace()
        self._problem: Problem | None = None
        self._awaits_step = False
        self._last_step = ""

    @abstractmethod
    def load(self) -> Iterable[Problem] | Mapping[Hashable, Problem]:
        """Returns the problems, by `self.config`; called once, when first needed.

        A mapping from ids to problems is taken as it is, so that it may read them when
        asked; it raises KeyError for one that turns out to be unusable.
        """

    @abstractmethod
    def verify(self, completion: str, problem: Problem) -> float | Verdict:
        """Judges a completion: a reward in [0, 1], or a `Verdict` with its reason.

        A completion that cannot be understood is a wrong answer. An exception means
        that the verifier itself is broken.
        """

    def verify_many(
        self, completions: Sequence[str], problems: Sequence[Problem]
    ) -> list[Verdict]:
        """Judges `completions[i]` as an answer to `problems[i]`, in order.

        An exception in `verify` becomes a verdict with the reason "error" and no
        reward, so that one broken problem does not lose a whole batch.
        """
        pairs = zip(completions, problems, strict=True)
        return [self._verdict_or_error(c, p) for c, p in pairs]

    def gold_completion(self, problem: Problem) -> str:
        """Returns a completion that holds the gold answer, for `self_check`."""
        return rf"\boxed{{{problem.answer}}}"

    def self_check(self) -> list[tuple[Problem, Verdict]]:
        """Judges every gold answer and returns the problems it scores below 1.0 on."""
        problems = list(self._problems.values())
        verdicts = self.verify_many([*map(self.gold_completion, problems)], problems)
        pairs = zip(problems, verdicts, strict=True)
        return [(p, v) for p, v in pairs if not v.reward >= 1.0]

    @property
    def prompt_ids(self) -> Sequence[Hashable]:
        """The ids of all problems, in the order of loading."""
        return self._prompt_ids

    def question_texts(self) -> Iterator[Any]:
        """Yields sequences of all question texts, to compare two environments by."""
        yield [problem.text for problem in self._problems.values()]

    def problem(self, prompt_id: Hashable) -> Problem:
        """Returns the problem of an id.

        Raises:
            UnknownPromptError: if there is none.
        """
        try:
            return self._problems[prompt_id]
        except UnknownPromptError:
            raise
        except KeyError:
            raise UnknownPromptError(
                f"{type(self).__name__} has no problem with prompt_id {prompt_id!r}; "
                f"it holds {len(self._problems)}, the first being "
                f"{self.prompt_ids[0]!r}. Take ids from `prompt_ids`."
            ) from None

    def reward(self, verdict: Verdict) -> float:
        """Returns the verdict's reward; without one, the setting `unscored_reward`."""
        default = self.config["unscored_reward"]
        return verdict.reward if verdict.is_known or default is None else default

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Starts an episode on `options["prompt_id"]`, or on a random problem."""
        super().reset(seed=seed)
        options = options or {}
        _refuse_unknown(options, {"prompt_id"}, "reset option")
        if "prompt_id" in options:
            prompt_id = options["prompt_id"]
        else:
            index = int(self.np_random.integers(len(self.prompt_ids)))
            prompt_id = self.prompt_ids[index]
        self._problem = self.problem(prompt_id)
        self._awaits_step = True
        self._last_step = ""
        return self._problem.text, self._info(self._problem)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judges the completion and ends the episode.

        Raises:
            ResetNeeded: if the episode has ended, or none has begun.
        """
        if self._problem is None or not self._awaits_step:
            raise ResetNeeded(
                f"{type(self).__name__} has one step an episode: call `reset` before "
                "each `step`."
            )
        verdict = _as_verdict(self.verify(action, self._problem))
        reward = self.reward(verdict)
        self._awaits_step = False
        self._last_step = f"\n{action}\nReward: {reward:g} ({verdict.reason})"
        info = self._info(self._problem)
        info |= {"reason": str(verdict.reason), "message": verdict.message}
        return "", reward, True, False, info

    def render(self) -> str | None:  # type: ignore[override] # text, not a frame
        """Returns prompt, completion and reward as text in the render mode "ansi"."""
        if self.render_mode != "ansi" or self._problem is None:
            return None
        return self._problem.text + self._last_step

    def _info(self, problem: Problem) -> dict[str, Any]:
        return {
            "prompt_id": problem.prompt_id,
            "source": problem.source,
            "messages": problem.messages,
        }

    def _verdict_or_error(self, completion: str, problem: Problem) -> Verdict:
        started = time.perf_counter()
        try:
            verdict = _as_verdict(self.verify(completion, problem))
            return replace(verdict, seconds=time.perf_counter() - started)
        except Exception as error:  # any: the verifier is the user's own code
            file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
            where = f"prompt {problem.prompt_id!r}, {Path(file).name}, line {line}"
            message = f"{type(error).__name__}: {error} ({where})"
            return Verdict.of(Reason.ERROR, message)

    @cached_property
    def _prompt_ids(self) -> Sequence[Hashable]:
        lazy_ids = getattr(self._problems, "ids", None)
        return tuple(self._problems) if lazy_ids is None else lazy_ids

    @cached_property
    def _problems(self) -> Mapping[Hashable, Problem]:
        loaded = self.load()
        problems = loaded if isinstance(loaded, Mapping) else _by_id(loaded, self)
        if not problems:
            raise ValueError(
                f"{type(self).__name__}.load() gave no problem. Give it some, or set "
                f"less narrow settings than {self.config}."
            )
        return problems

    @classmethod
    def _merge_settings(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for parent in reversed(cls.__mro__):
            merged |= vars(parent).get("settings", {})
        _refuse_unknown(given, merged, f"setting of {cls.__name__}")
        return merged | dict(given)


def _by_id(problems: Iterable[Problem], env: Any) -> dict[Hashable, Problem]:
    problems = list(problems)
    by_id = {problem.prompt_id: problem for problem in problems}
    if len(by_id) < len(problems):
        counts = Counter(problem.prompt_id for problem in problems)
        twice = [prompt_id for prompt_id, count in counts.items() if count > 1]
        raise ValueError(
            f"{type(env).__name__}.load() gave {len(twice)} prompt ids more than "
            f"once: {twice[:10]}. Every problem needs an id of its own."
        )
    return by_id


def _refuse_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    known = sorted(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`? " if near else ""
            raise ValueError(f"`{name}` is no {what}; {hint}There are {known}.")


def _as_verdict(result: float | Verdict) -> Verdict:
    """Gives a bare reward its reason.

    Raises:
        ValueError: for a reward outside [0, 1]; replay buckets and advantages rest on
            that range.
    """
    if isinstance(result, Verdict):
        return result
    if not isinstance(result, Real):
        raise TypeError(
            f"`verify` returned {result!r}; return a reward in [0, 1] or a `Verdict`, "
            "whose reason TIMEOUT or ERROR means that there is no reward."
        )
    reward = float(result)
    if math.isnan(reward):
        return Verdict.of(Reason.ERROR, "verify returned NaN")
    if not 0.0 <= reward <= 1.0:
        raise ValueError(f"`verify` returned {reward}; rewards lie in [0, 1].")
    return Verdict(reward, Reason.OK if reward >= 1.0 else Reason.WRONG)
