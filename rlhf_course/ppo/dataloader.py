"""The batches of queries that a trainer's ``dataloader`` gives."""

import inspect
from collections.abc import Callable

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from rlhf_course.data import collate
from rlhf_course.policy.value_head import AutoModelForCausalLMWithValueHead
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.device import to_device


def make_dataloader(
    dataset, data_collator: Callable | None, config: PPOConfig, accelerator: Accelerator
) -> DataLoader:
    """Shuffled batches of batch_size rows, on the device; raises ``ValueError`` where the dataset
    has fewer.

    Of a ``datasets.Dataset``, columns that neither the policy nor PPO knows are left out, if the
    config asks for it.
    """
    if isinstance(dataset, datasets.Dataset) and config.remove_unused_columns:
        used = {"label", "query", "response"}
        used |= {*inspect.signature(AutoModelForCausalLMWithValueHead.forward).parameters}
        dataset = dataset.select_columns([name for name in dataset.column_names if name in used])
    if len(dataset) < (needed := config.batch_size * accelerator.num_processes):
        raise ValueError(f"The dataset has {len(dataset)} rows, fewer than one batch of {needed}.")

    def to_batch(rows: list):
        batch = (data_collator or collate)(rows)
        for name, column in batch.items() if isinstance(batch, dict) else ():
            if isinstance(column, list) and column and all(isinstance(x, Tensor) for x in column):
                batch[name] = to_device(
                    column, accelerator.device
                )  # in one transfer; accelerate's would be many
        return batch

    order = torch.Generator().manual_seed(config.seed)
    loader = DataLoader(
        dataset,
        config.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=to_batch,
        generator=order,
    )
    return accelerator.prepare(loader)
