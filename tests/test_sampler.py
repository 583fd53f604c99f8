"""The real vLLM engine against the learner's own model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rllib_exgrpo.batching import pad, rows_from_candidates
from rllib_exgrpo.exgrpo_rollout import request_seed
from rllib_exgrpo.policy import (
    LanguagePolicy,
    load_tokenizer,
    resolve_model,
    stop_token_ids,
)
from rllib_exgrpo.records import Completion
from rllib_exgrpo.sampler import VLLMSampler

ENGINE = {"kv_cache_memory_bytes": 2**27, "enforce_eager": True}
LONG_PROMPT = "What is 12 + 34?\n" * 20  # 340 tokens: more than two cache blocks


def make_sampler(path: str, engine=None) -> VLLMSampler:
    return VLLMSampler(
        model_name_or_path=path,
        tokenizer=load_tokenizer(path),
        dtype="float32",
        max_prompt_tokens=400,
        max_completion_tokens=48,
        engine_kwargs={**ENGINE, **(engine or {})},
    )


def untied_copy(folder: Path) -> str:
    """Writes the tiny model with an output head of its own."""
    policy = LanguagePolicy.from_pretrained("tiny-arithmetic")
    config = policy.model.config
    config.tie_word_embeddings = False
    model = type(policy.model)(config)
    state = policy.model.state_dict()
    model.load_state_dict(state)
    model.save_pretrained(folder)
    load_tokenizer("tiny-arithmetic").save_pretrained(folder)
    return str(folder)


def odd_generation_config(folder: Path) -> str:
    """Copies the tiny model with a generation config that would spoil training."""
    shutil.copytree(resolve_model("tiny-arithmetic"), folder, dirs_exist_ok=True)
    settings = {"top_k": 1, "temperature": 0.01, "repetition_penalty": 1.5}
    settings["eos_token_id"] = [1, 7]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request, tmp_path_factory):
    if request.param == "tied":
        folder = tmp_path_factory.mktemp("odd")
        path = odd_generation_config(folder)
    else:
        path = untied_copy(tmp_path_factory.mktemp("untied"))
    sampler = make_sampler(path)
    yield path, sampler
    sampler.close()


def encode(path: str, text: str) -> np.ndarray:
    return np.array(load_tokenizer(path)(text).input_ids, np.int32)


def learner_logp(policy, prompt, sample) -> np.ndarray:
    completion = Completion(sample.token_ids, sample.logp, 1.0, 0)
    batch = pad(rows_from_candidates([prompt], [completion]))
    with torch.no_grad():
        scores = policy(batch.input_ids, batch.attention_mask, batch.prediction_mask)
    return scores.logp.numpy()


# Bug reports 20, 21, 30 and 33: the sampled tokens' own log-probs, float32 parity, no
# stale prefix cache, tied and untied heads.
@pytest.mark.parametrize("text", ["What is 58 + 367?\n", LONG_PROMPT])
def test_log_probs_are_the_learners_before_and_after_new_weights(model, text):
    path, sampler = model
    prompt = encode(path, text)
    policy = LanguagePolicy.from_pretrained(path)
    for scale in (0.0, 0.05):  # as loaded, then clearly different weights
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in policy.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(scale * parameter.std() * noise)
        sampler.load_weights(policy.model.state_dict())
        (samples,) = sampler.sample([prompt], [4], temperature=1.0, seed=3)
        for sample in samples:
            expected = learner_logp(policy, prompt, sample)
            # float32 noise of two implementations; a stale cache differs by over 0.1
            np.testing.assert_allclose(sample.logp, expected, atol=1e-4)


def test_what_was_sampled_before_leaves_no_trace(model):
    path, sampler = model
    prompt = encode(path, LONG_PROMPT)
    ((first,),) = sampler.sample([prompt], [1], temperature=1.0, seed=3)
    ((again,),) = sampler.sample([prompt], [1], temperature=1.0, seed=3)
    np.testing.assert_array_equal(again.logp, first.logp)


def test_prompts_are_handed_over_as_soon_as_all_their_completions_are_there(model):
    path, sampler = model
    prompts = [encode(path, f"What is {n} + 7?\n") for n in (5, 58, 583)]
    seen = {}
    arguments = {"temperature": 1.0, "seed": 3}
    samples_PG = sampler.sample(prompts, [2, 1, 3], **arguments)
    unfinished = sampler._llm.llm_engine.has_unfinished_requests
    again_PG = sampler.sample(
        prompts,
        [2, 1, 3],
        **arguments,
        on_finished=lambda i, samples_G: seen.setdefault(i, (samples_G, unfinished())),
    )
    for i, (first_G, again_G) in enumerate(zip(samples_PG, again_PG, strict=True)):
        assert seen[i][0] is again_G  # each once, with its own completions
        for first, again in zip(first_G, again_G, strict=True):
            np.testing.assert_array_equal(first.token_ids, again.token_ids)
    assert [len(samples_G) for samples_G in samples_PG] == [2, 1, 3]
    # Lengths differ, so that the first one came while others were sampled.
    assert any(others_run for _, others_run in seen.values())


@pytest.mark.slow
def test_a_tensor_parallel_engine_samples_like_the_learner(monkeypatch):
    # By itself vLLM wants a memory node for each worker.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    path = resolve_model("tiny-arithmetic")
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    sampler = make_sampler(path, parallel)
    policy = LanguagePolicy.from_pretrained(path)
    prompt = encode(path, "What is 58 + 367?\n")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.05)
    sampler.load_weights(policy.model.state_dict())
    (samples,) = sampler.sample([prompt], [4], temperature=1.0, seed=3)
    sampler.close()
    for sample in samples:
        expected = learner_logp(policy, prompt, sample)
        np.testing.assert_allclose(sample.logp, expected, atol=1e-4)


def test_a_temperature_is_part_of_the_log_probs(model):
    path, sampler = model
    policy = LanguagePolicy.from_pretrained(path, temperature=0.7)
    sampler.load_weights(policy.model.state_dict())
    prompt = encode(path, "What is 58 + 367?\n")
    ((sample,),) = sampler.sample([prompt], [1], temperature=0.7, seed=3)
    np.testing.assert_allclose(
        sample.logp, learner_logp(policy, prompt, sample), atol=1e-4
    )


def test_groups_have_the_size_asked_for_and_differ(model):
    path, sampler = model
    prompt = encode(path, "What is 5867 + 3674?\n")
    # The same prompt twice: its two groups must not be copies of each other either.
    groups = sampler.sample([prompt] * 3, [8, 8, 3], temperature=1.0, seed=0)
    assert [len(group) for group in groups] == [8, 8, 3]
    distinct = {tuple(s.token_ids) for group in groups[:2] for s in group}
    # Bug report 17: the model's own generation config has top_k 1 and would leave one.
    assert len(distinct) >= 6
    for group in groups:
        for sample in group:
            assert len(sample.token_ids) == len(sample.logp)


def test_every_prompt_gets_its_own_completions(model):
    # Bug report 32: 5 prompts of 8, each completion with its own tokens and log-probs.
    path, sampler = model
    policy = LanguagePolicy.from_pretrained(path)
    sampler.load_weights(policy.model.state_dict())
    prompts = [encode(path, f"What is {n}867 + 3674?\n") for n in range(1, 6)]
    groups = sampler.sample(prompts, [8] * 5, temperature=1.0, seed=4)
    assert [len(group) for group in groups] == [8] * 5
    for prompt, group in zip(prompts, groups, strict=True):
        assert len({tuple(s.token_ids) for s in group}) > 1
        for sample in group[:2]:
            expected = learner_logp(policy, prompt, sample)
            np.testing.assert_allclose(sample.logp, expected, atol=1e-4)


def test_requests_of_one_step_draw_different_samples(model):
    # Bug report 31: two env runners with the same prompt, and a later round.
    path, sampler = model
    prompt = encode(path, "What is 5867 + 3674?\n")
    seeds = [request_seed(7, 1, *rest) for rest in ((0, 0), (0, 1), (2, 0))]
    assert len({*seeds, request_seed(8, 1, 0, 0), request_seed(7, 2, 0, 0)}) == 5
    groups = [sampler.sample([prompt], [8], temperature=1.0, seed=s)[0] for s in seeds]
    texts = [{tuple(s.token_ids) for s in group} for group in groups]
    assert texts[0] != texts[1] != texts[2] != texts[0]
    assert len(texts[0] | texts[1]) >= 12  # of 16


def test_the_seed_decides(model):
    path, sampler = model
    prompt = encode(path, "What is 5867 + 3674?\n")

    def tokens(seed):
        (group,) = sampler.sample([prompt], [8], temperature=1.0, seed=seed)
        return [tuple(s.token_ids) for s in group]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)


def test_the_callers_random_state_and_threads_are_left_alone(model):
    path, sampler = model
    prompt = encode(path, "What is 1 + 1?\n")
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    sampler.sample([prompt], [2], temperature=1.0, seed=9)
    assert torch.equal(torch.rand(3), expected)
    before = torch.get_num_threads()
    torch.set_num_threads(before)  # vLLM leaves a no-op in its place
    assert torch.set_num_threads.__module__ != "vllm"


def test_a_length_limit_marks_completions_as_truncated(model):
    path, sampler = model
    prompt = encode(path, "What is 5867 + 3674?\n")
    (group,) = sampler.sample(
        [prompt], [2], temperature=0.0, seed=0, max_completion_tokens=3
    )
    assert all(s.truncated and len(s.token_ids) == 3 for s in group)


# Bug report 18; `tests/test_sampler_outputs.py` has the rest of it.
def test_all_declared_end_tokens_end_a_completion(tmp_path):
    path = odd_generation_config(tmp_path)
    assert stop_token_ids(path, load_tokenizer(path)) == [1, 7]
