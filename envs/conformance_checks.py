"""The single checks of `conformance`; each returns a level and what it found."""

import hashlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import islice
from typing import Any

import cloudpickle
from gymnasium.utils.env_checker import check_env as check_by_gymnasium

_NUM_PROMPTS = 50  # that resets and splits in other processes are compared on
_NUM_TIMED = 200
_MIN_ANSWERS_PER_SECOND = 10.0  # 1,024 answers, a step of the paper's, in 100 s
_MAX_SECONDS_AN_ANSWER = 5.0
_MAX_SHARE_OF_FOREIGN_GOLDS = 0.9
_PROCESS_SECONDS = 300.0
_STORABLE = (str, int, float, bytes)

HOSTILE: Mapping[str, str] = {
    "empty": "",
    "only spaces": " \n\t ",
    "a NUL character": "\x00",
    "other scripts": "\u4e2d\u6587 \u0438 \U0001d54f \U0001f600 \u202e",
    "random characters": "#$%&()*+~ qzxj }{][ \\\\ \\frac",
    "an unclosed box": r"\boxed{",
    "an empty box": r"\boxed{}",
    "unclosed tags": "<think><answer>",
    "a megabyte of words": "word " * 200_000,
    "a megabyte in a box": rf"\boxed{{{'#' * 1_000_000}}}",
    "brackets in brackets": rf"\boxed{{{'(' * 50_000}}}",
}
"""Completions that no verifier may crash on or call right."""


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


Outcome = tuple[Level, str]


class Trial:
    """An environment under test, and how to make others of it."""

    def __init__(
        self,
        create: Callable[[Mapping[str, Any]], Any],
        config: dict[str, Any],
        heldout_config: Mapping[str, Any] | None,
        max_problems: int,
    ) -> None:
        self.create = create
        self.config = config
        self.max_problems = max_problems
        self.env = create(dict(config))
        split = getattr(self.env.unwrapped, "config", config).get("split")
        if heldout_config is None and split == "train":
            heldout_config = {"split": "heldout"}
        self.heldout_config = heldout_config

    @cached_property
    def prompt_ids(self) -> Sequence[Hashable]:
        """The ids of the environment's problems."""
        return _prompt_ids(self.env)

    @cached_property
    def golds(self) -> dict[Hashable, str]:
        """Completions with the gold answer, of evenly chosen problems."""
        env = self.env.unwrapped
        if not hasattr(env, "gold_completion"):
            return {}
        step = -(-len(self.prompt_ids) // self.max_problems)
        return {i: env.gold_completion(env.problem(i)) for i in self.prompt_ids[::step]}

    def rewards(self, completions: Sequence[str], ids: Sequence[Hashable]) -> list[Any]:
        """Judges as training does: all at once where the environment can."""
        env = self.env
        if env is env.unwrapped and hasattr(env, "verify_many"):
            problems = [env.problem(i) for i in ids]
            return [v.reward for v in env.verify_many(completions, problems)]
        return [self.step(c, i) for c, i in zip(completions, ids, strict=True)]

    def step(self, completion: str, prompt_id: Hashable) -> float:
        """Judges one completion in an episode of its own.

        Raises:
            ValueError: for a reward out of range, or an episode that goes on.
        """
        self.env.reset(options={"prompt_id": prompt_id})
        _, reward, terminated, truncated, _ = self.env.step(completion)
        if not (terminated or truncated):
            raise ValueError(
                "`step` did not end the episode: it is one prompt and one completion, "
                "so return `terminated=True`."
            )
        if reward == reward and not 0.0 <= reward <= 1.0:  # NaN means no verdict
            raise ValueError(f"the reward is {reward}: scale rewards to [0, 1].")
        return float(reward)


def _check_ids(trial: Trial) -> Outcome:
    ids = trial.prompt_ids
    odd = next((i for i in ids if not _is_storable(i)), None)
    if odd is not None:
        return Level.ERROR, (
            f"{odd!r} is a {type(odd).__name__}, which no checkpoint can hold: take "
            "ints, strings, bytes or tuples of them."
        )
    repeated = [i for i, count in Counter(ids).items() if count > 1]
    if repeated:
        return (
            Level.ERROR,
            f"{repeated[:3]} stand for several problems: make ids unique.",
        )
    return Level.OK, f"{len(ids)} distinct ids, the first being {ids[0]!r}"


def _check_spaces(trial: Trial) -> Outcome:
    env = trial.create(dict(trial.config)).unwrapped
    for name in ("observation_space", "action_space"):
        if "any \u2211 text" not in getattr(env, name):
            return Level.ERROR, (
                f"`{name}` does not hold every text: use "
                "`rllib_exgrpo.envs.TextSpace()`."
            )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_by_gymnasium(env, skip_render_check=True)
    texts = [
        str(w.message) for w in caught if "not having a spec" not in str(w.message)
    ]
    if texts:
        return Level.WARNING, f"Gymnasium's checker says: {texts[0]}"
    return Level.OK, "they hold texts, and Gymnasium's checker agrees"


def _check_resets(trial: Trial) -> Outcome:
    other = trial.create(dict(trial.config))
    for prompt_id in trial.prompt_ids[:_NUM_PROMPTS]:
        first, again = (_prompt(env, prompt_id) for env in (trial.env, other))
        if first != again or first != _prompt(trial.env, prompt_id):
            return Level.ERROR, (
                f"the prompt of {prompt_id!r} is not the same each time: build "
                "problems from the settings alone, with seeded generators."
            )
        named = trial.env.reset(options={"prompt_id": prompt_id})[1].get("prompt_id")
        if named != prompt_id:
            return Level.ERROR, (
                f"`reset` was asked for {prompt_id!r} and its info names {named!r}: "
                "let `options['prompt_id']` choose the problem, and name it in `info`."
            )
    drawn = [env.reset(seed=3)[0] for env in (trial.env, other, trial.env)]
    other.close()
    if len(set(drawn)) > 1:
        return Level.ERROR, (
            "`reset(seed=3)` gives several prompts: draw with `self.np_random`."
        )
    return Level.OK, "the same prompt for the same id or seed, in two instances"


def check_other_process(trial: Trial) -> Outcome:
    """Creates the environment in another process, as env runners do."""
    try:
        task = cloudpickle.dumps((fingerprint, trial.create, trial.config))
    except Exception as error:  # any: whatever the class or config holds
        return Level.ERROR, (
            f"class and config cannot be sent to an env runner ({told(error)}): keep "
            "open files, locks and connections out of them; open them in `load`."
        )
    done = subprocess.run(
        [sys.executable, "-c", _IN_OTHER_PROCESS],
        input=task,
        capture_output=True,
        timeout=_PROCESS_SECONDS,
        # Another hash seed shows ids and orders that rest on `hash` or on sets.
        env={
            **os.environ,
            "PYTHONHASHSEED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Level.ERROR, (
            f"it cannot be created in another process: {last}. Put the class into a "
            "module that workers can import, and name files by absolute paths."
        )
    if done.stdout.decode().split()[-1] != fingerprint(trial.create, trial.config):
        return Level.ERROR, (
            "another process has other ids or prompts: do not build them from `hash`, "
            "sets, the time or the process."
        )
    return Level.OK, "created by class and config, with the same ids and prompts"


def _check_golds(trial: Trial) -> Outcome:
    if not trial.golds:
        return Level.WARNING, (
            "there is no `gold_completion(problem)`, so nobody knows whether right "
            "answers are rewarded: write it."
        )
    rewards = trial.rewards([*trial.golds.values()], [*trial.golds])
    low = [i for i, r in zip(trial.golds, rewards, strict=True) if not r >= 1.0]
    if low:
        return Level.ERROR, (
            f"{len(low)} of {len(rewards)} gold answers score below 1.0, such as "
            f"{trial.golds[low[0]][:60]!r} of {low[0]!r}: mend `verify` or the answers."
        )
    return Level.OK, f"{len(rewards)} of {len(rewards)} score 1.0"


def _check_hostile(trial: Trial) -> Outcome:
    ids = [trial.prompt_ids[k] for k in {0, len(trial.prompt_ids) // 2}]
    slowest, slow_name = 0.0, ""
    for name, completion in HOSTILE.items():
        for prompt_id in ids:
            start = time.perf_counter()
            reward = trial.step(completion, prompt_id)
            seconds = time.perf_counter() - start
            if reward >= 1.0:
                return Level.ERROR, (
                    f"the completion {name!r} scores {reward}: `verify` must look for "
                    "the answer in a place that garbage does not fill."
                )
            slowest, slow_name = max((slowest, slow_name), (seconds, name))
    if slowest > _MAX_SECONDS_AN_ANSWER:
        return Level.WARNING, (
            f"{slow_name!r} takes {slowest:.1f} s: bound what `verify` reads."
        )
    return Level.OK, f"{len(HOSTILE)} kinds score below 1.0 without an error"


def _check_echo(trial: Trial) -> Outcome:
    ids = trial.prompt_ids[:_NUM_PROMPTS]
    prompts = [trial.env.reset(options={"prompt_id": i})[0] for i in ids]
    right = sum(r >= 1.0 for r in trial.rewards(prompts, ids))
    if right:
        return Level.WARNING, (
            f"repeating the question scores 1.0 on {right} of {len(ids)} problems, "
            "which a model finds out: ask for the answer in a marked place."
        )
    return Level.OK, "repeating the question scores below 1.0"


def _check_foreign_golds(trial: Trial) -> Outcome:
    ids = [*trial.golds][:_NUM_TIMED]
    texts = [trial.golds[i] for i in ids]
    pairs = [(i, t) for i, t in zip(ids, texts[1:] + texts[:1], strict=True)
             if t != trial.golds[i]]  # fmt: skip
    if not pairs:
        return Level.OK, "not checked: there are no two different gold answers"
    ids, texts = map(list, zip(*pairs, strict=True))
    trial.rewards(texts[:8], ids[:8])  # starts what the verifier needs
    start = time.perf_counter()
    rewards = trial.rewards(texts, ids)
    speed = len(rewards) / (time.perf_counter() - start)
    share = sum(r >= 1.0 for r in rewards) / len(rewards)
    if share > _MAX_SHARE_OF_FOREIGN_GOLDS:
        return Level.ERROR, (
            f"{share:.0%} of the answers to other problems score 1.0: `verify` does "
            "not look at the problem."
        )
    found = f"{speed:,.0f} answers/s; {share:.0%} of other problems' answers score 1.0"
    if speed < _MIN_ANSWERS_PER_SECOND:
        return Level.WARNING, (
            f"{found}. A step judges hundreds: make `verify` faster, or override "
            "`verify_many` to judge them side by side."
        )
    return Level.OK, found


def _check_overlap(trial: Trial) -> Outcome:
    if trial.heldout_config is None:
        return Level.OK, "not checked: no held-out config was given"
    heldout = trial.create({**trial.config, **trial.heldout_config})
    held = {_normalised(heldout, i) for i in _prompt_ids(heldout)}
    shared = {_normalised(trial.env, i) for i in trial.prompt_ids} & held
    heldout.close()
    if shared:
        return Level.ERROR, (
            f"{len(shared)} of {len(held)} held-out prompts are training prompts too, "
            f"such as {min(shared)[:60]!r}: evaluation would measure memory."
        )
    return Level.OK, f"none of {len(held)} held-out prompts is a training prompt"


CHECKS: tuple[tuple[str, Callable[[Trial], Outcome]], ...] = (
    ("prompt ids", _check_ids),
    ("spaces", _check_spaces),
    ("resets", _check_resets),
    ("other process", check_other_process),
    ("gold answers", _check_golds),
    ("hostile completions", _check_hostile),
    ("echo", _check_echo),
    ("verifier", _check_foreign_golds),
    ("held-out overlap", _check_overlap),
)

_IN_OTHER_PROCESS = """
import pickle, sys
function, *arguments = pickle.load(sys.stdin.buffer)
print(function(*arguments))
"""


def fingerprint(
    create: Callable[[Mapping[str, Any]], Any], config: Mapping[str, Any]
) -> str:
    """Creates an environment and returns a hash of its ids and first prompts."""
    env = create(dict(config))
    ids = _prompt_ids(env)
    prompts = [_prompt(env, i) for i in islice(ids, _NUM_PROMPTS)]
    env.close()
    return hashlib.sha256(repr(([*map(repr, ids)], prompts)).encode()).hexdigest()


def _prompt_ids(env: Any) -> Sequence[Hashable]:
    ids = getattr(env.unwrapped, "prompt_ids", None)
    if ids is None or len(ids) == 0:
        raise ValueError(
            "there is no `prompt_ids`: subclass `VerifiableTextEnv`, or give the "
            "environment a sequence of the ids of its problems."
        )
    return ids


def _prompt(env: Any, prompt_id: Hashable) -> str:
    observation, info = env.reset(options={"prompt_id": prompt_id})
    return json.dumps([observation, info.get("messages")])


def _normalised(env: Any, prompt_id: Hashable) -> str:
    observation, _ = env.reset(options={"prompt_id": prompt_id})
    return " ".join(observation.lower().split())


def _is_storable(prompt_id: Any) -> bool:
    if isinstance(prompt_id, tuple):
        return all(map(_is_storable, prompt_id))
    return isinstance(prompt_id, _STORABLE)


def told(error: Exception) -> str:
    """Returns an error's type and message."""
    return f"{type(error).__name__}: {error}"
