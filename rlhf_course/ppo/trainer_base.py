"""What a PPO trainer does besides sampling and learning: it is made, it logs, it is saved."""

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import Tensor

from rlhf_course.ppo.algorithm import AdaptiveKLController, FixedKLController
from rlhf_course.ppo.checks import stack_scores
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.detectors import Detectors
from rlhf_course.ppo.parts import make_dataloader, make_reference, prepare_models
from rlhf_course.ppo.score_scaling import RunningMoments
from rlhf_course.runtime import tracking


class TrainerBase:
    """The half of :class:`PPOTrainer` that no step runs."""

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
            raise ValueError("lr_scheduler moves another optimizer than the one that was given.")
        self.config, self.tokenizer, self.lr_scheduler = config, tokenizer, lr_scheduler
        self.accelerator = tracking.start(config)
        set_seed(config.seed, device_specific=True)  # processes sample different responses
        ref_model = make_reference(model, ref_model, num_shared_layers)
        self.model, self.ref_model, self.optimizer = prepare_models(
            self.accelerator, config, model, ref_model, tokenizer, optimizer
        )
        self.dataset, self.dataloader = dataset, None
        if dataset is not None:
            self.dataloader = make_dataloader(dataset, data_collator, config, self.accelerator)
        if config.adap_kl_ctrl:
            self.kl_ctl = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
        else:
            self.kl_ctl = FixedKLController(config.init_kl_coef)
        self.running, self.detectors = RunningMoments(), Detectors(config.target)
        self.current_step, self.is_whole = 0, True  # not whole while a step moves weights
        self.checkpoints: list[Path] = []  # that this trainer wrote or was resumed from

    def log_stats(
        self,
        stats: dict,
        batch: dict[str, list],
        rewards: Sequence[Tensor] | Tensor,
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> None:
        """Warn of symptoms in the statistics; send them, scores and samples to the tracker."""
        step = self.current_step - 1
        if self.accelerator.is_main_process:
            self.detectors.check(stats, step)
        if self.config.log_with is not None:
            scores = stack_scores(rewards, self.accelerator.device, step)
            columns = {name: list(batch[name]) for name in columns_to_log}
            tracking.log_step(self.accelerator, stats, columns, scores, step)

    def save_pretrained(self, save_directory: str) -> None:
        """Save policy, value head and tokenizer into one folder; the first process writes.

        Raises ``RuntimeError`` after half a step, and as the policy's ``save_pretrained``.
        """
        self.check_whole()
        if self.accelerator.is_main_process:
            self.policy.save_pretrained(save_directory, tokenizer=self.tokenizer)
        self.accelerator.wait_for_everyone()

    def check_whole(self) -> None:
        """Raise ``RuntimeError`` where an interrupt or NaN ended a step before it was whole."""
        if not self.is_whole:
            raise RuntimeError(
                "A step ended while its weights moved, and nothing is saved since then. Go back to"
                " the last checkpoint."
            )
