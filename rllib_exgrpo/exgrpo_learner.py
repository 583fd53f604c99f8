"""The learner: scores completions, applies the mixed-policy loss, steps the engine."""

from collections.abc import Sequence
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from ray.rllib.core import (
    COMPONENT_OPTIMIZER,
    COMPONENT_RL_MODULE,
    DEFAULT_MODULE_ID,
)
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO

from rllib_exgrpo.batching import MiniBatch, PaddedRows, Rows, pad
from rllib_exgrpo.exgrpo_rl_module import ExGRPORLModule
from rllib_exgrpo.loss_metrics import UpdateTotals, summarize, token_totals
from rllib_exgrpo.losses import entropy_loss, mixed_policy_loss
from rllib_exgrpo.policy import TokenScores
from rllib_exgrpo.training_engine import TorchEngine, TrainingEngine, UpdateRules

ClipRange = float | tuple[float, float] | None


class ExGRPOLearner(TorchLearner):
    """Trains an `ExGRPORLModule` on rows that the algorithm has cut for it.

    It takes no episodes and runs no connectors: rows arrive ready, with denominators
    that hold over all learners, so the update is the same however the rows are cut.
    """

    engine: TrainingEngine
    _weights_seq_no: int

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
        self.engine = self._build_engine(module, config)
        module.gathered = self.engine.gathered
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
        # The schedule's first value; RLlib moves it from there.
        lr = config.lr if isinstance(config.lr, float) else config.lr[0][1]
        if config.zero_stage is None:
            return TorchEngine(module.policy, lr=lr, rules=rules)
        from rllib_exgrpo.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(
            module.policy,
            lr=lr,
            rules=rules,
            zero_stage=config.zero_stage,
            deepspeed_config=config.deepspeed_config,
            device=self._device,
        )

    @override(TorchLearner)
    def _make_modules_ddp_if_necessary(self) -> None:
        """Does nothing: the engine adds gradients up over learners."""

    @override(Learner)
    def shutdown(self) -> None:
        """Releases process groups."""
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
        totals, results = [], []
        for mini_batch in mini_batches:
            totals.append(self._accumulate_gradients(mini_batch, clip_eps))
            results.append(self.engine.step())
        self._weights_seq_no += 1

        norms = [result.grad_norm for result in results]
        metrics = {
            **self._token_metrics(totals),
            "grad_norm": float(np.mean(norms)),
            "grad_norm_max": float(np.max(norms)),
            "num_skipped_updates": float(sum(not r.applied for r in results)),
        }
        for name, value in metrics.items():
            self.metrics.log_value((DEFAULT_MODULE_ID, name), value, window=1)
        self.after_gradient_based_update(timesteps=timesteps or {})
        return self.metrics.reduce()

    def _accumulate_gradients(
        self, mini_batch: MiniBatch, clip_eps: ClipRange
    ) -> UpdateTotals:
        self._update_totals = UpdateTotals()
        for index, rows in enumerate(mini_batch.micro_batches):
            batch = pad(rows).to(self._device)
            loss = self.compute_loss_for_module(
                module_id=DEFAULT_MODULE_ID,
                config=self.config,
                batch={
                    "rows": batch,
                    "clip_eps": clip_eps,
                    "loss_denominator": self._loss_denominator(mini_batch),
                    "num_tokens": mini_batch.num_tokens,
                },
                fwd_out=self._score_tokens(batch)._asdict(),
            )
            is_last = index == len(mini_batch.micro_batches) - 1
            self.engine.backward(loss, is_last=is_last)
        return self._update_totals

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
            batch: "rows" (`PaddedRows`), "clip_eps", and the global denominators
                "loss_denominator" and "num_tokens".
            fwd_out: (B, T) "logp" and "entropy" of the completion tokens.

        Returns:
            Scalar; summed over micro-batches and learners it is the loss.
        """
        rows: PaddedRows = batch["rows"]
        current_logp, entropy = fwd_out["logp"], fwd_out["entropy"]
        behavior_logp = rows.behavior_logp
        if not config.replay_importance_ratio:
            # The ratio of a replayed token is then its probability, as if the policy
            # that sampled it had been certain.
            behavior_logp = behavior_logp.masked_fill(rows.replay_mask[:, None], 0.0)
        output = mixed_policy_loss(
            current_logp,
            behavior_logp,
            rows.advantages,
            rows.loss_mask,
            rows.replay_mask,
            clip_eps=batch["clip_eps"],
            shaping_beta=config.shaping_beta,
            denominator=batch["loss_denominator"],
        )
        bonus = entropy_loss(entropy, rows.loss_mask, denominator=batch["num_tokens"])
        self._update_totals.add(
            token_totals(
                output,
                log_ratio=(current_logp - behavior_logp).detach(),
                entropy=entropy.detach(),
                advantages=rows.advantages,
                loss_mask=rows.loss_mask,
                replay_mask=rows.replay_mask,
                shaping_beta=config.shaping_beta,
            )
        )
        return output.loss + config.entropy_coeff * bonus

    def _loss_denominator(self, mini_batch: MiniBatch) -> float:
        completions = (
            mini_batch.num_completions
            if self.config.loss_aggregation == "completion_mean"
            else 1
        )
        return float(completions * self.config.max_completion_tokens)

    def _score_tokens(self, batch: PaddedRows) -> TokenScores:
        """Returns (B, T) log-probs and entropies of the completion tokens."""
        scores = self.engine.forward(
            batch.input_ids, batch.attention_mask, batch.prediction_mask
        )
        return TokenScores(batch.dense(scores.logp), batch.dense(scores.entropy))

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
            + [first.sums["fresh/logp_diff"], first.sums["fresh/tokens"]],
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
            logp, entropy = self._score_tokens(batch)
            lengths = batch.token_mask.sum(1)
            means = torch.stack([entropy.sum(1), -logp.sum(1)]) / lengths
            parts.append(means[:, : len(rows)].cpu().numpy())
        return np.concatenate(parts, axis=1)

    # --- state

    @override(TorchLearner)
    def _get_optimizer_state(self) -> dict[str, Any]:
        """Returns this learner's shard; the learner group collects all of them."""
        return self.engine.optimizer_state()

    @override(Learner)
    def set_state(self, state: dict[str, Any]) -> None:
        """Loads weights, optimiser shards and counters.

        Unlike RLlib's, it takes weights of any version: going back to an older
        checkpoint must bring its weights back.

        Raises:
            ValueError: if the optimiser state comes from another number of learners.
        """
        state = dict(state)
        if COMPONENT_RL_MODULE in state:
            self.module.set_state(state.pop(COMPONENT_RL_MODULE))
        if COMPONENT_OPTIMIZER in state:
            self._load_optimizer_shards(state.pop(COMPONENT_OPTIMIZER))
        super().set_state(state)
        self._weights_seq_no = state.get(WEIGHTS_SEQ_NO, self._weights_seq_no)

    def _load_optimizer_shards(self, shards: list[dict[str, Any]]) -> None:
        num_learners = max(self.config.num_learners, 1)
        if len(shards) != num_learners:
            raise ValueError(
                f"The checkpoint holds the optimiser state of {len(shards)} learner(s) "
                f"and this run has {num_learners}. Restore with "
                f"`num_learners`={len(shards)}, or load only the weights by "
                "restoring the component 'learner_group/learner/rl_module'."
            )
        self.engine.load_optimizer_state(shards)
        if isinstance(self.config.lr, Real):
            # A sweep goes on from another trial's checkpoint with a rate of its own.
            self._set_optimizer_lr(self.engine.optimizer, float(self.config.lr))
