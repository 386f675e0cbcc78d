"""Run PPO step by step: ``generate`` → your reward → ``step`` → ``log_stats``."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from rlhf_course.data.lengths import LengthSampler
from rlhf_course.policy.adapters import REFERENCE, use_adapter
from rlhf_course.policy.network import without_dropout
from rlhf_course.ppo import update
from rlhf_course.ppo.checks import check_samples, stack_scores, warn_about_samples
from rlhf_course.ppo.rollout import Rollout
from rlhf_course.ppo.sampling import generate, pad_token_id
from rlhf_course.ppo.score_scaling import scale_scores
from rlhf_course.ppo.trainer_base import TrainerBase


class PPOTrainer(TrainerBase):
    """Train a policy with a value head by PPO, with the stepwise API of TRL up to 0.11.

    docs/ppo-api.md lists the differences from the classic arithmetic: dropout is off; padding
    changes no number; NaN, Inf and empty responses raise errors; accumulated mini-batches are
    weighted by token count; P processes, each with B samples, match one process with P·B samples.

    Args:
        config: see :class:`PPOConfig`.
        model: the policy.
        ref_model: the reference; default: a frozen copy of the policy, or of its adapter.
        tokenizer: its pad token (EOS if there is none) pads batches.
        dataset: rows for ``dataloader``.
        optimizer: default: Adam for the trainable parameters, without weight decay.
        data_collator: makes a batch from rows; default: one list per column.
        num_shared_layers: how many initial layers policy and reference share; these are frozen.
        lr_scheduler: stepped once per ``step``.
    """

    def generate(
        self,
        query_tensor: Tensor | Sequence[Tensor],
        length_sampler: LengthSampler | None = None,
        batch_size: int | None = None,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs,
    ):
        """Sample responses; if ``generate_ref_response``, return a pair (policy's, reference's).

        One query (T,) gives a tensor (1, T + R); a list of queries gives a list of 1-D tensors.
        ``batch_size`` queries (default: all) run at a time, each with its own token limit from
        ``length_sampler``. If not ``return_prompt``, return only the response tokens, as ``step``
        expects. PPO needs transformers' ``do_sample=True, top_k=0, top_p=1.0``.
        """
        single = isinstance(query_tensor, Tensor)
        if single and query_tensor.numel() != query_tensor.shape[-1]:
            raise ValueError(f"{tuple(query_tensor.shape)} is not 1-D; pass a list of queries.")
        queries = [query_tensor.reshape(-1)] if single else list(query_tensor)
        lengths = [length_sampler() for _ in queries] if length_sampler is not None else None
        how = {"begin_suppress": self.config.begin_suppress_tokens, "fast": self.config.fast}

        def sample(model) -> list[Tensor] | Tensor:
            responses, size = [], batch_size or len(queries)
            for start in range(0, len(queries), size):
                rows = slice(start, start + size)
                some = queries[rows], lengths[rows] if lengths is not None else None
                with self.accelerator.autocast():  # step() scores with the same precision and mask
                    responses += generate(model, self.tokenizer, *some, **how, **generation_kwargs)
            pairs = zip(queries, responses, strict=True)
            if return_prompt:
                responses = [torch.cat([torch.as_tensor(q).to(r.device), r]) for q, r in pairs]
            return responses[0].unsqueeze(0) if single else responses

        responses = sample(self.policy)
        if generate_ref_response:
            with self.reference() as reference:
                responses = responses, sample(reference)
        return responses

    def step(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores, response_masks=None
    ) -> dict:
        """Take one PPO step on batch_size samples; return the 41 statistics in ``stats.MEANING``.

        queries and responses are 1-D token tensors (or lists); scores has one number per sample.
        ``response_masks`` (1 or 0 per token) excludes tokens marked 0 from the losses. Raises
        ``ValueError`` for unusable input and ``FloatingPointError`` for NaN or Inf.
        """
        started, rate = time.perf_counter(), self.optimizer.param_groups[0]["lr"]
        running, was_whole, config = self.running, self.is_whole, self.config
        given, size = (queries, responses, scores, response_masks), config.batch_size
        queries, responses = check_samples(self.policy, size, *given)
        warn_about_samples(queries, responses, response_masks, self.tokenizer)
        scores = stack_scores(scores, self.accelerator.device, self.current_step)
        if config.use_score_scaling or config.score_clip is not None:
            scores, running = scale_scores(scores, running, config, self.accelerator)
        with torch.inference_mode(False), without_dropout(self.model, checkpointing=True):
            pad = pad_token_id(self.tokenizer)
            rollout = Rollout.from_lists(queries, responses, scores, pad, response_masks)
            stats = self._learn(rollout, seconds := {})
        with timed(seconds, "calc_stats"):
            stats = update.step_stats(rollout, stats, self.kl_ctl.value, self.accelerator)
        self.kl_ctl.update(stats["objective/kl"], size * self.accelerator.num_processes)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.running, self.current_step, self.is_whole = running, self.current_step + 1, was_whole
        seconds["total"] = time.perf_counter() - started
        times = {f"time/ppo/{phase}": value for phase, value in seconds.items()}
        return stats | times | {"ppo/learning_rate": rate}

    def _learn(self, rollout: Rollout, seconds: dict[str, float]) -> list[update.MiniBatch]:
        """Fill in the rollout's columns and run the epochs; return each mini-batch's statistics."""
        config, step = self.config, self.current_step
        total = partial(self.accelerator.reduce, reduction="sum")
        with timed(seconds, "forward_pass"):
            first_pass = update.add_logprobs(rollout, self.model, self.reference, config, step)
        with timed(seconds, "compute_rewards"):
            update.add_rewards(rollout, config, self.kl_ctl.value, total)
        with timed(seconds, "compute_advantages"):
            update.add_advantages(rollout, config, total)
        self.is_whole, self.policy.is_trained = False, True  # not whole until the epochs end
        with timed(seconds, "optimize_step"):
            parts = self.model, self.optimizer, self.accelerator
            return update.optimize(*parts, rollout, config, step, first_pass)

    @property
    def policy(self):
        """Return the policy without its data-parallel wrapper."""
        return self.accelerator.unwrap_model(self.model)

    def reference(self):
        """Return a context manager for the reference: a model, or the policy's frozen adapter."""
        if self.ref_model is not None:
            return nullcontext(self.ref_model)
        return use_adapter(self.policy, REFERENCE)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Record a phase's time on the host's clock; queued GPU work may count in a later phase."""
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started
