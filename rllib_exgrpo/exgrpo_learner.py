"""The learner: scores completions, applies the mixed-policy loss, steps the engine."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import ray
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME, WEIGHTS_SEQ_NO

from rllib_exgrpo.batching import MiniBatch, Rows, pad
from rllib_exgrpo.exgrpo_rl_module import ExGRPORLModule
from rllib_exgrpo.loss_metrics import UpdateTotals, summarize
from rllib_exgrpo.objective import Objective, accumulate_gradients, score_tokens
from rllib_exgrpo.policy import TokenScores
from rllib_exgrpo.sampler import open_weight_sender
from rllib_exgrpo.training_engine import TorchEngine, TrainingEngine, UpdateRules
from rllib_exgrpo.weight_transfer import EngineClient, WeightSource, free_port

ClipRange = float | tuple[float, float] | None


class ExGRPOLearner(TorchLearner):
    """Trains an `ExGRPORLModule` on rows that the algorithm has cut for it.

    It takes no episodes and runs no connectors: rows arrive ready, with denominators
    that hold over all learners, so the update is the same however the rows are cut.
    """

    engine: TrainingEngine
    _weight_sender: Any = None
    _weights_seq_no: int
    _replayed_rows: NDArray[np.float64]

    @property
    def lm_module(self) -> ExGRPORLModule:
        """The only module."""
        return cast(ExGRPORLModule, self.module[DEFAULT_MODULE_ID])

    @override(TorchLearner)
    def configure_optimizers_for_module(
        self, module_id: str, config: Any = None
    ) -> None:
        """Builds the training engine around the module."""
        module = self.lm_module
        if config.use_liger_kernel:  # the module is on its GPU already
            module.policy.use_liger_kernel()
        self.engine = self._build_engine(module, config)
        module.engine = self.engine
        self.register_optimizer(
            module_id=module_id,
            optimizer=self.engine.optimizer,
            params=[p for p in module.parameters() if p.requires_grad],
            lr_or_lr_schedule=config.lr,
        )

    def _build_engine(self, module: ExGRPORLModule, config: Any) -> TrainingEngine:
        rules = UpdateRules(
            grad_clip=config.grad_clip,
            skip_above_norm=config.skip_above_grad_norm,
            betas=config.adam_betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        # `update` sets it from the schedule, as it does for a constant.
        common = {
            "lr": 0.0,
            "rules": rules,
            "dtype": getattr(torch, config.model_dtype),
        }
        if config.zero_stage is None:
            return TorchEngine(module.policy, **common)
        from rllib_exgrpo.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(
            module.policy,
            zero_stage=config.zero_stage,
            deepspeed_config=config.deepspeed_config,
            device=self._device,
            **common,
        )

    @override(TorchLearner)
    def _make_modules_ddp_if_necessary(self) -> None:
        """Does nothing: the engine adds gradients up over learners."""

    @override(Learner)
    def shutdown(self) -> None:
        """Releases process groups."""
        self.close_weight_transfer()
        self.engine.close()

    # --- updating

    @override(Learner)
    def update(
        self,
        training_data: TrainingData,
        *,
        timesteps: dict[str, Any] | None = None,
        clip_eps: ClipRange = None,
        **kwargs: Any,
    ) -> Any:
        """Makes one optimiser update for each mini-batch.

        Args:
            training_data: its `batch` is this learner's list of `MiniBatch`.
            timesteps: lifetime counters, for learning rate schedules.
            clip_eps: clip range of fresh tokens in this step; None for no clipping.
            kwargs: of RLlib, unused.

        Returns:
            RLlib's reduced metrics; their values hold over all learners.
        """
        mini_batches = cast(Sequence[MiniBatch], training_data.batch)
        learning_rate = self._set_learning_rate(timesteps or {})
        objective = self._build_objective(clip_eps)
        self._replayed_rows = np.zeros((0, 4))
        totals, results = [], []
        for mini_batch in mini_batches:
            totals.append(self._accumulate_gradients(mini_batch, objective))
            results.append(self.engine.step())
        self._weights_seq_no += 1

        rules, norms = self.engine.optimizer.rules, [r.grad_norm for r in results]
        metrics = {
            **self._token_metrics(totals),
            "num_completions_skipped": float(sum(m.num_skipped for m in mini_batches)),
            "grad_norm": float(np.mean(norms)),
            "grad_norm_max": float(np.max(norms)),
            "grad_clip_fraction": float(np.mean([rules.clips(norm) for norm in norms])),
            "num_skipped_updates": float(sum(not r.applied for r in results)),
            "learning_rate": learning_rate,
        }
        for name, value in metrics.items():
            self.metrics.log_value((DEFAULT_MODULE_ID, name), value, window=1)
        self.after_gradient_based_update(timesteps=timesteps or {})
        return self.metrics.reduce()

    def _set_learning_rate(self, timesteps: dict[str, Any]) -> float:
        """Takes the learning rate of this step from the schedule.

        RLlib does so after a step, which after a restore leaves the first step with
        the rate that the optimiser was built with.
        """
        optimizer = self.engine.optimizer
        rate = self._optimizer_lr_schedules[optimizer].update(
            timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0)
        )
        self._set_optimizer_lr(optimizer, rate)
        return float(rate)

    def _build_objective(self, clip_eps: ClipRange) -> Objective:
        config = self.config
        return Objective(
            clip_eps=clip_eps,
            shaping_beta=config.shaping_beta,
            replay_importance_ratio=config.replay_importance_ratio,
            entropy_coeff=config.entropy_coeff,
            aggregation=config.loss_aggregation,
            max_completion_tokens=config.max_completion_tokens,
        )

    def _accumulate_gradients(
        self, mini_batch: MiniBatch, objective: Objective
    ) -> UpdateTotals:
        self._update_totals = UpdateTotals()
        accumulate_gradients(
            self.engine,
            mini_batch,
            lambda rows, scores: self.compute_loss_for_module(
                module_id=DEFAULT_MODULE_ID,
                config=self.config,
                batch={
                    "rows": rows,
                    "mini_batch": mini_batch,
                    "objective": objective,
                },
                fwd_out=scores._asdict(),
            ),
            self._device,
        )
        self._note_replayed_rows(mini_batch)
        return self._update_totals

    def _note_replayed_rows(self, mini_batch: MiniBatch) -> None:
        groups = [rows.group_B[rows.replayed_B] for rows in mini_batch.micro_batches]
        sums = self._update_totals.replayed_rows
        noted = np.column_stack([np.concatenate(groups), sums])
        self._replayed_rows = np.concatenate([self._replayed_rows, noted])

    def replayed_rows(self) -> NDArray[np.float64]:
        """Returns what the last `update` saw of its replayed rows.

        Returns:
            (R, 4), for each of this learner's replayed rows: number of its group,
            counted tokens, sum of their importance ratios, how many are saturated.
        """
        return self._replayed_rows

    @override(TorchLearner)
    def compute_loss_for_module(
        self,
        *,
        module_id: str,
        config: Any,
        batch: dict[str, Any],
        fwd_out: dict[str, Any],
    ) -> torch.Tensor:
        """Computes this micro-batch's share of the loss of the mini-batch.

        Args:
            module_id: of the only module.
            config: of this learner.
            batch: "rows" (`PaddedRows`), "mini_batch" with the global counts, and the
                "objective".
            fwd_out: (B, T) "logp" and "entropy" of the completion tokens.

        Returns:
            Scalar; summed over micro-batches and learners it is the loss.
        """
        loss, totals = batch["objective"].loss(
            batch["rows"], TokenScores(**fwd_out), batch["mini_batch"]
        )
        self._update_totals.add(totals)
        return loss

    def _token_metrics(self, totals: list[UpdateTotals]) -> dict[str, float]:
        step = UpdateTotals()
        for update in totals:
            step.add(update)
        # Before the first update the weights are those that sampled the fresh tokens:
        # what is left of the difference comes from the engines.
        first = totals[0]
        names = sorted(step.sums)
        sums = self._over_learners(
            [step.sums[n] for n in names]
            + [first.sums["fresh/logp_diff"], first.sums["fresh/compared"]],
            dist.ReduceOp.SUM,
        )
        (largest,) = self._over_learners([first.logp_diff_max], dist.ReduceOp.MAX)
        metrics = summarize(dict(zip(names, sums, strict=False)), len(totals))
        metrics["rollout_logp_diff_mean"] = sums[-2] / max(sums[-1], 1.0)
        metrics["rollout_logp_diff_max"] = largest
        return metrics

    def _over_learners(
        self, values: list[float], operation: dist.ReduceOp.RedOpType
    ) -> list[float]:
        if not self.distributed:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, operation)
        return tensor.tolist()

    # --- scoring

    @torch.no_grad()
    def score(self, micro_batches: Sequence[Rows]) -> NDArray[np.float32]:
        """Computes the mean token entropy and mean negative log-prob of completions.

        Args:
            micro_batches: this learner's rows; all learners pass the same number.

        Returns:
            (2, B) entropy and negative log-prob under the current policy, in nats, for
            the rows in the order of the micro-batches.
        """
        parts = [np.zeros((2, 0), np.float32)]
        for rows in micro_batches:
            batch = pad(rows).to(self._device)
            logp, entropy = score_tokens(self.engine, batch)
            lengths = batch.token_mask.sum(1)
            means = torch.stack([entropy.sum(1), -logp.sum(1)]) / lengths
            parts.append(means[:, : len(rows)].cpu().numpy())
        return np.concatenate(parts, axis=1)

    @torch.no_grad()
    def token_logp(self, micro_batches: Sequence[Rows]) -> list[NDArray[np.float32]]:
        """Computes the log-prob of each completion token under the current policy.

        Args:
            micro_batches: this learner's rows; all learners pass the same number.

        Returns:
            (T,) for each row, in the order of the micro-batches.
        """
        logp_B: list[NDArray[np.float32]] = []
        for rows in micro_batches:
            batch = pad(rows).to(self._device)
            logp, _ = self.engine.forward(
                batch.input_ids, batch.attention_mask, batch.prediction_mask
            )
            ends_B = np.cumsum(rows.lengths_B)
            logp_B += np.split(logp.cpu().numpy(), ends_B)[: len(rows)]
        return logp_B

    # --- weights for the engines

    def open_weight_transfer(
        self, backend: str, env_runners: Sequence[Any], workers_per_engine: int
    ) -> None:
        """Connects with the engines by vLLM's own weight transfer. Collective.

        Args:
            backend: "nccl" or "ipc".
            env_runners: the actors that host the engines.
            workers_per_engine: GPUs of an engine.
        """
        self.close_weight_transfer()

        def call(step: str, arguments: Sequence[tuple[Any, ...]]) -> None:
            pairs = zip(env_runners, arguments, strict=True)
            ray.get([runner.transfer.remote(step, *own) for runner, own in pairs])

        self._weight_sender = open_weight_sender(
            backend,
            rank=dist.get_rank() if self.distributed else 0,
            address=ray.util.get_node_ip_address(),
            port=free_port(),
            num_workers=len(env_runners) * workers_per_engine,
            source=WeightSource(self.lm_module),
            client=EngineClient(call, len(env_runners), workers_per_engine),
        )

    def send_weights(self) -> int:
        """Sends the weights to the engines and returns their version. Collective."""
        self._weight_sender.send_weights()
        return self._weights_seq_no

    def close_weight_transfer(self) -> None:
        """Leaves the group that weights are sent in."""
        if self._weight_sender is not None:
            self._weight_sender.shutdown()
            self._weight_sender = None

    # --- state

    @override(TorchLearner)
    def _get_optimizer_state(self) -> dict[str, Any]:
        """Returns the whole state on the first learner; empty on the others."""
        return dict(self.engine.optimizer_state())

    @override(TorchLearner)
    def _set_optimizer_state(self, state: dict[str, Any]) -> None:
        self.engine.load_optimizer_state(state)

    @override(Learner)
    def set_state(self, state: dict[str, Any]) -> None:
        """Loads weights, optimiser state and counters, from any number of learners.

        Unlike RLlib's, it takes weights of any version: going back to an older
        checkpoint must bring its weights back.
        """
        state = dict(state)
        if COMPONENT_RL_MODULE in state:
            self.module.set_state(state.pop(COMPONENT_RL_MODULE))
        super().set_state(state)
        self._weights_seq_no = state.get(WEIGHTS_SEQ_NO, self._weights_seq_no)
