"""ASHA over learning rate, beta and sigma, stopping on held-out pass@1.

Six trials are drawn, two run at a time. Each is judged after 4 and after 8 steps: the
lower half of those that came so far is stopped, the others go on to 12.

Hardware: 2 CPU cores, 6 GB of memory, no GPU. Time: about 4 minutes.

Expected result: trials with learning rates near 1e-4 come out on top; those near 1e-6
do not move in 12 steps and are stopped early.
"""

from ray import tune
from ray.tune.schedulers import ASHAScheduler

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import ArithmeticEnv

config = (
    ExGRPOConfig()
    .environment(ArithmeticEnv, env_config={"split": "train"})
    .language_model("tiny-arithmetic", max_prompt_tokens=64, max_completion_tokens=64)
    .training(
        lr=tune.loguniform(1e-6, 3e-4),
        prompts_per_step=16,
        prompts_per_update=16,
        group_size=8,
        shaping_beta=tune.uniform(0.05, 0.5),
        replay_buffer_config={"sigma": tune.uniform(0.05, 0.5)},
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

# What is compared is held-out pass@1; `metric` and `mode` can name something else.
tune_config = tune.TuneConfig(
    num_samples=6,
    scheduler=ASHAScheduler(
        time_attr="training_iteration", max_t=12, grace_period=4, reduction_factor=2
    ),
)
