"""ExGRPO on countdown: reach a number with given numbers and + - * /, on two CPU cores.

Task: 2 or 3 numbers up to 20 and a target up to 30 (`CountdownEnv`; 2,048 problems for
training, 128 others, held out, to evaluate). Model: `tiny-arithmetic`, which has only
seen sums and writes no expressions.

Hardware: 2 CPU cores, 4 GB of memory, no GPU. Time: some minutes.

Expected curve: flat at 0. The example shows the environment's settings and that a run
works; to learn the task, name a model that can write expressions:

    rllib example run exgrpo_countdown_cpu --config '{"model_name_or_path": "..."}'
"""

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import CountdownEnv

task = {"num_numbers": (2, 3), "max_number": 20, "max_target": 30}

config = (
    ExGRPOConfig()
    .environment(CountdownEnv, env_config={**task, "split": "train"})
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
