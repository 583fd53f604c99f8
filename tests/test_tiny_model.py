import random
import re
import string
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllib_exgrpo import tiny_model
from rllib_exgrpo.tiny_model.build import build, draw_operand, write_out

ASCII = "\n" + string.printable[:95]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model.path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(tiny_model.path())


def test_folder_stays_small():
    sizes = [file.stat().st_size for file in Path(tiny_model.path()).iterdir()]
    assert sum(sizes) < 4e6


def test_model_is_a_small_qwen2_in_float32(model):
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert model.config.max_position_embeddings >= 1024
    assert 5e5 < sum(p.numel() for p in model.parameters()) < 1e6


def test_special_tokens_are_distinct_and_known_to_the_model(tokenizer, model):
    ids = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert None not in ids
    assert len(set(ids)) == 3
    assert tokenizer.bos_token_id is None
    assert tokenizer.chat_template is None
    assert model.config.pad_token_id == ids[0]
    assert model.config.eos_token_id == ids[1] == model.generation_config.eos_token_id
    assert len(tokenizer) == model.config.vocab_size


@given(st.text(ASCII))
def test_ascii_text_makes_the_round_trip_one_token_a_character(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["a\n\nb \\boxed{12} ?", "3 ÷ π ≤ 10"])
def test_other_text_makes_the_round_trip_too(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("a", "b", "forget_carry", "expected"),
    [
        (58, 367, 0, r"8+7=15 1+5+6=12 1+3=4 \boxed{425}"),
        (5, 5, 0, r"5+5=10 \boxed{10}"),
        (0, 4321, 0, r"0+1=1 2 3 4 \boxed{4321}"),
        # Both carries left out: 8+7=15 -> 5, 5+6=11 -> 1, 3.
        (58, 367, 1, r"8+7=15 5+6=11 3 \boxed{315}"),
    ],
)
def test_additions_are_written_out(a, b, forget_carry, expected):
    assert write_out(a, b, random.Random(0), forget_carry, miscount=0) == expected


@given(st.integers(0, 9999), st.integers(0, 9999), st.integers())
def test_an_addition_without_slips_is_right(a, b, seed):
    text = write_out(a, b, random.Random(seed), forget_carry=0, miscount=0)
    assert text.endswith(rf"\boxed{{{a + b}}}")


def test_a_miscounted_column_is_one_off():
    texts = {write_out(3, 4, random.Random(i), 0, miscount=1) for i in range(20)}
    assert texts == {r"3+4=6 \boxed{6}", r"3+4=8 \boxed{8}"}


def sampled_pass_rate(model, tokenizer, num_problems):
    """Samples one completion for each of some random additions at temperature 1."""
    rng = random.Random(1)
    pairs = [(draw_operand(rng), draw_operand(rng)) for _ in range(num_problems)]
    prompts = [f"What is {a} + {b}?\n" for a, b in pairs]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    torch.manual_seed(0)
    ids = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=64)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    answers = [re.findall(r"\\boxed\{(\d+)\}", text) for text in texts]
    right = [
        found == [str(a + b)] for found, (a, b) in zip(answers, pairs, strict=True)
    ]
    return sum(right) / num_problems


def test_model_is_right_now_and_then(model, tokenizer):
    # The standard error of 256 draws is 3 points.
    assert 0.25 < sampled_pass_rate(model, tokenizer, 256) < 0.5


def test_build_follows_its_seed(tmp_path):
    for name, seed in [("one", 1), ("same", 1), ("other", 2)]:
        build(tmp_path / name, seed=seed, steps=3)
    weights = {
        name: (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("one", "same", "other")
    }
    assert weights["one"] == weights["same"] != weights["other"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert AutoTokenizer.from_pretrained(tmp_path / "one").decode([3]) == "!"
