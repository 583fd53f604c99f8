"""The vLLM engine: the only module that imports it."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rllib_exgrpo.policy import resolve_model, stop_token_ids
from rllib_exgrpo.records import PromptId
from rllib_exgrpo.weight_transfer import EngineClient, WeightSource


@dataclass(frozen=True)
class Sample:
    """What the engine sampled for one prompt.

    Attributes:
        token_ids: (T,) int32, the end token included.
        logp: (T,) float32, log-probs under the sampling distribution.
        truncated: whether the length limit ended it.
    """

    token_ids: NDArray[np.int32]
    logp: NDArray[np.float32]
    truncated: bool


class VLLMSampler:
    """Hosts a vLLM engine in this process and samples token ids from token ids.

    Sampling draws from the full distribution (no top-p, top-k or penalties, whatever
    the model's own generation config says), because the learner's log-probs are those
    of the full distribution.

    Args:
        model_name_or_path: as for `resolve_model`.
        tokenizer: of the model, for its end tokens.
        dtype: of weights and activations.
        max_prompt_tokens: longest prompt.
        max_completion_tokens: longest completion.
        trust_remote_code: run code that comes with the model.
        config_overrides: values that replace those of the model's config.json.
        engine_kwargs: further arguments of `vllm.LLM`; `enable_sleep_mode` for `sleep`.

    Raises:
        ImportError: if vLLM is not installed, naming the extra to install.
    """

    def __init__(
        self,
        *,
        model_name_or_path: str,
        tokenizer: Any,
        dtype: str,
        max_prompt_tokens: int,
        max_completion_tokens: int,
        trust_remote_code: bool = False,
        config_overrides: dict[str, Any] | None = None,
        engine_kwargs: dict[str, Any] | None = None,
    ) -> None:
        # Before the import: an engine in this process takes weights without pickling.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        vllm = _import_vllm()
        self._vllm = vllm
        self._max_completion_tokens = max_completion_tokens
        self._is_asleep = False
        self._stop_token_ids = stop_token_ids(model_name_or_path, tokenizer)
        with _torch_settings_kept():
            self._llm = vllm.LLM(
                model=resolve_model(model_name_or_path),
                dtype=dtype,
                # Reseeds the whole process here; `sample` seeds each call.
                seed=0,
                max_model_len=max_prompt_tokens + max_completion_tokens,
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                trust_remote_code=trust_remote_code,
                hf_overrides=config_overrides or {},
                disable_log_stats=True,
                **(engine_kwargs or {}),
            )

    def sample(
        self,
        prompts: Sequence[NDArray[np.int32]],
        counts: Sequence[int],
        *,
        temperature: float,
        seed: int,
        max_completion_tokens: int | None = None,
        on_finished: Callable[[int, list[Sample]], None] | None = None,
    ) -> list[list[Sample]]:
        """Samples completions.

        Args:
            prompts: token ids of each prompt.
            counts: how many completions of each prompt.
            temperature: 0 is greedy.
            seed: of this call; the same call with the same weights gives the same
                completions.
            max_completion_tokens: a lower limit than the engine's.
            on_finished: called with the position of a prompt and its completions once
                it has them all, while others are still being sampled.

        Returns:
            For each prompt its completions.

        Raises:
            RuntimeError: if the prefix cache of earlier calls cannot be dropped. It may
                come from other weights, and a completion must not depend on which
                prompts went before.
        """
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM kept its prefix cache, so prompts would be read with old weights."
                " This happens when requests are still running."
            )
        greedy = temperature == 0
        params = [
            self._vllm.SamplingParams(
                n=1 if greedy else count,
                temperature=temperature,
                max_tokens=max_completion_tokens or self._max_completion_tokens,
                logprobs=0,  # of the sampled token alone
                flat_logprobs=True,
                stop_token_ids=self._stop_token_ids,
                detokenize=False,
            )
            for count in counts
        ]
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        samples_PG: list[list[Sample]] = [[] for _ in prompts]
        with _torch_settings_kept():
            self._llm.collective_rpc(_seed_generators, args=(seed,))
            for position, output in self._finished(inputs, params):
                samples_G = [_to_sample(c) for c in output.outputs]
                if greedy:  # vLLM refuses to make the same completion twice
                    samples_G *= counts[position]
                samples_PG[position] = samples_G
                if on_finished is not None:
                    on_finished(position, samples_G)
        return samples_PG

    def _finished(
        self, inputs: Sequence[Any], params: Sequence[Any]
    ) -> Iterator[tuple[int, Any]]:
        """Runs the engine; yields each prompt's position and output when it is done."""
        # vLLM returns inner names of the requests, "17-8c1f02ab"; outputs say "17".
        names = self._llm.enqueue(inputs, params, use_tqdm=False)
        positions = {name.partition("-")[0]: i for i, name in enumerate(names)}
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    yield positions[output.request_id], output

    def load_weights(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Replaces the weights.

        Args:
            state_dict: by Hugging Face names, tied weights under each of their names
                (an alias that is left out would keep its old values).
        """
        # The cache only after the weights: both copies of the weights and the cache
        # at once may not fit beside a learner.
        self._wake("weights")
        self._llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(state_dict.items())}
        )
        self._wake("kv_cache")
        self._is_asleep = False

    def transfer(self, step: str, *arguments: Any) -> None:
        """Takes a step of vLLM's own weight transfer.

        Args:
            step: name of the method of vLLM's workers, see `weight_transfer`.
            arguments: for it.
        """
        if step == "start_weight_update":
            self._wake("weights")
        self._llm.collective_rpc(step, args=arguments)
        if step == "finish_weight_update":
            self._wake("kv_cache")
            self._is_asleep = False

    def sleep(self) -> None:
        """Gives the memory of weights and cache back, until `load_weights`."""
        self._llm.sleep(level=2)
        self._is_asleep = True

    def _wake(self, part: str) -> None:
        if self._is_asleep:
            self._llm.wake_up(tags=[part])

    def close(self) -> None:
        """Shuts the engine down and frees its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()


def open_weight_sender(
    backend: str,
    *,
    rank: int,
    address: str,
    port: int,
    num_workers: int,
    source: WeightSource,
    client: EngineClient,
) -> Any:
    """Connects a learner with the engines by vLLM's own weight transfer.

    Args:
        backend: "nccl" or "ipc".
        rank: of this learner; all learners call it, the first one sends.
        address: of this machine.
        port: a free one.
        num_workers: GPUs of all engines together.
        source: of the weights.
        client: reaches the engines.

    Returns:
        An object with `send_weights()`, which all learners call, and `shutdown()`.
    """
    _import_vllm()
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(address, port, 1 + num_workers, rank=rank)
    else:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(rank=rank)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def check_log_probs(
    samples_PG: Sequence[Sequence[Sample]],
    prompt_ids: Sequence[PromptId],
    iteration: int,
) -> None:
    """Checks that the engine's log-probs are numbers.

    Args:
        samples_PG: the samples of each prompt.
        prompt_ids: which problems.
        iteration: training iteration.

    Raises:
        RuntimeError: naming the first prompt and token without one.
    """
    for prompt_id, samples_G in zip(prompt_ids, samples_PG, strict=True):
        for sample in samples_G:
            if not np.isfinite(sample.logp).all():
                bad = int(np.flatnonzero(~np.isfinite(sample.logp))[0])
                raise RuntimeError(
                    f"vLLM returned the log-prob {sample.logp[bad]} for token {bad} of "
                    f"a completion of prompt {prompt_id!r} in iteration {iteration}: "
                    "its logits are not finite. Check the weights (did training "
                    "diverge?) and the `model_dtype`."
                )


def _import_vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            "Sampling needs vLLM, which is not installed. Install this package with "
            "the extra for your machine: `pip install 'rllib_exgrpo[cpu]'` without a "
            "GPU, `pip install 'rllib_exgrpo[cuda]'` with one."
        ) from error
    return vllm


def _seed_generators(worker: Any, seed: int) -> None:
    del worker
    torch.manual_seed(seed)


@contextmanager
def _torch_settings_kept() -> Iterator[None]:
    """Undoes what vLLM changes for the whole process.

    It replaces `torch.set_num_threads` and reseeds or advances the global generators,
    on which a learner in the same process may rely.
    """
    set_num_threads = torch.set_num_threads
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)


def _to_sample(completion: Any) -> Sample:
    token_ids, logprobs = list(completion.token_ids), completion.logprobs
    if logprobs.token_ids != token_ids:
        raise RuntimeError(
            "vLLM returned log-probs of other tokens than the sampled ones. Install "
            "the vLLM version that this package names."
        )
    return Sample(
        token_ids=np.array(token_ids, np.int32),
        logp=np.array(logprobs.logprobs, np.float32),
        truncated=completion.finish_reason == "length",
    )
