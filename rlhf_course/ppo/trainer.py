"""PPO, step by step: ``generate`` → your reward → ``step`` → ``log_stats``."""

import copy
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from rlhf_course.policy.adapters import (
    REFERENCE,
    add_reference_adapter,
    create_reference_model,
    use_adapter,
)
from rlhf_course.policy.save_load import check_vocabulary, model_folder
from rlhf_course.policy.value_head import (
    AutoModelForCausalLMWithValueHead,
    can_pack,
    without_dropout,
)
from rlhf_course.ppo import algorithm as ppo
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.dataloader import make_dataloader
from rlhf_course.ppo.decoder import Decoders
from rlhf_course.ppo.detectors import Detectors, warn_about_float16, warn_about_samples
from rlhf_course.ppo.experience import add_advantages, add_logprobs, add_rewards
from rlhf_course.ppo.input_checks import (
    check_parts,
    check_rates,
    check_samples,
    check_weights,
    process_scores,
    stack_scores,
)
from rlhf_course.ppo.rollout import Rollout
from rlhf_course.ppo.sampling import LengthSampler, generate, pad_token_id
from rlhf_course.ppo.stats import Clock, step_stats
from rlhf_course.ppo.update import optimize
from rlhf_course.runtime import tracking
from rlhf_course.runtime.argument_checks import check_positive
from rlhf_course.runtime.distributed import check_sharding, gather_full, prepare


class PPOTrainer:
    """PPO for a policy with a value head, with the stepwise interface of TRL up to 0.11.

    The arithmetic is the classic one, held to frozen numbers by the tests. It differs on purpose in
    these points:

    * dropout is off in every forward pass, so that one distribution is sampled, scored and updated;
    * ``max_grad_norm`` clips every optimizer step; a skipped mini-batch moves neither weights nor
      optimizer state;
    * gradient accumulation weights mini-batches by their response tokens, so k × m samples equal
      one batch of k·m;
    * NaN or Inf raises ``FloatingPointError`` instead of training on;
    * score scaling works, and whitened rewards stay 0 on padding;
    * log-probabilities do not depend on padding: updates pad on the right or pack rows, generation
      passes position_ids;
    * an empty response is a ``ValueError``, and so is a batch with one response token, which cannot
      be whitened; prompts keep an EOS that they contain;
    * histograms hold response tokens only;
    * sampling settings that change the distribution give a warning, and so do the symptoms in
      ``detectors.py``;
    * under ``accelerate launch`` each process has batch_size samples of its own; whitening,
      statistics, β, skipping and stopping are those of all of them, so P processes with B samples
      equal one with P·B, under FSDP2 too;
    * without ``ref_model``, a policy with adapters is held against a frozen copy of its starting
      adapter, and with one, against the model that was given.

    Args:
        config: settings, see :class:`PPOConfig`.
        model: the policy.
        ref_model: the reference; default a frozen copy of the policy as it is now.
        tokenizer: its pad token fills batches (EOS where it has none).
        dataset: rows for ``dataloader``.
        optimizer: default Adam over the trainable parameters, without weight decay.
        data_collator: makes a batch of rows; default a list per column, because queries are ragged.
        num_shared_layers: first layers that policy and reference share, frozen.
        lr_scheduler: stepped once per ``step``.
    """

    _printed = False

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
        check_vocabulary(tokenizer, model)
        self.config, self.tokenizer = config, tokenizer
        self.accelerator: Accelerator = tracking.start(config)
        check_sharding(self.accelerator, model, num_shared_layers)
        if (
            config.fast
            and self.accelerator.device.type == "cuda"
            and self.accelerator.mixed_precision != "no"
        ):
            torch.set_float32_matmul_precision(
                "high"
            )  # the vocabulary's products, which autocast leaves alone
        set_seed(config.seed, device_specific=True)  # processes sample different responses
        self._total = partial(self.accelerator.reduce, reduction="sum")
        self.reference_is_adapter = ref_model is None and model.is_peft_model
        if self.reference_is_adapter:
            add_reference_adapter(model)
        elif ref_model is None:
            ref_model = create_reference_model(model, num_shared_layers)
        elif not isinstance(ref_model, AutoModelForCausalLMWithValueHead):
            ref_model = AutoModelForCausalLMWithValueHead(ref_model)
        check_parts(model, ref_model, optimizer, config, dataset)
        warn_about_float16(model)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()

        if ref_model is not None:
            ref_model.requires_grad_(False).eval()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = optimizer or torch.optim.Adam(
            trained, lr=config.learning_rate, fused=config.fast
        )
        self.model, self.ref_model, self.optimizer = prepare(
            self.accelerator, model, ref_model, optimizer
        )
        self.lr_scheduler = lr_scheduler
        self.dataset, self.dataloader = dataset, None
        if dataset is not None:
            self.dataloader = make_dataloader(dataset, data_collator, config, self.accelerator)
        if config.adap_kl_ctrl:
            self.kl_ctl = ppo.AdaptiveKLController(
                config.init_kl_coef, config.target, config.horizon
            )
        else:
            self.kl_ctl = ppo.FixedKLController(config.init_kl_coef)
        self.running = ppo.RunningMoments()
        self.detectors = Detectors(config)
        self.current_step = 0
        self._decoders = Decoders()
        self._print_shortcuts()

    def _print_shortcuts(self) -> None:
        """Print once per process which shortcuts are taken."""
        config, on_cpu, packs = (
            self.config,
            self.accelerator.device.type == "cpu",
            can_pack(self.model),
        )
        on_gpu = self.accelerator.device.type == "cuda"
        shortcuts = {
            "several samples per row": on_cpu and packs,
            "the first epoch reuses the first pass": config.mini_batch_size == config.batch_size,
            "fused Adam": getattr(self.optimizer, "defaults", {}).get("fused"),
            "a CUDA graph per token (for small caches)": (
                on_gpu and packs and not self.accelerator.is_fsdp2
            ),
            "TF32 beside autocast": on_gpu and torch.get_float32_matmul_precision() != "highest",
        }
        if config.fast and not PPOTrainer._printed:
            names = ", ".join(name for name, taken in shortcuts.items() if taken) or "as written"
            self.accelerator.print(
                f"PPO on {self.accelerator.device.type}: {names}; PPOConfig(fast=False) does"
                " without."
            )
            PPOTrainer._printed = True

    # --- generate
    # ----------------------------------------------------------------------------------------------

    def generate(
        self,
        query_tensor: Tensor | Sequence[Tensor],
        length_sampler: LengthSampler | None = None,
        batch_size: int | None = None,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs,
    ):
        """Sample responses with the policy, and with the reference too where
        ``generate_ref_response`` asks for it.

        One query (T,) gives a tensor (1, T + R); a list of queries gives a list of 1-D tensors,
        sampled ``batch_size`` at a time (all at once by default), each row with its own length from
        ``length_sampler``. Without ``return_prompt`` only the response tokens come back, as
        ``step`` takes them. ``begin_suppress_tokens`` of the config apply; other arguments are
        those of transformers' generate. PPO learns from samples, so pass ``do_sample=True, top_k=0,
        top_p=1.0``: without do_sample decoding is greedy, for comparisons, with no warning.
        """
        single = isinstance(query_tensor, Tensor)
        if single and query_tensor.dim() == 2 and len(query_tensor) > 1:
            raise ValueError(
                f"One query is 1-D, got shape {tuple(query_tensor.shape)}; give several as a list."
            )
        queries = [query_tensor.reshape(-1)] if single else list(query_tensor)
        check_positive("The number of queries", len(queries))
        check_positive("batch_size", 1 if batch_size is None else batch_size)
        lengths = [length_sampler() for _ in queries] if length_sampler is not None else None
        how = {"begin_suppress": self.config.begin_suppress_tokens, "fast": self.config.fast}
        if not self.accelerator.is_fsdp2:
            how["decoders"] = self._decoders
        else:  # FSDP's forward is collective: all ranks sample until the slowest has finished
            how["all_max"] = lambda n: int(
                self.accelerator.gather(torch.tensor([n], device=policy.device)).max()
            )

        def sample(model) -> list[Tensor] | Tensor:
            responses, size = [], len(queries) if batch_size is None else batch_size
            for start in range(0, len(queries), size):
                rows = slice(start, start + size)
                part = lengths[rows] if lengths is not None else None
                with (
                    self.accelerator.autocast()
                ):  # as in step(): one distribution is sampled and scored
                    responses += generate(
                        model, self.tokenizer, queries[rows], part, **how, **generation_kwargs
                    )
            if return_prompt:
                pairs = zip(queries, responses, strict=True)
                responses = [torch.cat([torch.as_tensor(q, device=r.device), r]) for q, r in pairs]
            return responses[0].unsqueeze(0) if single else responses

        policy = self.accelerator.unwrap_model(self.model)
        responses = sample(policy)
        if not generate_ref_response:
            return responses
        with self.reference() as reference:
            return responses, sample(reference)

    # --- step
    # --------------------------------------------------------------------------------------------------

    def step(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Sequence[Tensor] | Tensor,
        response_masks: Sequence[Tensor] | None = None,
    ) -> dict:
        """One PPO step over batch_size samples; returns the 40 stats, numbers and numpy arrays.

        queries and responses are 1-D token tensors (or lists), a score is one number per sample;
        each may be on the host or on the device. ``response_masks`` leaves response tokens out of
        the losses. It works under ``torch.no_grad`` and ``torch.inference_mode``, too.

        Raises ``ValueError`` or ``TypeError`` for unusable input and ``FloatingPointError`` for NaN
        or Inf.
        """
        started, learning_rate = time.perf_counter(), self.optimizer.param_groups[0]["lr"]
        check_rates(self.kl_ctl.value, learning_rate, self.current_step)
        policy, size = self.accelerator.unwrap_model(self.model), self.config.batch_size
        queries, responses = check_samples(policy, size, queries, responses, scores, response_masks)
        scores = stack_scores(scores, self.accelerator.device, self.current_step)
        warn_about_samples(queries, responses, response_masks, self.tokenizer)
        running = copy.copy(self.running)  # kept when the step has passed all checks
        scores = process_scores(scores, self.config, running, self.accelerator.gather)
        clock = Clock()
        with (
            torch.inference_mode(False),
            without_dropout(self.model, checkpointing=True),
        ):  # and no no_grad
            rollout = Rollout.from_lists(
                queries, responses, scores, pad_token_id(self.tokenizer), response_masks
            )
            with clock("forward_pass"):
                first_pass = add_logprobs(
                    rollout, self.model, self.reference, self.config, self.current_step
                )
            with clock("compute_rewards"):
                add_rewards(rollout, self.config, self.kl_ctl.value, self._total)
            with clock("compute_advantages"):
                add_advantages(rollout, self.config, self._total)
            with clock("optimize_step"):
                parts = (self.model, self.optimizer, self.accelerator)
                minibatches = optimize(*parts, rollout, self.config, self.current_step, first_pass)
        with clock("calc_stats"):
            stats = step_stats(rollout, minibatches, self.kl_ctl.value, self.accelerator)
            stats["ppo/learning_rate"] = learning_rate
        if self.accelerator.is_main_process:
            self.detectors.check(stats, self.current_step)
        self.kl_ctl.update(stats["objective/kl"], len(rollout) * self.accelerator.num_processes)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.running, self.current_step = running, self.current_step + 1
        clock.seconds["total"] = time.perf_counter() - started
        return stats | {f"time/ppo/{phase}": seconds for phase, seconds in clock.seconds.items()}

    def reference(self):
        """A context that gives the reference: its own model, or the policy's base with the frozen
        adapter.
        """
        if self.ref_model is not None:
            return nullcontext(self.ref_model)
        return use_adapter(self.accelerator.unwrap_model(self.model), REFERENCE)

    # --- after a step
    # --------------------------------------------------------------------------------------------

    def log_stats(
        self,
        stats: dict,
        batch: dict[str, list],
        rewards: Sequence[Tensor] | Tensor,
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> None:
        """Send a step's stats, the batch's scores and a table of samples to the tracker; nothing
        without one.

        Raises ``ValueError`` when the batch lacks a column that should be logged, or columns and
        rewards differ in length.
        """
        if self.config.log_with is None:
            return
        missing = [column for column in columns_to_log if column not in batch]
        if missing:
            raise ValueError(
                f"The batch has no column {', '.join(missing)}; it has {', '.join(batch)}."
            )
        sizes = {column: len(batch[column]) for column in columns_to_log} | {
            "rewards": len(rewards)
        }
        if len({*sizes.values()}) > 1:
            raise ValueError(f"A row of the table is a sample, but there are {sizes}.")
        scores = stack_scores(rewards, self.accelerator.device, self.current_step - 1)
        mine, scores = scores.tolist(), self.accelerator.gather(scores).cpu()
        if not self.accelerator.is_main_process:
            return
        extra = {"env/reward_mean": scores.mean().item(), "env/reward_std": scores.std().item()}
        table = {column: list(batch[column]) for column in columns_to_log} | {"reward": mine}
        stats = stats | extra | {"env/reward_dist": scores.numpy()}
        tracking.log(self.accelerator, stats, table, self.current_step - 1)

    def save_pretrained(self, save_directory: str) -> None:
        """Save policy, value head and tokenizer into one folder; of several processes, the first
        one writes.

        Raises ``FloatingPointError`` for weights of NaN or Inf, and as the policy's own
        ``save_pretrained``.
        """
        policy = self.accelerator.unwrap_model(self.model)
        state = (
            gather_full(policy.state_dict(keep_vars=True)) if self.accelerator.is_fsdp2 else None
        )
        if self.accelerator.is_main_process:
            check_weights(state or policy.state_dict(), self.current_step)
            with model_folder(save_directory, policy.is_peft_model) as folder:
                policy.write_files(folder, state)
                if hasattr(self.tokenizer, "save_pretrained"):
                    self.tokenizer.save_pretrained(folder)
        self.accelerator.wait_for_everyone()
