"""A grid over the replay ratio rho, on the toy task, in minutes on two CPU cores.

Four trials of 12 steps each, two at a time: rho 0, 0.25, 0.5 and 0.75. It ends with a
table of held-out pass@1, best first.

Hardware: 2 CPU cores, 6 GB of memory, no GPU. Time: about 4 minutes.

Expected result: all trials end within a few points of each other, which is less than
the standard errors. It shows how a grid is written; the toy task is too short to tell
which rho is best.
"""

from ray import tune

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import ArithmeticEnv

config = (
    ExGRPOConfig()
    .environment(ArithmeticEnv, env_config={"split": "train"})
    .language_model("tiny-arithmetic", max_prompt_tokens=64, max_completion_tokens=64)
    .training(
        lr=1e-4,
        prompts_per_step=16,
        prompts_per_update=16,
        group_size=8,
        replay_ratio=tune.grid_search([0.0, 0.25, 0.5, 0.75]),
    )
    .learners(max_tokens_per_micro_batch=1024)
    .evaluation(
        evaluation_interval=4,
        evaluation_config={"env_config": {"split": "heldout"}},
        evaluation_temperature=1.0,
    )
    .debugging(seed=0)
)

stop = {"training_iteration": 12}
