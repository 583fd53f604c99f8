"""An engine and a learner on one GPU: the memory check, and who wakes when."""

import pytest
import torch

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import ArithmeticEnv
from rllib_exgrpo.gpu_memory import check_shared_gpu, learner_memory
from rllib_exgrpo.policy import build_empty
from rllib_exgrpo.sampler import VLLMSampler

GIB = 2**30


# bug report 34
def test_what_does_not_fit_is_refused_with_the_numbers():
    model = torch.nn.Linear(GIB // 4, 1, bias=False, device="meta")  # 2^28 parameters
    memory = learner_memory(model)
    assert memory == (12 * 2**28, 16 * 2**28)  # 3 and 4 GiB
    # 0.5 of 8 GiB and 3 GiB fit; 0.7 of 8 GiB are 5.6 GiB, which with 3 do not.
    check_shared_gpu(memory, gpu_bytes=8 * GIB, gpu_memory_utilization=0.5)
    with pytest.raises(ValueError, match="5.6 of the GPU's 8.0 GiB.*3.0 GiB.*0.62"):
        check_shared_gpu(memory, gpu_bytes=8 * GIB, gpu_memory_utilization=0.7)
    # Between updates 3 GiB would fit on 3.5, but not the gradient.
    with pytest.raises(ValueError, match="4.0 GiB in an update"):
        check_shared_gpu(memory, gpu_bytes=int(3.5 * GIB), gpu_memory_utilization=0.1)


def test_a_model_is_counted_without_loading_it():
    model = build_empty("tiny-arithmetic", dtype="float32")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    whole = sum(p.numel() for p in model.parameters())
    assert learner_memory(model).in_update == 16 * whole
    pytest.importorskip("peft")
    lora = {"r": 4, "target_modules": "all-linear"}
    adapted = build_empty("tiny-arithmetic", dtype="bfloat16", lora_config=lora)
    adapters = sum(p.numel() for p in adapted.parameters()) - whole
    assert learner_memory(adapted).in_update == 16 * adapters + 2 * whole


class RecordedEngine:
    """Writes down what it is told."""

    def __init__(self):
        self.calls = []

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")

    def collective_rpc(self, method, **kwargs):
        self.calls.append(method)


# bug report 34
def test_the_cache_wakes_after_the_new_weights():
    sampler = VLLMSampler.__new__(VLLMSampler)
    sampler._llm, sampler._is_asleep = RecordedEngine(), False
    sampler.load_weights({})
    sampler.sleep()
    sampler.load_weights({})
    sampler.load_weights({})
    assert sampler._llm.calls == [
        "reload_weights",
        "sleep 2",
        "wake weights",
        "reload_weights",
        "wake kv_cache",
        "reload_weights",
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "only an engine on a GPU"),
        ({"num_gpus_per_env_runner": 1, "num_env_runners": 2}, "both to 0"),
        ({"num_gpus_per_env_runner": 1, "num_learners": 1}, "both to 0"),
    ],
)
def test_only_an_engine_in_the_learners_process_sleeps(settings, words):
    config = ExGRPOConfig().environment(ArithmeticEnv).engine(engine_sleeps=True)
    with pytest.raises(ValueError, match=f"`engine_sleeps` is True.*{words}"):
        config.update_from_dict(settings).validate()
