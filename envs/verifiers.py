"""Single-turn tasksets of the package verifiers, judged by their own rewards."""

import asyncio
import importlib
import inspect
import signal
import threading
from collections.abc import Coroutine, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

from .base import Problem, VerifiableTextEnv
from .verdict import Reason, Verdict


class VerifiersEnv(VerifiableTextEnv):
    """Asks the tasks of a taskset of verifiers (its version 1 interface).

    Rewards: the weighted sum of the task's rewards on a trace of one prompt and one
    completion, mapped from `reward_range` to [0, 1]. Tasks that need tools, a
    container, an agent's runtime or several turns are refused.

    Settings:
        taskset: id of an installed taskset, which its own loader opens; or
            "module:function", which returns a taskset.
        taskset_config: settings of the taskset, or arguments of the function.
        limit: keep only so many tasks; None keeps all.
        reward_range: rewards of a wrong and of a right answer.
        answer_field: the field of the task's data that holds the gold answer.
        gold_template: a completion with the gold answer in place of `{answer}`.
        scoring_time_limit_s: wall time for one answer, after which it counts as
            unknown. It cannot interrupt a reward that blocks.
    """

    settings: ClassVar = {
        "taskset": None,
        "taskset_config": {},
        "limit": None,
        "reward_range": (0.0, 1.0),
        "answer_field": "answer",
        "gold_template": r"\boxed{{{answer}}}",
        "scoring_time_limit_s": 60.0,
    }

    def load(self) -> Iterator[Problem]:
        """Opens the taskset and makes a problem of each task.

        Raises:
            ImportError: without the package.
            ValueError: for a taskset that cannot be used, with the reason.
        """
        taskset = self._open()
        if self.config["limit"] is not None:
            taskset = taskset.take(self.config["limit"])
        elif not taskset.bounded:
            raise ValueError(
                f"The taskset {self.config['taskset']!r} never ends: set `limit`."
            )
        name = str(self.config["taskset"])
        if type(taskset).toolsets(taskset.config):
            raise ValueError(f"The taskset {name!r} has tools, {_SINGLE_TURN}")
        for task in taskset:
            obstacle = _obstacle(task)
            if obstacle:
                raise ValueError(f"A task of {name!r} {obstacle}, {_SINGLE_TURN}")
            yield Problem(task.key, _messages(task.data), task, name)

    def verify(self, completion: str, problem: Problem) -> Verdict:
        """Asks the task's rewards."""
        return self.verify_many([completion], [problem])[0]

    def verify_many(
        self, completions: Sequence[str], problems: Sequence[Problem]
    ) -> list[Verdict]:
        """Asks the tasks' rewards, all at once where they wait for something."""
        pairs = zip(completions, problems, strict=True)
        return self._loop.run(_gather([self._judge(c, p.answer) for c, p in pairs]))

    def gold_completion(self, problem: Problem) -> str:
        """Puts the gold answer into the setting `gold_template`."""
        answer = getattr(problem.answer.data, self.config["answer_field"])
        return self.config["gold_template"].format(answer=answer)

    def close(self) -> None:
        """Ends the thread that rewards run in; it starts again when needed."""
        loop = self.__dict__.pop("_loop", None)
        if loop is not None:
            loop.close()

    def __getstate__(self) -> dict[str, Any]:
        # Tasks hold what cannot travel; they are loaded again.
        left_out = ("_loop", "_problems", "_prompt_ids", "_problem")
        return {k: v for k, v in self.__dict__.items() if k not in left_out} | {
            "_problem": None
        }

    async def _judge(self, completion: str, task: Any) -> Verdict:
        trace = _trace(task, completion)
        limit_s = self.config["scoring_time_limit_s"]
        try:
            await asyncio.wait_for(task.score(trace), limit_s)
        except TimeoutError:
            return Verdict.of(Reason.TIMEOUT, f"no verdict within {limit_s:g} s")
        except Exception as error:  # any: rewards are the taskset's own code
            return Verdict.of(Reason.ERROR, f"{type(error).__name__}: {error}")
        low, high = self.config["reward_range"]
        reward = (trace.reward - low) / (high - low)
        if not 0.0 <= reward <= 1.0:
            return Verdict.of(
                Reason.ERROR,
                f"the taskset's reward is {trace.reward}: set `reward_range`",
            )
        return Verdict(reward, Reason.OK if reward >= 1.0 else Reason.WRONG)

    @cached_property
    def _loop(self) -> "_LoopThread":
        return _LoopThread()

    def _open(self) -> Any:
        vf = _import_package()
        name, settings = self.config["taskset"], self.config["taskset_config"]
        if not name:
            raise ValueError(
                "`VerifiersEnv` needs the setting `taskset`: the id of an installed "
                "taskset, or MODULE:FUNCTION."
            )
        with _SignalsKept():
            if ":" in name:
                module, _, function = name.partition(":")
                return getattr(importlib.import_module(module), function)(**settings)
            if vf.environment_class(name) is not vf.SingleAgentEnv:
                raise ValueError(
                    f"The taskset {name!r} has its own environment, {_SINGLE_TURN}"
                )
            config_class = vf.taskset_config_type(name)
            return vf.load_taskset(config_class(id=name, **settings))


_SINGLE_TURN = (
    "and an episode here is one prompt and one completion: take a taskset whose "
    "rewards read the completion alone."
)


class _LoopThread:
    """An event loop in a thread of its own, which lives as long as the environment.

    Rewards may hold connections that belong to their loop, and the caller's thread may
    have a loop that is running.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Ends loop and thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _SignalsKept:
    """Puts the caller's signal handlers back: loaders of tasksets may set their own."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> None:
        self._handlers = [signal.getsignal(number) for number in self._SIGNALS]

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self._SIGNALS, self._handlers, strict=True):
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


async def _gather(work: Sequence[Coroutine[Any, Any, Verdict]]) -> list[Verdict]:
    return await asyncio.gather(*work)


def _obstacle(task: Any) -> str:
    """Names what keeps a task from being one prompt and one completion."""
    vf = _import_package()
    if task.data.prompt is None:
        return "has no prompt"
    if type(task).toolsets(task.config):
        return "has tools"
    if task.NEEDS_CONTAINER or task.data.image:
        return "needs a container"
    for hook in ("setup", "finalize"):
        if getattr(type(task), hook) is not getattr(vf.Task, hook):
            return f"overrides `{hook}`, which works on an agent's runtime"
    for reward in task.hooks("reward"):
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"has the reward `{reward.__name__}`, which needs a runtime"
    return ""


def _messages(data: Any) -> tuple[dict[str, str], ...]:
    """Returns a task's prompt as chat messages of texts."""
    messages = [{"role": "system", "content": data.system_prompt}] * bool(
        data.system_prompt
    )
    if isinstance(data.prompt, str):
        return (*messages, {"role": "user", "content": data.prompt})
    for message in data.prompt:
        if not isinstance(message.content, str):
            raise ValueError(
                f"A prompt has a {message.role} message that is no plain text, such as "
                "an image or a tool's call, which this environment does not handle."
            )
        messages.append({"role": message.role, "content": message.content})
    return tuple(messages)


def _trace(task: Any, completion: str) -> Any:
    """Returns the trace of an agent that answered once."""
    vf = _import_package()
    from verifiers.v1.state import state_cls

    nodes: list[Any] = []
    for message in _messages(task.data):
        kind = {"system": vf.SystemMessage, "user": vf.UserMessage}.get(
            message["role"], vf.AssistantMessage
        )
        nodes.append(_node(vf, nodes, kind(content=message["content"])))
    answer = vf.AssistantMessage(content=completion)
    nodes.append(_node(vf, nodes, answer, sampled=True))
    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        state=state_cls(type(task))(),
        is_completed=True,
        ok=True,
    )


def _node(vf: Any, nodes: list[Any], message: Any, sampled: bool = False) -> Any:
    parent = len(nodes) - 1 if nodes else None
    return vf.MessageNode(parent=parent, message=message, sampled=sampled)


def _import_package() -> Any:
    try:
        import verifiers.v1
    except ImportError as error:
        raise ImportError(
            "`VerifiersEnv` needs the package verifiers: install it with "
            '`pip install "rllib_exgrpo[verifiers]"`.'
        ) from error
    return verifiers.v1
