"""Implement a PPO trainer's setup, logging and saving."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader

from rlhf_course.data import collate
from rlhf_course.policy.adapters import add_reference_adapter, create_reference_model
from rlhf_course.policy.network import AutoModelForCausalLMWithValueHead
from rlhf_course.policy.save_load import check_vocabulary
from rlhf_course.policy.saving import PREFIX
from rlhf_course.ppo.algorithm import AdaptiveKLController, FixedKLController
from rlhf_course.ppo.checks import stack_scores
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.detectors import Detectors
from rlhf_course.ppo.sampling import end_tokens
from rlhf_course.ppo.score_scaling import RunningMoments
from rlhf_course.runtime import tracking

COPIES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class TrainerBase:
    """Set up :class:`PPOTrainer`, log its steps, and save its policy."""

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
    ) -> None:
        if getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError("lr_scheduler has another optimizer: pass that optimizer as well.")
        self.config, self.tokenizer, self.lr_scheduler = config, tokenizer, lr_scheduler
        self.accelerator = tracking.start(config)
        set_seed(config.seed, device_specific=True)  # processes sample different responses
        ref_model = make_reference(model, ref_model, num_shared_layers)
        self.model, self.ref_model, self.optimizer = prepare_models(
            self.accelerator, config, model, ref_model, tokenizer, optimizer
        )
        how = data_collator, config, self.accelerator
        self.dataset = dataset
        self.dataloader = None if dataset is None else make_dataloader(dataset, *how)
        self.kl_ctl = (
            AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
            if config.adap_kl_ctrl
            else FixedKLController(config.init_kl_coef)
        )
        self.running, self.detectors = RunningMoments(), Detectors(config.target)
        self.current_step, self.is_whole = 0, True  # not whole while a step moves weights
        self.checkpoints: list[Path] = []  # those this trainer wrote or resumed from

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
            columns = {name: list(batch[name]) for name in columns_to_log}
            tracking.log_step(self.accelerator, stats, columns, scores, step)

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


def make_reference(model, ref_model, num_shared_layers: int | None):
    """Return the reference as a frozen policy; None if the reference is an adapter.

    Raises ``TypeError`` for a policy without a value head, and ``ValueError`` for shared weights.
    """
    if not isinstance(model, AutoModelForCausalLMWithValueHead):
        raise TypeError(
            f"The policy is a {type(model).__name__}, without a value head. "
            "Load it with AutoModelForCausalLMWithValueHead.from_pretrained."
        )
    if getattr(ref_model or model, "is_trained", False):
        warnings.warn(
            "PPO has trained this policy already; if a copy of it is the reference, KL restarts at "
            "0. Load the policy again, or pass its untrained copy as ref_model.",
            stacklevel=3,
        )
    if ref_model is None:
        return (
            add_reference_adapter(model)
            if model.is_peft_model
            else create_reference_model(model, num_shared_layers)
        )
    if not isinstance(ref_model, AutoModelForCausalLMWithValueHead):
        ref_model = AutoModelForCausalLMWithValueHead(ref_model)
    if {p for p in model.parameters() if p.requires_grad} & {*ref_model.parameters()}:
        raise ValueError(
            "The reference shares weights that the policy trains, so the KL stays 0. Leave "
            "ref_model out for a frozen copy."
        )
    return ref_model.requires_grad_(False).eval()


def prepare_models(
    accelerator: Accelerator, config: PPOConfig, model, ref_model, tokenizer, optimizer
) -> tuple:
    """Prepare policy, reference and optimizer (default: Adam); raise ``ValueError`` if unusable."""
    if accelerator.distributed_type not in COPIES:
        raise ValueError(
            "PPOTrainer needs one copy of the model per GPU (DDP), not"
            f" {accelerator.distributed_type.value}. Choose DDP in accelerate's config."
        )
    check_tokenizer(tokenizer, model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if all(name.startswith(PREFIX) for name in trained):
        raise ValueError(
            "Only the value head would be trained. Load an adapter with is_trainable=True, or call"
            " requires_grad_() on the weights that should learn."
        )
    harms = {torch.float16: "ends in NaN", torch.bfloat16: "rounds most small updates away"}
    for dtype in {p.dtype for p in trained.values()} & {*harms}:
        warnings.warn(
            f"The policy trains {dtype} weights, which {harms[dtype]}. Load "
            "dtype=torch.float32 (bf16 only as autocast), or train a float32 adapter.",
            stacklevel=3,
        )
    if ref_model is not None:
        if ref_model.vocab_size != model.vocab_size:
            sizes = f"{ref_model.vocab_size} tokens, and the policy {model.vocab_size}"
            raise ValueError(f"The reference has {sizes}. Use models with the same vocabulary.")
        ref_model = accelerator.prepare_model(ref_model, evaluation_mode=True)
    if optimizer is None:
        optimizer = torch.optim.Adam(trained.values(), lr=config.learning_rate, fused=config.fast)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [name for name, p in trained.items() if id(p) not in held]:
        raise ValueError(
            f"The optimizer lacks {len(missing)} of the policy's {len(trained)} trainable weights,"
            f" such as {missing[0]}. Make it from this policy's parameters(), after loading."
        )
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, ref_model, optimizer


def check_tokenizer(tokenizer, model) -> None:
    """Raise ``ValueError`` unless the tokenizer fits the model and they share an EOS token."""
    check_vocabulary(tokenizer, model)
    eos, ends = tokenizer.eos_token_id, end_tokens(model, {}).tolist()
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
    if isinstance(dataset, datasets.Dataset) and config.remove_unused_columns:
        used = {"label", "query", "response"}
        used |= {*inspect.signature(AutoModelForCausalLMWithValueHead.forward).parameters}
        if not used & {*dataset.column_names} and len(dataset):
            raise ValueError(
                f"The dataset has no column query or input_ids, only {dataset.column_names}. Rename"
                " one, or set remove_unused_columns=False."
            )
        dataset = dataset.select_columns([name for name in dataset.column_names if name in used])
    if len(dataset) < (needed := config.batch_size * accelerator.num_processes):
        raise ValueError(
            f"The dataset has {len(dataset)} rows, fewer than one batch of {needed}."
            " Lower batch_size."
        )
    order = torch.Generator().manual_seed(config.seed)
    how = {"collate_fn": data_collator or collate, "drop_last": True, "generator": order}
    return accelerator.prepare(DataLoader(dataset, config.batch_size, shuffle=True, **how))
