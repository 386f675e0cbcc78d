"""Show how far a trainer of trl is, with a bar that disappears at the end."""

from tqdm.auto import tqdm
from transformers import TrainerCallback


class TrainingBar(TrainerCallback):
    """Show steps and seconds left in a notebook or terminal, and nothing in a file."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar = tqdm(total=state.max_steps, desc="training", leave=False, disable=None)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update()

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()
