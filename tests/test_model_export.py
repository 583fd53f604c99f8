"""What `rllib export` writes, read by transformers, peft and vLLM."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rllib_exgrpo.model_export import export_model, model_card
from rllib_exgrpo.policy import LanguagePolicy, load_tokenizer, resolve_model
from rllib_exgrpo.sampler import VLLMSampler

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
PROMPT = "What is 58 + 367?\n"


def base_folder(folder, *, tied=True) -> str:
    """The tiny model with a chat template, two end tokens and, if wanted, a head."""
    shutil.copytree(resolve_model("tiny-arithmetic"), folder)
    if not tied:
        policy = LanguagePolicy.from_pretrained("tiny-arithmetic")
        policy.model.config.tie_word_embeddings = False
        policy.model.config.use_cache = True
        model = type(policy.model)(policy.model.config)
        model.load_state_dict(policy.model.state_dict())
        model.save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 7], "temperature": 0.6, "do_sample": True})
    )
    return str(folder)


def settings(name, **changes):
    return {
        "name_or_path": name,
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "trust_remote_code": False,
        "config_overrides": {"max_position_embeddings": 2048},
        "lora_config": None,
        **changes,
    }


def trained(model_settings) -> LanguagePolicy:
    """A policy with other weights than the base model's."""
    policy = LanguagePolicy.from_pretrained(**model_settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.01 * noise)
    return policy


def logits(model) -> torch.Tensor:
    ids = torch.tensor([load_tokenizer("tiny-arithmetic")(PROMPT).input_ids])
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def export(policy, folder, model_settings, **options):
    export_model(
        policy.model.state_dict(),
        folder,
        model=model_settings,
        card="# card\n",
        **options,
    )


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_and_vllm_load_it(tmp_path, tied):
    model_settings = settings(base_folder(tmp_path / "base", tied=tied))
    policy = trained(model_settings)
    folder = tmp_path / "model"
    export(policy, folder, model_settings)

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(loaded), logits(policy.model), atol=1e-5, rtol=0)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118
    assert loaded.config.max_position_embeddings == 2048
    assert loaded.config.use_cache  # off in the learner only
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.eos_token_id, generation.temperature) == ([1, 7], 0.6)
    for file in folder.iterdir():  # nothing names this machine
        assert file.suffix == ".safetensors" or str(tmp_path) not in file.read_text()

    prompt = np.array(tokenizer(PROMPT).input_ids, np.int32)
    sampler = VLLMSampler(
        model_name_or_path=str(folder),
        tokenizer=tokenizer,
        dtype="float32",
        max_prompt_tokens=64,
        max_completion_tokens=8,
        engine_kwargs={"kv_cache_memory_bytes": 2**26, "enforce_eager": True},
    )
    ((sample,),) = sampler.sample([prompt], [1], temperature=0.0, seed=0)
    sampler.close()
    first = logits(policy.model)[0, -1]
    assert sample.token_ids[0] == first.argmax()
    # Greedy log-probs of vLLM are those of the untempered distribution.
    expected = float(first.log_softmax(-1).max())
    assert float(sample.logp[0]) == pytest.approx(expected, abs=1e-5)


def test_a_bfloat16_model_is_written_as_the_engine_has_it(tmp_path):
    model_settings = settings("tiny-arithmetic", dtype="bfloat16")
    weights = trained(settings("tiny-arithmetic")).model.state_dict()
    export_model(weights, tmp_path / "m", model=model_settings, card="")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert loaded.dtype == torch.bfloat16
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, weights[name].bfloat16(), atol=0, rtol=0)


def test_what_is_there_is_kept_unless_asked(tmp_path):
    model_settings = settings("tiny-arithmetic")
    policy = LanguagePolicy.from_pretrained(**model_settings)
    folder = tmp_path / "model"
    folder.mkdir()
    export(policy, folder, model_settings)  # an empty folder is fine
    (folder / "notes.txt").write_text("x")
    with pytest.raises(FileExistsError, match="not empty.*--overwrite"):
        export(policy, folder, model_settings)
    assert (folder / "notes.txt").exists()
    export(policy, folder, model_settings, overwrite=True)
    assert not (folder / "notes.txt").exists()
    assert [f.name for f in tmp_path.iterdir()] == ["model"]  # no left-overs


def test_a_failed_export_leaves_no_folder(tmp_path):
    with pytest.raises(RuntimeError, match=r"Missing key"):
        export_model({}, tmp_path / "model", model=settings("tiny-arithmetic"), card="")
    assert not (tmp_path / "model").exists()


LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def test_lora_is_written_merged_or_as_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    model_settings = settings("tiny-arithmetic", lora_config=LORA)
    policy = trained(model_settings)
    expected = logits(policy.model)
    base = AutoModelForCausalLM.from_pretrained(resolve_model("tiny-arithmetic"))
    assert (expected - logits(base)).abs().max() > 0.01

    export(policy, tmp_path / "merged", model_settings, merge_lora=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    # (W + BA) x and W x + B (A x) round differently, in float32.
    torch.testing.assert_close(logits(merged), expected, atol=5e-5, rtol=0)

    export(policy, tmp_path / "adapters", model_settings)
    with_adapters = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    torch.testing.assert_close(logits(with_adapters), expected, atol=1e-5, rtol=0)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny-arithmetic"


def test_the_model_card_has_settings_and_versions_but_no_paths(tmp_path):
    card = model_card(
        "my-model",
        settings={
            "model_name_or_path": base_folder(tmp_path / "base"),
            "temperature": 1.0,
            "max_prompt_tokens": 64,
            "max_completion_tokens": 32,
        },
        changed={
            "env": LanguagePolicy,
            "env_config": {"data": [str(tmp_path / "a.parquet")]},
            "lr": 1e-5,
        },
        iterations=7,
        adapters_only=False,
    )
    assert str(tmp_path) not in card
    assert "base_model: base\n" in card
    assert "for 7 steps" in card
    assert '"a.parquet"' in card
    assert '"LanguagePolicy"' in card
    assert f"- torch {torch.__version__}" in card
