"""What a PPO trainer gives away: statistics to the tracker, and its policy to a folder."""

from collections.abc import Sequence

from torch import Tensor

from rlhf_course.ppo.checks import stack_scores
from rlhf_course.runtime import tracking


class Outputs:
    """The methods of :class:`PPOTrainer` that no step calls."""

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
            if missing := [name for name in columns_to_log if name not in batch]:
                raise ValueError(
                    f"The batch has no column {missing[0]}; it has {', '.join(batch)}."
                )
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
