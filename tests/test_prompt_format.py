import pytest
from transformers import AutoTokenizer

from rllib_exgrpo.policy import resolve_model
from rllib_exgrpo.prompt_format import PromptFormatter

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2?"},
]


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model("tiny-arithmetic"))


def test_plain_format_takes_the_last_user_message(tokenizer):
    formatter = PromptFormatter(tokenizer, plain_template="Q: {prompt}\nA:")
    assert formatter.text(MESSAGES) == "Q: What is 1 + 2?\nA:"
    assert tokenizer.decode(formatter.token_ids(MESSAGES)) == "Q: What is 1 + 2?\nA:"


def test_chat_format_uses_the_template_and_the_prefix(tokenizer):
    tokenizer.chat_template = CHATML
    formatter = PromptFormatter(tokenizer, assistant_prefix="<think>")
    assert formatter.text(MESSAGES) == (
        "<|system|>Be brief.\n<|user|>What is 1 + 2?\n<|assistant|><think>"
    )


def test_a_system_prompt_replaces_the_problems_own(tokenizer):
    tokenizer.chat_template = CHATML
    formatter = PromptFormatter(tokenizer, system_prompt="Think.")
    assert formatter.text(MESSAGES).startswith("<|system|>Think.\n<|user|>")
    assert "brief" not in formatter.text(MESSAGES)


def test_chat_format_without_a_template_names_both_ways_out(tokenizer):
    with pytest.raises(ValueError, match=r"no chat template.*'plain'.*comes with"):
        PromptFormatter(tokenizer, prompt_format="chat")


def test_a_chat_template_that_writes_bos_gives_exactly_one(tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    formatter = PromptFormatter(tokenizer)
    assert formatter.text(MESSAGES).count("<bos>") == 1
    ids = formatter.token_ids(MESSAGES).tolist()
    assert ids.count(tokenizer.bos_token_id) == 1
