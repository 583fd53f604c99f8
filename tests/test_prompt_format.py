import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from rllib_exgrpo.policy import resolve_model
from rllib_exgrpo.prompt_format import NAMED_FORMATS, PromptFormatter

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2?"},
]


@pytest.fixture(scope="session")
def shared_tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model("tiny-arithmetic"))


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


def bos_tokenizer(tokenizer, template=None, adds_bos=True):
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.chat_template = template
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A <eos>",
            special_tokens=[
                ("<bos>", tokenizer.bos_token_id),
                ("<eos>", tokenizer.eos_token_id),
            ],
        )
    return tokenizer


@pytest.mark.parametrize("template", ["{{ bos_token }}" + CHATML, CHATML, None])
@pytest.mark.parametrize("plain_template", ["{prompt}", "<bos>{prompt}"])
@pytest.mark.parametrize("max_tokens", [None, 7])
def test_exactly_one_bos_and_no_end(tokenizer, template, plain_template, max_tokens):
    tokenizer = bos_tokenizer(tokenizer, template)
    formatter = PromptFormatter(
        tokenizer, plain_template=plain_template, max_tokens=max_tokens
    )
    ids = formatter.token_ids(MESSAGES).tolist()
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids
    if max_tokens:
        whole = PromptFormatter(tokenizer, plain_template=plain_template)
        assert ids[1:] == whole.token_ids(MESSAGES).tolist()[-6:]


def test_a_bos_that_only_the_template_writes_survives_the_cut(tokenizer):
    tokenizer = bos_tokenizer(tokenizer, "{{ bos_token }}" + CHATML, adds_bos=False)
    ids = PromptFormatter(tokenizer, max_tokens=5).token_ids(MESSAGES).tolist()
    assert len(ids) == 5 and ids[0] == tokenizer.bos_token_id


@settings(deadline=None)
@given(text=st.text(alphabet="ab<>eos |\n", max_size=20), markers=st.integers(0, 3))
def test_special_token_text_splits_for_any_text(shared_tokenizer, text, markers):
    tokenizer = shared_tokenizer
    question = text + "<eos>" * markers + text
    messages = [{"role": "user", "content": question}]
    ids = PromptFormatter(tokenizer, plain_template="{prompt}<eos>").token_ids(messages)
    assert ids.tolist().count(tokenizer.eos_token_id) == 1  # the template's own
    assert tokenizer.decode(ids) == question + "<eos>"


def test_the_papers_prompt_is_a_named_format(tokenizer):
    tokenizer.chat_template = CHATML
    formatter = PromptFormatter(tokenizer, prompt_format="paper")
    text = formatter.text(MESSAGES)
    assert text.startswith("<|system|>Your task is to follow a systematic")
    assert "brief" not in text
    assert text.endswith(
        "<|user|>This is the problem: What is 1 + 2?\n<|assistant|><think>\n"
    )
    assert formatter.assistant_prefix == "<think>\n"
    own = PromptFormatter(tokenizer, prompt_format="paper", system_prompt="Think.")
    assert own.text(MESSAGES).startswith("<|system|>Think.\n<|user|>This is")


def test_the_papers_prompt_for_the_llama_base_model(tokenizer):
    formatter = PromptFormatter(tokenizer, prompt_format="paper_llama")
    assert formatter.text(MESSAGES) == (
        "User: What is 1 + 2?\nAnswer: Let's think step by step."
    )


def test_the_papers_prompt_is_that_of_the_authors_file(shared_dir, tokenizer):
    path = shared_dir / "data" / "competition_math_verl.parquet"
    prompt = pq.read_table(path, columns=["prompt"]).slice(0, 1).to_pylist()[0]
    assert prompt["prompt"][0] == {
        "role": "system",
        "content": NAMED_FORMATS["paper"]["system_prompt"],
    }
