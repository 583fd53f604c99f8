"""ExGRPO on a file of competition problems in verl's form, on two CPU cores.

Data: `EXGRPO_COMPETITION_PARQUET` names a verl-form parquet file (`prompt`,
`reward_model.ground_truth`, `data_source`), which `MathEnv` reads and judges.
Model: `tiny-arithmetic`.

Hardware: 2 CPU cores, 4 GB of memory, no GPU. Time: some minutes.

Expected curve: flat at 0; the model adds numbers and no more. The example shows that
real problems go through reading, checking, sampling, judging and learning. With a real
model, start from `exgrpo_qwen2.5_math_7b`.
"""

import os

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import MathEnv

data = os.environ.get(
    "EXGRPO_COMPETITION_PARQUET", "EXGRPO_COMPETITION_PARQUET.parquet"
)

config = (
    ExGRPOConfig()
    .environment(MathEnv, env_config={"data": data})
    .language_model(
        "tiny-arithmetic",
        max_prompt_tokens=768,
        max_completion_tokens=64,
        long_prompts="drop",
    )
    .training(lr=1e-4, prompts_per_step=16, prompts_per_update=8, group_size=8)
    .learners(num_learners=0, max_tokens_per_micro_batch=4096)
    .evaluation(evaluation_interval=10, evaluation_max_prompts=64)
    .debugging(seed=0)
)

stop = {"training_iteration": 10}
