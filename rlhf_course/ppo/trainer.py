"""PPO, step by step: ``generate`` → your reward → ``step`` → ``log_stats``."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader

from rlhf_course import tracking
from rlhf_course.policy import (
    AutoModelForCausalLMWithValueHead,
    add_reference_adapter,
    create_reference_model,
    inference_mode_of,
    reference_adapter,
)
from rlhf_course.ppo import algorithm as ppo
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.rollout import LengthSampler, Rollout, generate
from rlhf_course.ppo.stats import step_stats


class PPOTrainer:
    """PPO for a policy with a value head, with the stepwise interface of TRL up to 0.11.

    The arithmetic is the classic one, and tests hold it against frozen numbers. It differs on purpose in:

    * dropout is off in every forward pass (rollouts, log-probabilities, updates), so that one distribution is
      sampled, scored and updated; the mode found is restored;
    * ``max_grad_norm`` clips every optimizer step; a skipped mini-batch moves neither weights nor optimizer state;
    * gradient accumulation weights mini-batches by their response tokens, so k × m samples equal one batch of k·m;
    * NaN or Inf raises ``FloatingPointError`` instead of training on;
    * score scaling works, and whitened rewards stay 0 on padding;
    * position_ids are always passed, so padding on the left changes nothing;
    * without ``ref_model``, a policy with adapters is held against a frozen copy of its starting adapter, and with
      one, against the model that was given.

    Args:
        config: settings, see :class:`PPOConfig`.
        model: the policy.
        ref_model: the reference; None makes a frozen copy of the policy as it is now.
        tokenizer: its pad token fills batches (EOS where it has none).
        dataset: rows for ``dataloader``; optional.
        optimizer: default Adam over the trainable parameters, without weight decay.
        data_collator: makes a batch of rows.
        num_shared_layers: first layers that policy and reference share, frozen.
        lr_scheduler: stepped once per ``step``.
    """

    def __init__(
        self,
        config: PPOConfig,
        model: AutoModelForCausalLMWithValueHead,
        ref_model=None,
        tokenizer=None,
        dataset=None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator=None,
        num_shared_layers: int | None = None,
        lr_scheduler=None,
    ) -> None:
        if not isinstance(model, AutoModelForCausalLMWithValueHead):
            raise TypeError(
                f"The policy is a {type(model).__name__}; PPO needs values too. "
                "Load it with AutoModelForCausalLMWithValueHead.from_pretrained."
            )
        if tokenizer is None:
            raise ValueError("PPOTrainer needs the policy's tokenizer.")
        set_seed(config.seed)
        self.config, self.tokenizer = config, tokenizer
        self.accelerator: Accelerator = tracking.start(config)
        self.reference_is_adapter = ref_model is None and model.is_peft_model
        if self.reference_is_adapter:
            add_reference_adapter(model)
        elif ref_model is None:
            ref_model = create_reference_model(model, num_shared_layers)
        elif not isinstance(ref_model, AutoModelForCausalLMWithValueHead):
            ref_model = AutoModelForCausalLMWithValueHead(ref_model)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        base = model.pretrained_model.get_base_model() if model.is_peft_model else model.pretrained_model
        self._takes_positions = "position_ids" in inspect.signature(base.forward).parameters

        device = self.accelerator.device
        self.model = self.accelerator.prepare(model.to(device))
        self.ref_model = None if self.reference_is_adapter else ref_model.to(device).requires_grad_(False).eval()
        self.optimizer = self.accelerator.prepare(optimizer or self._default_optimizer())
        self.lr_scheduler = lr_scheduler
        self.dataset = dataset
        self.dataloader = None if dataset is None else self._make_dataloader(dataset, data_collator)
        make_controller = ppo.AdaptiveKLController if config.adap_kl_ctrl else ppo.FixedKLController
        arguments = (config.target, config.horizon) if config.adap_kl_ctrl else ()
        self.kl_ctl = make_controller(config.init_kl_coef, *arguments)
        self.running = ppo.RunningMoments()
        self.current_step = 0

    def _default_optimizer(self) -> torch.optim.Optimizer:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.Adam(trainable, lr=self.config.learning_rate, fused=True)

    def _make_dataloader(self, dataset, data_collator) -> DataLoader:
        if isinstance(dataset, datasets.Dataset) and self.config.remove_unused_columns:
            used = {*inspect.signature(self.model.forward).parameters, "label", "query", "response"}
            dataset = dataset.remove_columns([c for c in dataset.column_names if c not in used])
        if len(dataset) < self.config.batch_size:
            raise ValueError(f"The dataset has {len(dataset)} rows, fewer than one batch of {self.config.batch_size}.")
        loader = DataLoader(
            dataset,
            batch_size=self.config.batch_size,
            collate_fn=data_collator,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(self.config.seed),
        )
        return self.accelerator.prepare(loader)

    # --- generate ----------------------------------------------------------------------------------------------

    def generate(
        self,
        query_tensor: Tensor | Sequence[Tensor],
        length_sampler: LengthSampler | None = None,
        batch_size: int | None = None,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs,
    ):
        """Sample responses with the policy, and with the reference too where ``generate_ref_response`` asks for it.

        One query (T,) gives a tensor (1, T + R); a list of queries gives a list of 1-D tensors, sampled
        ``batch_size`` at a time (all at once by default), each row with its own length from ``length_sampler``.
        Without ``return_prompt`` only the response tokens come back.
        """
        single = isinstance(query_tensor, Tensor)
        queries = [query_tensor.reshape(-1)] if single else list(query_tensor)
        lengths = [length_sampler() for _ in queries] if length_sampler is not None else None

        def sample(model) -> list[Tensor] | Tensor:
            responses, size = [], batch_size or len(queries)
            for start in range(0, len(queries), size):
                rows = slice(start, start + size)
                part = lengths[rows] if lengths is not None else None
                responses += generate(model, self.tokenizer, queries[rows], part, **generation_kwargs)
            if return_prompt:
                responses = [torch.cat([q.to(r.device), r]) for q, r in zip(queries, responses, strict=True)]
            return responses[0].unsqueeze(0) if single else responses

        policy = self.accelerator.unwrap_model(self.model)
        responses = sample(policy)
        if not generate_ref_response:
            return responses
        with self._reference() as reference:
            return responses, sample(reference)

    # --- step --------------------------------------------------------------------------------------------------

    def step(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Sequence[Tensor] | Tensor,
        response_masks: Sequence[Tensor] | None = None,
    ) -> dict:
        """One PPO step over batch_size samples; returns the 40 stats, numbers and numpy arrays.

        queries and responses are 1-D token tensors, a score is one number per sample. ``response_masks`` leaves
        response tokens out of the losses.

        Raises ``ValueError`` or ``TypeError`` for unusable input and ``FloatingPointError`` for NaN or Inf.
        """
        started = time.perf_counter()
        self._check(queries, responses, scores)
        scores = self._process(scores)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        rollout = Rollout.from_lists(queries, responses, scores, pad, response_masks)
        clock = {}
        with inference_mode_of(self.model):
            tick = time.perf_counter()
            first_pass = self._log_probabilities(rollout)
            clock["forward_pass"] = time.perf_counter() - tick

            tick = time.perf_counter()
            rollout.rewards, rollout.non_score_rewards = ppo.compute_rewards(
                scores, rollout.kl, rollout.mask, self.kl_ctl.value
            )
            if self.config.whiten_rewards:
                rollout.rewards = ppo.masked_whiten(rollout.rewards, rollout.mask, shift_mean=False)
            clock["compute_rewards"] = time.perf_counter() - tick

            tick = time.perf_counter()
            advantages, rollout.returns = ppo.gae(
                rollout.rewards, rollout.values, rollout.mask, self.config.gamma, self.config.lam
            )
            rollout.advantages = ppo.masked_whiten(advantages, rollout.mask)
            clock["compute_advantages"] = time.perf_counter() - tick

            tick = time.perf_counter()
            minibatches = self._optimize(rollout, first_pass)
            clock["optimize_step"] = time.perf_counter() - tick

        tick = time.perf_counter()
        stats = step_stats(rollout, minibatches, self.kl_ctl.value)
        stats["ppo/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self.kl_ctl.update(stats["objective/kl"], len(rollout))
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.current_step += 1
        clock["calc_stats"] = time.perf_counter() - tick
        clock["total"] = time.perf_counter() - started
        return stats | {f"time/ppo/{phase}": seconds for phase, seconds in clock.items()}

    def _check(self, queries, responses, scores) -> None:
        size = self.config.batch_size
        for name, given in (("queries", queries), ("responses", responses), ("scores", scores)):
            if not isinstance(given, (list, tuple, Tensor)):
                raise TypeError(f"{name} is a {type(given).__name__}; give a list of {size} tensors.")
            if len(given) != size:
                raise ValueError(f"{name} has {len(given)} entries, but batch_size is {size}.")
        for name, given in (("query", queries), ("response", responses)):
            for i, tokens in enumerate(given):
                if not isinstance(tokens, Tensor) or tokens.dim() != 1:
                    raise ValueError(f"{name} {i} must be a 1-D tensor of token ids, got {_describe(tokens)}.")
                if len(tokens) == 0:
                    raise ValueError(
                        f"{name} {i} is empty: PPO has no token to give the score to. "
                        "Sample at least one token (min_new_tokens=1), or leave this sample out."
                    )

    def _process(self, scores) -> Tensor:
        """Scores as a float tensor (B,), scaled and clipped as the config says."""
        device = self.accelerator.device
        values = []
        for i, score in enumerate(scores):
            score = torch.as_tensor(score)
            if score.numel() != 1:
                raise ValueError(f"score {i} has {score.numel()} elements; a score is one number per sample.")
            if score.device.type not in ("cpu", device.type):
                raise ValueError(f"score {i} is on {score.device}, the policy on {device}: move it with .to(device).")
            values.append(score.detach().reshape(()).float().to(device))
        scores = torch.stack(values)
        if not scores.isfinite().all():
            i = int((~scores.isfinite()).nonzero()[0])
            raise FloatingPointError(
                f"Step {self.current_step}: the score of sample {i} is {scores[i].item()}. "
                "Look at its text, and at the reward model's dtype (float16 overflows; bfloat16 or float32 do not)."
            )
        if self.config.use_score_scaling:
            self.running.update(scores)
            centre = self.running.mean if self.config.use_score_norm else 0.0
            scores = (scores - centre) / (self.running.std + torch.finfo(scores.dtype).eps)
        if self.config.score_clip is not None:
            scores = scores.clamp(-self.config.score_clip, self.config.score_clip)
        return scores

    def _reference(self):
        """A context that gives the reference: its own model, or the policy's base with the frozen adapter."""
        if self.ref_model is not None:
            return nullcontext(self.ref_model)
        return reference_adapter(self.accelerator.unwrap_model(self.model))

    def _forward(self, model, part: Rollout) -> tuple[Tensor, Tensor]:
        """Logits (B, R, V) and values (B, R) at the positions that predict each response token.

        The last token predicts nothing that is needed, and the vocabulary projection runs on R positions only.
        """
        arguments = {"position_ids": part.position_ids[:, :-1]} if self._takes_positions else {}
        logits, _, values = model(
            input_ids=part.input_ids[:, :-1],
            attention_mask=part.attention_mask[:, :-1],
            logits_to_keep=part.mask.shape[1],
            use_cache=False,
            **arguments,
        )
        return logits, values

    def _log_probabilities(self, rollout: Rollout) -> tuple | None:
        """Fill in log-probabilities, values and KL of the rollout, mini-batch by mini-batch.

        When one mini-batch is the whole batch, the policy's pass keeps its graph and is returned: it *is* the
        first epoch's forward pass, because no weight has moved yet.
        """
        one_batch = self.config.mini_batch_size == self.config.batch_size
        for name in ("logprobs", "ref_logprobs", "values", "kl"):
            setattr(rollout, name, torch.zeros_like(rollout.mask))
        first_pass = None
        for rows in torch.arange(len(rollout), device=rollout.mask.device).split(self.config.mini_batch_size):
            part = rollout if one_batch else rollout.select(rows)
            with torch.no_grad(), self._reference() as reference:
                ref_logits, _ = self._forward(reference, part)
            with nullcontext() if one_batch else torch.no_grad():
                logits, values = self._forward(self.model, part)
                logprobs = ppo.logprobs_from_logits(logits, part.responses)
            first_pass = (logits, logprobs, values) if one_batch else None
            with torch.no_grad():
                ref_logprobs = ppo.logprobs_from_logits(ref_logits, part.responses)
                if self.config.kl_penalty == "full":
                    kl = ppo.kl_per_token(logits.log_softmax(-1), ref_logits.log_softmax(-1), "full")
                else:
                    kl = ppo.kl_per_token(logprobs, ref_logprobs, self.config.kl_penalty)
                found = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "values": values, "kl": kl}
                for name, tensor in found.items():
                    getattr(rollout, name)[rows, : part.mask.shape[1]] = tensor.detach() * part.mask
        self._check_finite(rollout)
        return first_pass

    def _check_finite(self, rollout: Rollout) -> None:
        for who, tensor in (("policy", rollout.logprobs), ("reference", rollout.ref_logprobs)):
            bad = ~tensor.isfinite().all(1)
            if bad.any():
                raise FloatingPointError(
                    f"Step {self.current_step}: the {who}'s logits for sample {int(bad.nonzero()[0])} are NaN or Inf. "
                    "No weight was changed in this step. Train float32 weights (with bf16 autocast if you like), "
                    "lower the learning rate, or go back to the last checkpoint."
                )

    def _optimize(self, rollout: Rollout, first_pass: tuple | None) -> list[dict]:
        """ppo_epochs passes over the rollout in fresh random order; returns each mini-batch's statistics."""
        collected = []
        for _ in range(self.config.ppo_epochs):
            order = torch.from_numpy(np.random.permutation(len(rollout))).to(rollout.mask.device)
            for rows in order.split(self.config.backward_batch_size):
                collected += self._optimizer_step(rollout, rows, first_pass)
                first_pass = None
            if self.config.early_stopping and collected[-1]["policy/policykl"] > 1.5 * self.config.target_kl:
                break
        return collected

    def _optimizer_step(self, rollout: Rollout, rows: Tensor, first_pass: tuple | None) -> list[dict]:
        tokens, collected, usable = rollout.mask[rows].sum(), [], 0
        for mini_rows in rows.split(self.config.mini_batch_size):
            part = rollout if first_pass else rollout.select(mini_rows)
            loss, stats = self._loss(part, first_pass)
            skip = stats["policy/mean_ratio"] > self.config.ratio_threshold
            if skip:
                warnings.warn(
                    f"Step {self.current_step}: the mean ratio of a mini-batch is {stats['policy/mean_ratio']:.1f}, above "
                    f"ratio_threshold {self.config.ratio_threshold}; it is skipped. Lower the learning rate.",
                    stacklevel=4,
                )
                for name in ("loss/policy", "loss/value", "loss/total"):
                    stats[name] = torch.zeros_like(stats[name])
            elif not loss.isfinite():
                self.optimizer.zero_grad()
                raise FloatingPointError(
                    f"Step {self.current_step}: the loss is {loss.item()} for the mini-batch of samples "
                    f"{mini_rows.tolist()[:8]}…; its update was not applied. Lower the learning rate, or clip "
                    "gradients with max_grad_norm."
                )
            else:
                self.accelerator.backward(loss * (part.mask.sum() / tokens))
                usable += 1
            collected.append(stats)
        if usable:
            if self.config.max_grad_norm is not None:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return collected

    def _loss(self, part: Rollout, first_pass: tuple | None) -> tuple[Tensor, dict]:
        """Policy loss + vf_coef · value loss, averaged over the response tokens of a mini-batch, and its statistics."""
        if first_pass is None:
            logits, values = self._forward(self.model, part)
            logprobs = ppo.logprobs_from_logits(logits, part.responses)
        else:
            logits, logprobs, values = first_pass
        mask = part.mask
        pg, ratio, pg_clipped = ppo.policy_loss(logprobs, part.logprobs, part.advantages, self.config.cliprange)
        vf, vf_clipped = ppo.value_loss(values, part.values, part.returns, self.config.cliprange_value)
        pg_loss, vf_loss = ppo.masked_mean(pg, mask), ppo.masked_mean(vf, mask)
        loss = pg_loss + self.config.vf_coef * vf_loss
        with torch.no_grad():
            difference = logprobs - part.logprobs
            stats = {
                "loss/policy": pg_loss,
                "loss/value": vf_loss,
                "loss/total": loss,
                "policy/entropy": ppo.masked_mean(ppo.entropy_from_logits(logits), mask),
                "policy/approxkl": 0.5 * ppo.masked_mean(difference.square(), mask),
                "policy/policykl": -ppo.masked_mean(difference, mask),
                "policy/clipfrac": ppo.masked_mean(pg_clipped.float(), mask),
                "policy/advantages_mean": ppo.masked_mean(part.advantages, mask),
                "policy/mean_ratio": ppo.masked_mean(ratio, mask),
                "returns/mean": ppo.masked_mean(part.returns, mask),
                "returns/var": ppo.masked_var(part.returns, mask),
                "val/vpred": ppo.masked_mean(values, mask),
                "val/error": ppo.masked_mean((values - part.returns).square(), mask),
                "val/clipfrac": ppo.masked_mean(vf_clipped.float(), mask),
                "val/mean": ppo.masked_mean(part.values, mask),
                "val/var": ppo.masked_var(part.values, mask),
                "policy/advantages": part.advantages[mask > 0],
                "policy/ratio": ratio[mask > 0],
            }
        return loss, {name: value.detach() for name, value in stats.items()}
