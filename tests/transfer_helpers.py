"""vLLM's own weight transfer on a CPU: a key-value store in place of NCCL.

All else is vLLM's: the handshake, the ranks, the checks of what is sent against what
was announced, and how an engine takes weights layer by layer.
"""

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

from rllib_exgrpo.exgrpo_env_runner import ExGRPOEnvRunner
from rllib_exgrpo.exgrpo_learner import ExGRPOLearner


def join(info, rank):
    return StatelessProcessGroup.create(
        info.master_address, info.master_port, rank, info.world_size
    )


class StoreReceiver(NCCLWeightTransferEngine):
    def init_transfer_engine(self, info):
        self.group = join(info, self.parallel_config.rank + info.rank_offset)

    def update_weights(self, update_info):
        info = self.parse_update_info(update_info)
        for name, dtype, shape in zip(
            info.names, info.dtype_names, info.shapes, strict=True
        ):
            weight = self.group.broadcast(torch.empty(0), src=0)
            assert weight.dtype == getattr(torch, dtype)
            assert list(weight.shape) == list(shape)
            self.model.load_weights([(name, weight)])

    def shutdown(self):
        self.group = None


class StoreSender(NCCLTrainerWeightTransferEngine):
    def _broadcast(self, source, meta):
        if not self.is_sender:
            return super()._broadcast(source, meta)
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast(tensor.cpu().clone(), src=0)

    def shutdown(self):
        self.model_update_group = None


def use_store():
    """Has this process transfer through a store where NCCL is asked for."""
    nccl_engine.open_trainer_endpoint = lambda info: join(info, 0)
    WeightTransferEngineFactory._registry["nccl"] = lambda: StoreReceiver
    WeightTransferTrainerFactory._registry["nccl"] = lambda: StoreSender


class StoreEnvRunner(ExGRPOEnvRunner):
    def __init__(self, **kwargs):
        use_store()
        super().__init__(**kwargs)


class StoreLearner(ExGRPOLearner):
    def open_weight_transfer(self, **kwargs):
        use_store()
        super().open_weight_transfer(**kwargs)
