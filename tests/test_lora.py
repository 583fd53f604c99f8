"""LoRA adapters: what is trained, what the engine gets, what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import ArithmeticEnv
from rllib_exgrpo.exgrpo_rl_module import ExGRPORLModule
from rllib_exgrpo.policy import LanguagePolicy
from rllib_exgrpo.training_engine import TorchEngine, UpdateRules

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def make_module(**settings) -> ExGRPORLModule:
    return ExGRPORLModule(
        model_config={
            "name_or_path": "tiny-arithmetic",
            "dtype": "float32",
            "lora_config": LORA,
            **settings,
        }
    )


def train_one_step(policy) -> None:
    """Makes two updates: the first moves only one of a pair, the one that is 0."""
    dtype = next(policy.parameters()).dtype
    engine = TorchEngine(policy, lr=1e-2, rules=UpdateRules(), dtype=dtype)
    mask = torch.ones(1, 5, dtype=torch.bool)
    for _ in range(2):
        scores = engine.forward(IDS, torch.ones_like(IDS, dtype=torch.bool), mask)
        engine.backward(-scores.logp.sum(), is_last=True)
        assert engine.step().applied


def test_adapters_are_trained_and_merged_for_the_engine():
    pytest.importorskip("peft")
    module = make_module()
    model = module.policy.model
    base = LanguagePolicy.from_pretrained("tiny-arithmetic").model
    torch.testing.assert_close(model(IDS).logits, base(IDS).logits, atol=0, rtol=0)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert {n.replace("base_layer.", "") for n in frozen} == {
        n for n, _ in base.named_parameters()
    }
    train_one_step(module.policy)

    state = module.get_state(inference_only=True)
    assert state.keys() == base.state_dict().keys()  # tied names included
    expected = model(IDS).logits
    assert (expected - base(IDS).logits).abs().max() > 1e-3
    base.load_state_dict(state)
    torch.testing.assert_close(base(IDS).logits, expected, atol=1e-5, rtol=0)

    # A checkpoint has the adapters beside the weights, and comes back exactly.
    other = make_module()
    other.set_state(module.get_state())
    torch.testing.assert_close(other.policy.model(IDS).logits, expected, atol=0, rtol=0)
    whole = make_module(lora_config=None)
    with pytest.raises(ValueError, match="`model_name_or_path` and `lora_config`"):
        whole.set_state(module.get_state())


def assert_announced(module) -> None:
    """What a transfer announces is what it sends: names, types and whole shapes."""
    sent = [(n, w.dtype, tuple(w.shape)) for n, w in module.inference_weights()]
    assert module.inference_metadata() == sent
    assert sent


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_is_told_which_weights_will_come(lora, dtype):
    if lora is not None:
        pytest.importorskip("peft")
    assert_announced(make_module(dtype=dtype, lora_config=lora))


def test_in_bfloat16_the_adapters_are_float32_and_the_rest_is_not():
    pytest.importorskip("peft")
    module = make_module(dtype="bfloat16")
    train_one_step(module.policy)
    for parameter in module.policy.parameters():
        expected = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype == expected
    state = module.get_state(inference_only=True)
    assert {value.dtype for value in state.values()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_sharded_adapters_are_trained_and_merged_alike(stage):
    pytest.importorskip("peft")
    worker = Path(__file__).with_name("lora_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(stage)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 8}, "rank"),
        ({"lora_dropout": 0.1}, "'lora_dropout'=0.1.*without dropout"),
        ({"modules_to_save": ["lm_head"]}, "only adapters"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    pytest.importorskip("peft")
    config = ExGRPOConfig().environment(ArithmeticEnv)
    config.language_model(lora_config=settings)
    with pytest.raises(ValueError, match=f"(?s)`lora_config`.*{words}"):
        config.validate()


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # makes the import fail
    config = ExGRPOConfig().environment(ArithmeticEnv)
    config.language_model(lora_config=LORA)
    with pytest.raises(ImportError, match=r"rllib_exgrpo\[lora\]"):
        config.validate()
