"""The paper's main run: ExGRPO on Qwen2.5-Math-7B, on one node with 8 GPUs.

NOT RUN ON A GPU by this project: the settings are checked, speed and results are not.

Hardware: one node with 8 GPUs of 80 GB: 4 learners (ZeRO-3) and 4 vLLM engines. The
paper used 8 H100, for about 155 s a step without and 185 s with replay in its own
software.

Data: verl-form parquet files, given by environment variables.

- `EXGRPO_TRAIN_PARQUET`: the training problems (the paper: 45,000 of OpenR1-Math, on
  the Hugging Face hub as `Elliott/Openr1-Math-46k-8192`).
- `EXGRPO_HELDOUT_PARQUET`: the evaluation problems. The authors' `valid.parquet` has
  2,259 rows on the same questions as their test set: choose no checkpoint by it.

Expected result: the row "ExGRPO" of the paper's table 1, after 700 steps and with 32
samples a problem on AIME and AMC: AIME24 31.6, AIME25 18.7, AMC 66.3, MATH-500 87.4,
Minerva 36.0, OlympiadBench 50.1, mean 48.3; on-policy 45.3. Each is one run, without
error bars; with 30 problems, AIME's standard error is 5 to 8 points. This file stops at
500 steps, the paper's number for its other models; for the 700 of this one:

    rllib example run exgrpo_qwen2.5_math_7b --stop '{"training_iteration": 700}'

The model on the hub reads 4,096 tokens. As the authors did, this stretches its rotary
positions to 16,384, in the engine and in the learner.
"""

import os

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import MathEnv

train = os.environ.get("EXGRPO_TRAIN_PARQUET", "EXGRPO_TRAIN_PARQUET.parquet")
heldout = os.environ.get("EXGRPO_HELDOUT_PARQUET", "EXGRPO_HELDOUT_PARQUET.parquet")

config = (
    ExGRPOConfig.preset("paper")
    .environment(MathEnv, env_config={"data": train, "on_bad_rows": "drop"})
    .language_model(
        "Qwen/Qwen2.5-Math-7B",
        model_dtype="bfloat16",
        model_config_overrides={
            "max_position_embeddings": 16384,
            "rope_parameters": {"rope_type": "default", "rope_theta": 40000.0},
        },
        gradient_checkpointing=True,
        max_prompt_tokens=1024,
        max_completion_tokens=8192,
        long_prompts="drop",
    )
    .training(
        lr=1e-6,
        prompts_per_step=128,
        prompts_per_update=64,
        group_size=8,
        replay_ratio=0.5,
        replay_start_pass_rate=0.35,
        shaping_beta=0.1,
    )
    .engine(gpu_memory_utilization=0.8, tensor_parallel_size=1)
    .env_runners(num_env_runners=4, num_gpus_per_env_runner=1)
    .learners(
        num_learners=4,
        num_gpus_per_learner=1,
        zero_stage=3,
        max_tokens_per_micro_batch=32768,
    )
    .evaluation(
        evaluation_interval=10,
        evaluation_config={"env_config": {"data": heldout}},
        evaluation_temperature=0.6,
        evaluation_samples_per_prompt=1,
    )
    .debugging(seed=0)
)

stop = {"training_iteration": 500}
