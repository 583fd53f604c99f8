"""ExGRPO on GSM8K's word problems with a small model, on one GPU.

NOT RUN ON A GPU by this project: the settings are checked, speed and results are not.

Data: `EXGRPO_GSM8K_TRAIN` and `EXGRPO_GSM8K_TEST` name parquet, JSON-lines or CSV files
with the columns `question` and `answer` (`... #### 18`), such as those of
`openai/gsm8k` on the Hugging Face hub.

Hardware: one GPU of 24 GB or more.

Expected curve: not measured.
"""

import os

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import GSM8KEnv

train = os.environ.get("EXGRPO_GSM8K_TRAIN", "EXGRPO_GSM8K_TRAIN.parquet")
test = os.environ.get("EXGRPO_GSM8K_TEST", "EXGRPO_GSM8K_TEST.parquet")

config = (
    ExGRPOConfig()
    .environment(GSM8KEnv, env_config={"data": train})
    .language_model(
        "Qwen/Qwen2.5-0.5B-Instruct",
        model_dtype="bfloat16",
        max_prompt_tokens=512,
        max_completion_tokens=512,
    )
    .training(prompts_per_step=64, prompts_per_update=32, group_size=8)
    .engine(gpu_memory_utilization=0.4)
    .env_runners(num_env_runners=1, num_gpus_per_env_runner=0.5)
    .learners(num_learners=1, num_gpus_per_learner=0.5)
    .evaluation(
        evaluation_interval=20,
        evaluation_config={"env_config": {"data": test}},
        evaluation_max_prompts=256,
    )
    .debugging(seed=0)
)

stop = {"training_iteration": 200}
