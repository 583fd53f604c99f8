r"""Rebuilds the tiny base model: `python -m rllib_exgrpo.tiny_model.build --out DIR`.

The model is pre-trained on written-out column additions, units first, many of them with
slips (a carry forgotten, a sum off by one) that stay in:

    What is 58 + 367?
    8+7=15 1+5+6=12 1+3=4 \boxed{425}<eos>

It copies digits and format well and slips as often as its data. Sampled, it is right on
some completions of nearly every problem: room for reinforcement learning.
"""

import argparse
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

MAX_LENGTH = 16384  # rotary positions: a declaration, which the default config fits
MAX_DIGITS = 4
FORGET_CARRY = 0.55
MISCOUNT = 0.2
STEPS = 700
BATCH_SIZE = 32
MATRIX_LEARNING_RATE = 0.02
LEARNING_RATE = 2e-3


def build_tokenizer() -> Qwen2Tokenizer:
    """Returns a tokenizer with one token a character (a byte beyond ASCII).

    It is a `Qwen2Tokenizer` without merges: transformers loads no other class for the
    model type "qwen2", whatever the tokenizer's own files say.
    """
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokens = [*special.values(), *sorted(ByteLevel.alphabet())]
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        **special,
    )


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Returns the untrained model; its weights follow torch's global seed."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def draw_operand(rng: random.Random) -> int:
    """Draws a number of digits, then a number that has them."""
    digits = rng.randint(1, MAX_DIGITS)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def write_out(
    a: int,
    b: int,
    rng: random.Random,
    forget_carry: float = FORGET_CARRY,
    miscount: float = MISCOUNT,
) -> str:
    """Writes the column addition of `a` and `b` and the boxed answer it leads to.

    Args:
        a: the first number, not negative.
        b: the second number, not negative.
        rng: draws the slips.
        forget_carry: probability that a carry is left out of the next column.
        miscount: probability that the sum of a column is one off.
    """
    numbers = [str(a)[::-1], str(b)[::-1]]
    steps, answer, carry = [], "", 0
    for place in range(max(map(len, numbers))):
        terms = [int(digits[place]) for digits in numbers if place < len(digits)]
        if carry and rng.random() >= forget_carry:
            terms.insert(0, carry)
        written, total = "+".join(map(str, terms)), sum(terms)
        if len(terms) > 1:
            if rng.random() < miscount:
                total = max(total + rng.choice((-1, 1)), 0)
            written += f"={total}"
        steps.append(written)
        carry, digit = divmod(total, 10)
        answer = f"{digit}{answer}"
    return " ".join([*steps, f"\\boxed{{{carry or ''}{answer}}}"])


def training_batch(
    tokenizer: Qwen2Tokenizer, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and labels (-100 outside completions), both (B, T) int64."""
    ids, labels = [], []
    for _ in range(BATCH_SIZE):
        a, b = draw_operand(rng), draw_operand(rng)
        prompt = tokenizer.encode(f"What is {a} + {b}?\n")
        completion = tokenizer.encode(write_out(a, b, rng) + tokenizer.eos_token)
        ids.append(torch.tensor(prompt + completion))
        labels.append(torch.tensor([-100] * len(prompt) + completion))
    # Padded on the right, so the causal model needs no attention mask.
    return pad_sequence(ids, True, tokenizer.pad_token_id), pad_sequence(
        labels, True, -100
    )


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the (M, N) matrix with its singular values moved to about one."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalised(matrix.T).T
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):  # Newton-Schulz steps, with the coefficients Muon is known by
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum for matrices, orthogonalised: learns this task 3 times as fast as AdamW.

    `torch.optim.Muon` works in bfloat16, which makes its step 20 times slower than this
    one on a CPU without bfloat16 instructions.
    """

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every matrix by its gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                update = orthogonalised(p.grad.lerp(momentum, 0.95))
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.add_(update, alpha=-group["lr"] * scale)


def build_optimizers(model: Qwen2ForCausalLM) -> list[torch.optim.Optimizer]:
    """Returns Muon for the layers' matrices and AdamW for all else."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    ids = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in ids]
    return [
        Muon(matrices, MATRIX_LEARNING_RATE),
        torch.optim.AdamW(others, LEARNING_RATE, weight_decay=0.0),
    ]


def pretrain(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, rng: random.Random, steps: int
) -> None:
    """Trains `model` in place to write additions as `write_out` does."""

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 20, 2 * (1 - step / steps))

    optimizers = build_optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, rate) for o in optimizers]
    for step in range(steps):
        ids, labels = training_batch(tokenizer, rng)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} of {steps}: loss {loss.item():.4f}", flush=True)


def build(out: Path, seed: int = 0, steps: int = STEPS) -> None:
    """Pre-trains a model and saves it with its tokenizer, for `from_pretrained`.

    The same seed gives the same weights on the same kind of machine.

    Args:
        out: folder to write to; made if missing.
        seed: of the initial weights, the problems and their slips.
        steps: optimiser steps.
    """
    torch.set_num_threads(1)  # the order of sums, and so the result, depends on it
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    pretrain(model, tokenizer, random.Random(seed), steps)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Parses the command line and builds."""
    parser = argparse.ArgumentParser(description="Rebuild the tiny base model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimiser steps")
    args = parser.parse_args()
    build(args.out, args.seed, args.steps)


if __name__ == "__main__":
    main()
