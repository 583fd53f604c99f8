"""Population-based training over learning rate, replay ratio and entropy coefficient.

Three trials. After every 4 steps the worst takes over a checkpoint of the best, which
is its weights, optimiser, replay buffer and place in the data, and goes on with
settings that are changed at random.

Hardware: 2 CPU cores, 6 GB of memory, no GPU. Time: about 6 minutes, most of it for
starting engines: a trial that waits or changes starts anew.

Expected result: trials with too low a learning rate are replaced, so that all end close
to the best.
"""

from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

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
        replay_ratio=tune.uniform(0.0, 0.75),
        entropy_coeff=tune.loguniform(1e-4, 1e-2),
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

tune_config = tune.TuneConfig(
    num_samples=3,
    scheduler=PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=4,  # a multiple of `evaluation_interval`
        quantile_fraction=0.34,
        hyperparam_mutations={
            "lr": tune.loguniform(1e-6, 3e-4),
            "replay_ratio": tune.uniform(0.0, 0.75),
            "entropy_coeff": tune.loguniform(1e-4, 1e-2),
        },
        require_attrs=False,  # not every step evaluates
    ),
)
