"""What a trainer is made of: its models, their optimizer, and the batches of queries."""

import inspect
import warnings
from collections.abc import Callable

import datasets
import torch
from accelerate import Accelerator, DistributedType
from torch.utils.data import DataLoader

from rlhf_course.data import collate
from rlhf_course.policy.adapters import add_reference_adapter, create_reference_model
from rlhf_course.policy.network import AutoModelForCausalLMWithValueHead
from rlhf_course.policy.save_load import check_vocabulary
from rlhf_course.policy.saving import PREFIX
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.sampling import end_tokens

COPIES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def make_reference(model, ref_model, num_shared_layers: int | None):
    """The reference as a frozen policy; None where it is an adapter of the policy's own base.

    Raises ``TypeError`` for a policy without a value head.
    """
    if not isinstance(model, AutoModelForCausalLMWithValueHead):
        raise TypeError(
            f"The policy is a {type(model).__name__}, without a value head. "
            "Load it with AutoModelForCausalLMWithValueHead.from_pretrained."
        )
    if ref_model is None and model.is_peft_model:
        return add_reference_adapter(model)
    if ref_model is None:
        return create_reference_model(model, num_shared_layers)
    if not isinstance(ref_model, AutoModelForCausalLMWithValueHead):
        ref_model = AutoModelForCausalLMWithValueHead(ref_model)
    return ref_model.requires_grad_(False).eval()


def prepare_models(
    accelerator: Accelerator, config: PPOConfig, model, ref_model, tokenizer, optimizer
) -> tuple:
    """Policy, reference and optimizer, on the device; raises ``ValueError`` unless they fit."""
    if accelerator.distributed_type not in COPIES:
        kind = accelerator.distributed_type.value
        raise ValueError(f"PPOTrainer runs with a copy per GPU (DDP), not {kind}.")
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
            f"The policy trains {dtype} weights, which {harms[dtype]}. Load the model with "
            "dtype=torch.float32 and mixed_precision='bf16', or train an adapter in float32.",
            stacklevel=3,
        )
    if ref_model is not None:
        _check_reference(model, ref_model, trained)
        ref_model = accelerator.prepare_model(ref_model, evaluation_mode=True)
    if optimizer is None:
        optimizer = torch.optim.Adam(trained.values(), lr=config.learning_rate, fused=config.fast)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [name for name, p in trained.items() if id(p) not in held]:
        raise ValueError(
            f"The optimizer lacks {len(missing)} of the policy's {len(trained)} trainable weights,"
            f" such as {missing[0]}: make it of this policy's parameters(), after loading."
        )
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, ref_model, optimizer


def _check_reference(model, ref_model, trained: dict) -> None:
    if {id(p) for p in trained.values()} & {id(p) for p in ref_model.parameters()}:
        raise ValueError(
            "The reference shares weights that the policy trains, so the KL stays 0. Leave "
            "ref_model out for a frozen copy."
        )
    if ref_model.vocab_size != model.vocab_size:
        raise ValueError(
            f"The policy has {model.vocab_size} tokens, the reference {ref_model.vocab_size}: they"
            " must have the same vocabulary."
        )


def check_tokenizer(tokenizer, model) -> None:
    """Raise ``ValueError`` unless the tokenizer can be this model's, and ends where it ends."""
    check_vocabulary(tokenizer, model)
    eos, ends = tokenizer.eos_token_id, end_tokens(model, {}).tolist()
    if ends and eos not in (None, *ends):
        raise ValueError(
            f"The tokenizer ends texts with token {eos}, the model with {ends}: responses would "
            "not end. Set tokenizer.eos_token or generation_config.eos_token_id."
        )


def make_dataloader(
    dataset, data_collator: Callable | None, config: PPOConfig, accelerator: Accelerator
) -> DataLoader:
    """Shuffled batches of batch_size rows; raises ``ValueError`` where the dataset has fewer.

    With ``remove_unused_columns``, only columns of the policy and of PPO are kept.
    """
    if isinstance(dataset, datasets.Dataset) and config.remove_unused_columns:
        used = {"label", "query", "response"}
        used |= {*inspect.signature(AutoModelForCausalLMWithValueHead.forward).parameters}
        dataset = dataset.select_columns([name for name in dataset.column_names if name in used])
    if len(dataset) < (needed := config.batch_size * accelerator.num_processes):
        raise ValueError(f"The dataset has {len(dataset)} rows, fewer than one batch of {needed}.")
    order = torch.Generator().manual_seed(config.seed)
    how = {"collate_fn": data_collator or collate, "drop_last": True, "generator": order}
    return accelerator.prepare(DataLoader(dataset, config.batch_size, shuffle=True, **how))
