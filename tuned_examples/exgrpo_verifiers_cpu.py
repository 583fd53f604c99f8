r"""ExGRPO on a taskset of the package verifiers, on two CPU cores.

Task: sums of two numbers of one or two digits (2,048 for training, 128 others, held
out, to evaluate), written as a taskset: `sums` below. Its rewards are the package's.
Model: `tiny-arithmetic`. Needs the extra `verifiers`. An installed taskset is named by
its id: `--config '{"env_config": {"taskset": "...", "taskset_config": {}}}'`.

Hardware: 2 CPU cores, 4 GB of memory, no GPU. Time: some minutes.

Expected curve: held-out pass@1 at temperature 1 rose from 47.7 +- 4.4 to 61.7 +- 4.3 %
in the first 10 steps, which took a minute; the rest was not measured.
"""

import random
from typing import Any

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import VerifiersEnv


def sums(split: str) -> Any:
    """Returns a taskset of sums; splits share none of them."""
    import verifiers.v1 as vf

    class SumData(vf.TaskData):
        answer: str

    class Sum(vf.Task[SumData]):
        @vf.reward
        async def is_right(self, task: Any, trace: Any) -> float:
            text = trace.messages[-1].content
            return float(f"\\boxed{{{task.answer}}}" in text)

    class Sums(vf.Taskset):
        def load(self) -> Any:
            pairs = [(a, b) for a in range(100) for b in range(100)]
            random.Random(0).shuffle(pairs)
            first, last = {"train": (0, 2048), "heldout": (2048, 2176)}[split]
            for a, b in pairs[first:last]:
                yield Sum(SumData(prompt=f"What is {a} + {b}?", answer=str(a + b)))

    return Sums(vf.TasksetConfig())


def settings(split: str) -> dict[str, Any]:
    """Returns the environment's settings for a split."""
    taskset = "rllib_exgrpo.tuned_examples.exgrpo_verifiers_cpu:sums"
    return {"taskset": taskset, "taskset_config": {"split": split}}


config = (
    ExGRPOConfig()
    .environment(VerifiersEnv, env_config=settings("train"))
    .language_model("tiny-arithmetic", max_prompt_tokens=64, max_completion_tokens=64)
    .training(lr=1e-4, prompts_per_step=32, prompts_per_update=16, group_size=8)
    .learners(num_learners=0, max_tokens_per_micro_batch=1024)
    .evaluation(
        evaluation_interval=10,
        evaluation_config={"env_config": settings("heldout")},
        evaluation_temperature=1.0,
    )
    .debugging(seed=0)
)

stop = {"training_iteration": 20}
