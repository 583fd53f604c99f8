"""ExGRPO on a task of reasoning-gym, on two CPU cores.

Task: `chain_sum` of the package reasoning-gym, two numbers of one or two digits (2,048
problems for training, 128 others, held out, to evaluate), judged by the package's own
scorer. Model: `tiny-arithmetic`, which puts sums into a box. Needs the extra
`reasoning-gym`; other tasks by `--config '{"env_config": {"task": "..."}}'`.

Hardware: 2 CPU cores, 4 GB of memory, no GPU. Time: some minutes.

Expected curve: near 0 at first, as the question's wording is new to the model. The
example shows the environment's settings and that a run works; how far this model gets
in 20 steps was not measured.
"""

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import ReasoningGymEnv

task = {
    "task": "chain_sum",
    "task_config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "instruction": "",
    "answer_tag": None,  # the model writes \boxed{...}
}

config = (
    ExGRPOConfig()
    .environment(ReasoningGymEnv, env_config={**task, "split": "train"})
    .language_model("tiny-arithmetic", max_prompt_tokens=192, max_completion_tokens=64)
    .training(lr=1e-4, prompts_per_step=32, prompts_per_update=16, group_size=8)
    .learners(num_learners=0, max_tokens_per_micro_batch=2048)
    .evaluation(
        evaluation_interval=10,
        evaluation_config={"env_config": {"split": "heldout", "num_problems": 128}},
        evaluation_temperature=1.0,
    )
    .debugging(seed=0)
)

stop = {"training_iteration": 20}
