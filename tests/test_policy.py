import sys
import types

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rllib_exgrpo.batching import pad, rows_from_candidates
from rllib_exgrpo.exgrpo_learner import ExGRPOLearner
from rllib_exgrpo.policy import LanguagePolicy, load_tokenizer, resolve_model
from rllib_exgrpo.records import Completion
from rllib_exgrpo.training_engine import TorchEngine, UpdateRules


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def rows():
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 60, n).astype(np.int32) for n in (3, 9, 1, 5)]
    completions = [
        Completion(
            generator.integers(0, 60, n).astype(np.int32),
            np.zeros(n, np.float32),
            1.0,
            0,
        )
        for n in (4, 1, 7, 2)
    ]
    return rows_from_candidates(prompts, completions)


def plain_scores(model, rows, row, temperature=1.0):
    """Log-probs and entropies of one row by itself, from the model's own logits."""
    one = rows.take(np.array([row]))
    ids = torch.tensor(np.concatenate([one.prompt_token_ids, one.token_ids]))[None]
    logits = model(input_ids=ids.long()).logits[0, :-1].double() / temperature
    log_probs = logits[len(one.prompt_token_ids) - 1 :].log_softmax(-1)
    logp = log_probs.gather(1, torch.tensor(one.token_ids).long()[:, None])[:, 0]
    return logp, -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize(("temperature", "chunk"), [(1.0, 1000), (0.7, 3)])
def test_scores_are_those_of_each_row_alone(model, rows, temperature, chunk):
    policy = LanguagePolicy(model, temperature=temperature, logits_per_chunk=60 * chunk)
    batch = pad(rows)
    with torch.no_grad():
        scores = policy(batch.input_ids, batch.attention_mask, batch.prediction_mask)
    logp, entropy = batch.dense(scores.logp), batch.dense(scores.entropy)
    for row, length in enumerate(rows.lengths_B):
        expected_logp, expected_entropy = plain_scores(model, rows, row, temperature)
        torch.testing.assert_close(logp[row, :length].double(), expected_logp, **TIGHT)
        torch.testing.assert_close(
            entropy[row, :length].double(), expected_entropy, **TIGHT
        )


def test_a_score_does_not_depend_on_padding_or_on_what_is_scored_beside_it(model, rows):
    learner = object.__new__(ExGRPOLearner)  # without RLlib's set-up
    learner._device = torch.device("cpu")
    learner.engine = TorchEngine(LanguagePolicy(model), lr=0.0, rules=UpdateRules())
    for batches in ([[0, 1, 2, 3]], [[2], [0], [], [3], [1]], [[1, 3], [2, 0]]):
        scores = learner.score([rows.take(np.array(b, int)) for b in batches])
        order = [row for batch in batches for row in batch]
        for place, row in enumerate(order):
            logp, entropy = plain_scores(model, rows, row)
            expected = [entropy.mean().item(), -logp.mean().item()]
            np.testing.assert_allclose(scores[:, place], expected, **TIGHT)


TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def test_chunks_change_neither_values_nor_gradients(model, rows):
    batch = pad(rows)

    def gradients(chunk):
        policy = LanguagePolicy(model, logits_per_chunk=60 * chunk)
        model.zero_grad()
        scores = policy(batch.input_ids, batch.attention_mask, batch.prediction_mask)
        (scores.logp.sum() + 0.3 * scores.entropy.sum()).backward()
        return [p.grad.clone() for p in model.parameters()]

    for whole, cut in zip(gradients(1000), gradients(2), strict=True):
        torch.testing.assert_close(whole, cut, rtol=1e-4, atol=1e-5)


def test_architectures_that_change_their_logits_are_refused(model):
    class Capped(Qwen2ForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = 0.5 * output.logits
            return output

    with pytest.raises(ValueError, match="Capped changes its logits"):
        LanguagePolicy(Capped(model.config)).check_head()


def test_liger_kernels_leave_the_head_alone(model, monkeypatch):
    calls = []
    stub = types.ModuleType("liger_kernel.transformers")
    stub._apply_liger_kernel_to_instance = lambda *args, **kw: calls.append((args, kw))
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stub)
    LanguagePolicy(model).use_liger_kernel()
    off = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert calls == [((model,), off)]
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ImportError, match="pip install liger-kernel"):
        LanguagePolicy(model).use_liger_kernel()


def test_the_embedded_model_is_found_by_name():
    tokenizer = load_tokenizer("tiny-arithmetic")
    assert tokenizer.decode(tokenizer("1 + 2\n").input_ids) == "1 + 2\n"


def test_a_missing_folder_is_named():
    with pytest.raises(ValueError, match=r"`model_name_or_path`='./no/such/folder'"):
        resolve_model("./no/such/folder")


def test_an_unreachable_hub_name_is_named():
    with pytest.raises(ValueError, match="`model_name_or_path`='nobody/nothing'"):
        load_tokenizer("nobody/nothing")


def test_checkpointed_layers_run_twice_and_give_the_same_gradients():
    gradients, calls = [], []
    for checkpointing in (False, True):
        policy = LanguagePolicy.from_pretrained(
            "tiny-arithmetic", gradient_checkpointing=checkpointing
        )
        count = [0]
        for layer in policy.model.model.layers:
            layer.input_layernorm.register_forward_hook(
                lambda *_, count=count: count.__setitem__(0, count[0] + 1)
            )
        ids = torch.arange(5, 25).reshape(2, 10)
        mask = torch.ones(2, 9, dtype=torch.bool)
        policy(ids, torch.ones_like(ids, dtype=torch.bool), mask).logp.sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
        calls.append(count[0])
    assert calls == [4, 8]  # four layers, again in the backward pass
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain, atol=1e-5, rtol=1e-5)
