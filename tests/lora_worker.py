"""Trains LoRA adapters under DeepSpeed in a process of its own, against PyTorch."""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from deepspeed_worker import PARTITION_ALL
from test_lora import IDS, assert_announced, make_module

from rllib_exgrpo.deepspeed_engine import DeepSpeedEngine
from rllib_exgrpo.training_engine import TorchEngine, UpdateRules

# AdamW's steps are about as long as this wherever a gradient is not zero, so that the
# order of float32 sums moves small ones by up to 0.3 % of it.
LR = 1e-3


def trained_state(stage: int | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)  # of the adapters
    module, rules = make_module(), UpdateRules()
    if stage is None:
        module.engine = TorchEngine(module.policy, lr=LR, rules=rules)
    else:
        module.engine = DeepSpeedEngine(
            module.policy,
            lr=LR,
            rules=rules,
            zero_stage=stage,
            deepspeed_config=PARTITION_ALL if stage == 3 else {},
            device=torch.device("cpu"),
        )
    whole, mask = torch.ones_like(IDS, dtype=torch.bool), torch.ones(1, 5) > 0
    for _ in range(3):
        scores = module.engine.forward(IDS, whole, mask)
        module.engine.backward(-scores.logp.sum(), is_last=True)
        assert module.engine.step().applied
    module.set_state(module.get_state())  # a round trip changes nothing
    assert_announced(module)
    state = module.get_state(inference_only=True)
    module.engine.close()
    return state


def main() -> None:
    expected, actual = trained_state(None), trained_state(int(sys.argv[1]))
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=1e-5, rtol=0)


if __name__ == "__main__":
    main()
