"""The baseline of `exgrpo_arithmetic_cpu`: the same task and settings without replay.

This is Dr. GRPO: each completion is used once, and solved prompts are drawn again.

Hardware: 2 CPU cores, 4 GB of memory, no GPU. Time: about 5 minutes.

Expected curve: held-out pass@1 at temperature 1 starts between 25 and 50 % and rises.
It is to be held against `exgrpo_arithmetic_cpu` by completions sampled (11,520 in both
runs, within 1 %), not by steps:

    rllib report results/exgrpo_arithmetic_cpu results/on_policy_arithmetic_cpu
"""

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import ArithmeticEnv

config = (
    ExGRPOConfig.preset("on_policy")
    .environment(ArithmeticEnv, env_config={"split": "train"})
    .language_model("tiny-arithmetic", max_prompt_tokens=64, max_completion_tokens=64)
    .training(lr=1e-4, prompts_per_step=32, prompts_per_update=16, group_size=8)
    .env_runners(num_env_runners=0)
    .learners(num_learners=0, max_tokens_per_micro_batch=1024)
    .evaluation(
        evaluation_interval=9,
        evaluation_config={"env_config": {"split": "heldout"}},
        evaluation_temperature=1.0,
        evaluation_samples_per_prompt=2,
    )
    .debugging(seed=0)
)

stop = {"training_iteration": 45}
