"""ExGRPO on multiple-choice questions in the form of ARC, with a small model.

NOT RUN ON A GPU by this project: the settings are checked, speed and results are not.

Data: `EXGRPO_CHOICES_TRAIN` and `EXGRPO_CHOICES_TEST` name parquet or JSON-lines files
with the columns `question`, `choices` and `answerKey`, such as those of
`allenai/ai2_arc` on the Hugging Face hub. Choices are shuffled: a letter that is right
more often than others would be learned instead of the questions.

Hardware: one GPU of 24 GB or more.

Expected curve: not measured. Guessing gives about 25 %, and in a group of 8 nearly
always some correct completion: such luck is stored too, so that replay starts late.
"""

import os

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import MultipleChoiceEnv

train = os.environ.get("EXGRPO_CHOICES_TRAIN", "EXGRPO_CHOICES_TRAIN.parquet")
test = os.environ.get("EXGRPO_CHOICES_TEST", "EXGRPO_CHOICES_TEST.parquet")

config = (
    ExGRPOConfig()
    .environment(
        MultipleChoiceEnv,
        env_config={"data": train, "answer_column": "answerKey", "shuffle_seed": 0},
    )
    .language_model(
        "Qwen/Qwen2.5-0.5B-Instruct",
        model_dtype="bfloat16",
        max_prompt_tokens=512,
        max_completion_tokens=512,
    )
    .training(
        prompts_per_step=64,
        prompts_per_update=32,
        group_size=8,
        replay_start_pass_rate=0.6,
    )
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
