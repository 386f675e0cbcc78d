"""Run PPO step by step: ``generate`` → your reward → ``step`` → ``log_stats``."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import datasets
import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader

from rlhf_course.data import collate
from rlhf_course.data.reviews import LengthSampler
from rlhf_course.policy.adapters import use_adapter
from rlhf_course.policy.network import without_dropout
from rlhf_course.policy.reference import make_reference
from rlhf_course.policy.save_load import VALUE_HEAD_PREFIX, check_vocabulary
from rlhf_course.ppo import update
from rlhf_course.ppo.algorithm import (
    AdaptiveKLController,
    FixedKLController,
    RunningMoments,
    compute_rewards,
    kl_per_token,
)
from rlhf_course.ppo.checks import (
    as_rows,
    check_samples,
    drop_masked,
    stack_scores,
    warn_about_samples,
)
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.detectors import Detectors
from rlhf_course.ppo.rollout import Outputs, Samples
from rlhf_course.ppo.sampling import generate
from rlhf_course.ppo.self_test import check_policy
from rlhf_course.ppo.settings import end_tokens, pad_token_id
from rlhf_course.runtime import old_names, tracking

# One copy of the model per process.
SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
# Columns of a dataset that the policy or PPO uses.
COLUMNS = ("label", "query", "response", "input_ids", "attention_mask")


class PPOTrainer:
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

    A subclass may override ``compute_rewards`` and ``_kl_penalty``. Defining another method that
    TRL's ``step`` called raises ``TypeError``, because it would never be called.
    """

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        old_names.refuse_overrides(cls)

    def __getattr__(self, name: str):
        for kind in (old_names.OVERRIDE, old_names.ATTRIBUTE):
            advice = old_names.advice(kind, name)
            if advice is not None:
                raise AttributeError(advice)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __init__(
        self,
        config: PPOConfig,
        model,
        ref_model=None,
        tokenizer=None,
        dataset=None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator=None,
        num_shared_layers: int | None = None,
        lr_scheduler=None,
        **old_arguments,
    ) -> None:
        old_names.refuse_arguments(old_arguments)
        if getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError("lr_scheduler has another optimizer: pass that optimizer as well.")
        self.config = config
        self.tokenizer = tokenizer
        self.lr_scheduler = lr_scheduler
        self.accelerator = tracking.start(config)
        set_seed(config.seed, device_specific=True)  # processes sample different responses
        ref_model = make_reference(model, ref_model, num_shared_layers)
        self.model, self.ref_model, self.optimizer = prepare_models(
            self.accelerator, config, model, ref_model, tokenizer, optimizer
        )
        if config.self_test:
            check_policy(self.policy, config, self.accelerator)
        self.dataset = dataset
        self.dataloader = None
        if dataset is not None:
            self.dataloader = make_dataloader(dataset, data_collator, config, self.accelerator)
        if config.adap_kl_ctrl:
            self.kl_ctl = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
        else:
            self.kl_ctl = FixedKLController(config.init_kl_coef)
        self.running = RunningMoments()
        self.detectors = Detectors(config.target)
        self.current_step = 0
        self.is_whole = True  # False while a step changes weights
        self.checkpoints: list[Path] = []  # those this trainer wrote or resumed from

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
        ``length_sampler``. ``attention_mask`` has a row per query; tokens with 0 are left out. If
        not ``return_prompt``, return only the response tokens, as ``step`` expects. PPO needs
        transformers' ``do_sample=True, top_k=0, top_p=1.0``.
        """
        is_single = isinstance(query_tensor, Tensor)
        if is_single and query_tensor.numel() != query_tensor.shape[-1]:
            raise ValueError(f"{tuple(query_tensor.shape)} is not 1-D; pass a list of queries.")
        queries = [query_tensor.reshape(-1)] if is_single else as_rows("query", query_tensor)
        masks = generation_kwargs.pop("attention_mask", None)
        visible = queries if masks is None else drop_masked(queries, masks)
        lengths = None if length_sampler is None else [length_sampler() for _ in queries]

        def sample(model) -> list[Tensor] | Tensor:
            responses = self._sample(model, visible, lengths, batch_size, generation_kwargs)
            if return_prompt:
                responses = [
                    torch.cat([torch.as_tensor(query).to(response.device), response])
                    for query, response in zip(queries, responses, strict=True)
                ]
            return responses[0].unsqueeze(0) if is_single else responses

        responses = sample(self.policy)
        if not generate_ref_response:
            return responses
        with self.reference() as reference:
            return responses, sample(reference)

    def _sample(
        self, model, queries: list, lengths: list[int] | None, batch_size: int | None, settings
    ) -> list[Tensor]:
        """Return a response per query, sampled from ``batch_size`` queries at a time."""
        responses = []
        size = batch_size or len(queries)
        for start in range(0, len(queries), size):
            rows = slice(start, start + size)
            with self.accelerator.autocast():  # step() scores with the same precision and mask
                responses += generate(
                    model,
                    self.tokenizer,
                    queries[rows],
                    lengths=None if lengths is None else lengths[rows],
                    begin_suppress=self.config.begin_suppress_tokens,
                    fast=self.config.fast,
                    **settings,
                )
        return responses

    def step(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores, response_masks=None
    ) -> dict:
        """Take one PPO step on batch_size samples; return the 41 statistics in ``stats.MEANING``.

        queries and responses are 1-D token tensors (or lists); scores has one number per sample.
        ``response_masks`` (1 or 0 per token) excludes tokens marked 0 from the losses. Raises
        ``ValueError`` for unusable input and ``FloatingPointError`` for NaN or Inf.
        """
        started = time.perf_counter()
        config = self.config
        learning_rate = self.optimizer.param_groups[0]["lr"]
        queries, responses = check_samples(
            self.policy, config.batch_size, queries, responses, scores, response_masks
        )
        warn_about_samples(queries, responses, response_masks, self.tokenizer)
        scores = stack_scores(scores, self.accelerator.device, self.current_step)
        scores, running = update.scale_scores(scores, self.running, config, self.accelerator)
        was_whole = self.is_whole  # False after an interrupted step, which later steps do not fix
        seconds = {}
        with torch.inference_mode(False), without_dropout(self.model, checkpointing=True):
            samples = Samples.from_lists(
                queries, responses, scores, pad_token_id(self.tokenizer), response_masks
            )
            experience, first_pass = update.make_experience(
                samples,
                self.model,
                self.reference,
                config,
                self.kl_ctl.value,
                self.current_step,
                total=partial(self.accelerator.reduce, reduction="sum"),
                seconds=seconds,
                compute_rewards=self.compute_rewards,
            )
            self.is_whole = False  # until the epochs end
            self.policy.is_trained = True
            with update.timed(seconds, "optimize_step"):
                minibatches = self._optimize(samples, experience, first_pass)
        with update.timed(seconds, "calc_stats"):
            stats = update.step_stats(
                samples, experience, minibatches, self.kl_ctl.value, self.accelerator
            )
        n_samples = config.batch_size * self.accelerator.num_processes
        self.kl_ctl.update(stats["objective/kl"], n_samples)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.running = running
        self.current_step += 1
        self.is_whole = was_whole
        seconds["total"] = time.perf_counter() - started
        times = {f"time/ppo/{phase}": value for phase, value in seconds.items()}
        return stats | times | {"ppo/learning_rate": learning_rate}

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return per-token rewards, their KL term and the KL, (B, R) each, 0 where masks are 0.

        ``step`` calls this method; a subclass may override it, as in TRL 0.8 to 0.11. Scores are
        (B,), scaled and clipped; log-probabilities are (B, R), or (B, R, V) if ``kl_penalty`` is
        ``full``.
        """
        kl = self._kl_penalty(logprobs, ref_logprobs) * masks
        rewards, non_score_rewards = compute_rewards(scores, kl, masks, self.kl_ctl.value)
        return rewards, non_score_rewards, kl

    def _kl_penalty(self, logprob: Tensor, ref_logprob: Tensor) -> Tensor:
        """Return the KL per token; ``compute_rewards`` calls this method, as in TRL."""
        return kl_per_token(logprob, ref_logprob, self.config.kl_penalty)

    def _optimize(
        self, samples: Samples, experience: update.Experience, first_pass: Outputs | None
    ) -> list[update.MiniBatch]:
        """Run the epochs; return each mini-batch's statistics."""
        return update.optimize(
            self.model,
            self.optimizer,
            self.accelerator,
            samples,
            experience,
            self.config,
            self.current_step,
            first_pass,
        )

    @property
    def policy(self):
        """Return the policy without its data-parallel wrapper."""
        return self.accelerator.unwrap_model(self.model)

    def reference(self):
        """Return a context manager for the reference: a model, or the policy's frozen adapter."""
        if self.ref_model is not None:
            return nullcontext(self.ref_model)
        return use_adapter(self.policy, self.policy.reference_adapter)

    def log_stats(
        self,
        stats: dict,
        batch: dict[str, list],
        rewards: Sequence[Tensor] | Tensor,
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> None:
        """Warn about signs of failure; send statistics, scores and samples to the tracker."""
        step = self.current_step - 1
        if self.accelerator.is_main_process:
            self.detectors.check(stats, step)
        if self.config.log_with is not None:
            scores = stack_scores(rewards, self.accelerator.device, step)
            missing = [name for name in columns_to_log if name not in batch]
            if missing:
                raise ValueError(
                    f"The batch has no column {missing[0]!r} to log, only {', '.join(batch)}. Add"
                    " it, or pass other columns_to_log."
                )
            columns = {name: list(batch[name]) for name in columns_to_log}
            tracking.log_step(self.accelerator, stats, columns, scores, step)

    def trainable_weights(self) -> dict[str, Tensor]:
        """Return the policy's trainable weights by name."""
        return {name: p for name, p in self.policy.named_parameters() if p.requires_grad}

    def state_dict(self) -> dict:
        """Return everything that steps change, except random generators' states."""
        state = {
            "step": self.current_step,
            "weights": self.trainable_weights(),
            "optimizer": self.optimizer.state_dict(),
            "kl_coef": self.kl_ctl.value,
            "moments": vars(self.running),
            "detectors": self.detectors.state_dict(),
        }
        if self.lr_scheduler is not None:
            state["schedule"] = self.lr_scheduler.state_dict()
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict) -> None:
        """Restore the state that :meth:`state_dict` returned, in a trainer of the same parts.

        A fixed KL coefficient is not restored, nor is the learning rate if there is no schedule.
        """
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["schedule"])
        else:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        with torch.no_grad():
            for name, weight in self.trainable_weights().items():
                weight.copy_(state["weights"][name])
        if self.accelerator.scaler is not None and "scaler" in state:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if self.config.adap_kl_ctrl:
            self.kl_ctl.value = state["kl_coef"]
        vars(self.running).update(state["moments"])
        self.detectors.load_state_dict(state["detectors"])
        self.current_step = state["step"]
        self.is_whole = True

    def save_pretrained(self, save_directory: str) -> None:
        """Save policy, value head and tokenizer in one folder; only the first process writes.

        Raises the policy's errors, and ``RuntimeError`` after an interrupted step.
        """
        self.check_whole()
        if self.accelerator.is_main_process:
            self.policy.save_pretrained(save_directory, tokenizer=self.tokenizer)
        self.accelerator.wait_for_everyone()

    def check_whole(self) -> None:
        """Raise ``RuntimeError`` if an interrupt or NaN ended a step early."""
        if not self.is_whole:
            raise RuntimeError(
                "A step was interrupted while it changed weights. Go back to the last checkpoint."
            )


def prepare_models(
    accelerator: Accelerator, config: PPOConfig, model, ref_model, tokenizer, optimizer
) -> tuple:
    """Prepare policy, reference and optimizer (default: Adam); raise ``ValueError`` if unusable."""
    if accelerator.distributed_type not in SUPPORTED:
        raise ValueError(
            "PPOTrainer needs one copy of the model per GPU (DDP), not"
            f" {accelerator.distributed_type.value}. Choose DDP in accelerate's config."
        )
    check_tokenizer(tokenizer, model)
    trained = check_trained(model)
    if ref_model is not None:
        if ref_model.vocab_size != model.vocab_size:
            raise ValueError(
                f"The reference has {ref_model.vocab_size} tokens, and the policy"
                f" {model.vocab_size}. Use models with the same vocabulary."
            )
        ref_model = accelerator.prepare_model(ref_model, evaluation_mode=True)
    if optimizer is None:
        optimizer = torch.optim.Adam(trained.values(), lr=config.learning_rate, fused=config.fast)
    in_optimizer = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in trained.items() if p not in in_optimizer]
    if missing:
        raise ValueError(
            f"The optimizer lacks {len(missing)} of the policy's {len(trained)} trainable weights,"
            f" such as {missing[0]}. Make it from this policy's parameters(), after loading."
        )
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, ref_model, optimizer


def check_trained(model) -> dict[str, Tensor]:
    """Return the policy's trainable weights by name; warn if their dtype harms training.

    Raises ``ValueError`` if only the value head would be trained.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if all(name.startswith(VALUE_HEAD_PREFIX) for name in trained):
        raise ValueError(
            "Only the value head would be trained. Load an adapter with is_trainable=True, or call"
            " requires_grad_() on the weights that should learn."
        )
    harms = {torch.float16: "ends in NaN", torch.bfloat16: "rounds most small updates away"}
    for dtype in {p.dtype for p in trained.values()}:
        if dtype in harms:
            warnings.warn(
                f"The policy trains {dtype} weights, which {harms[dtype]}. Load "
                "dtype=torch.float32 (bf16 only as autocast), or train a float32 adapter.",
                stacklevel=4,
            )
    return trained


def check_tokenizer(tokenizer, model) -> None:
    """Raise ``ValueError`` unless the tokenizer fits the model and they share an EOS token."""
    check_vocabulary(tokenizer, model)
    eos = tokenizer.eos_token_id
    ends = end_tokens(model, {}).tolist()
    if ends and eos not in (None, *ends):
        raise ValueError(
            f"The tokenizer ends texts with token {eos}, the model with {ends}: responses would "
            "not end. Set tokenizer.eos_token or generation_config.eos_token_id."
        )
    if any(token >= model.vocab_size for token in ends):
        raise ValueError(
            f"EOS token {ends} is outside the vocabulary of {model.vocab_size}; set"
            " generation_config.eos_token_id."
        )


def make_dataloader(
    dataset, data_collator: Callable | None, config: PPOConfig, accelerator: Accelerator
) -> DataLoader:
    """Return a loader of shuffled batches; raise ``ValueError`` for fewer rows than one batch.

    ``remove_unused_columns`` keeps only columns that the policy or PPO uses.
    """
    if isinstance(dataset, Mapping):  # such as datasets.DatasetDict
        raise ValueError(
            f"The dataset has the splits {', '.join(map(str, dataset))}. Pass one of them:"
            " dataset[split]."
        )
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"The dataset, {type(dataset).__name__}, has no length and cannot be shuffled. Pass a"
            " list of its first rows: list(dataset.take(1000))."
        )
    if isinstance(dataset, datasets.Dataset) and config.remove_unused_columns:
        used = [name for name in dataset.column_names if name in COLUMNS]
        if not used and len(dataset):
            raise ValueError(
                f"The dataset has no column query or input_ids, only {dataset.column_names}. Rename"
                " one, or set remove_unused_columns=False."
            )
        dataset = dataset.select_columns(used)
    needed = config.batch_size * accelerator.num_processes
    if len(dataset) < needed:
        raise ValueError(
            f"The dataset has {len(dataset)} rows, fewer than one batch of {needed}."
            " Lower batch_size."
        )
    loader = DataLoader(
        dataset,
        config.batch_size,
        shuffle=True,
        collate_fn=data_collator or collate,
        drop_last=True,
        generator=torch.Generator().manual_seed(config.seed),
    )
    return accelerator.prepare(loader)
