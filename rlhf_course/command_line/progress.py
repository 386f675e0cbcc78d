"""Tell how long a run will take, and show a bar inside a long step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer
from tqdm.auto import tqdm

ENOUGH = 3.0  # seconds of training before the estimate, so that warming up counts little


class Estimate:
    """Print one line after the first steps: tokens per second, and the minutes that remain.

    ``advice`` names the options that shorten the run, such as "--max_new_tokens or --steps".
    """

    def __init__(self, advice: str, is_main: bool = True) -> None:
        self.advice = advice
        self.is_pending = is_main
        self.started = time.perf_counter()

    def update(
        self, tokens: int, done: float, left: float, steps_left: int, more_seconds: float = 0.0
    ) -> None:
        """Print the estimate if it is due.

        In the time so far, ``tokens`` were processed and ``done`` units of work; ``left`` units
        remain, in ``steps_left`` steps. ``more_seconds`` is the time of later evaluations.
        """
        seconds = time.perf_counter() - self.started
        if not self.is_pending or seconds < ENOUGH or not done or not steps_left:
            return
        self.is_pending = False
        minutes = (seconds / done * left + more_seconds) / 60
        speed = tokens / seconds
        digits = 0 if speed >= 10 else 1
        tqdm.write(
            f"{speed:,.{digits}f} tokens per second: about {minutes:.1f} minutes for"
            f" {steps_left} more steps; shorten with {self.advice}."
        )


@contextmanager
def sampling_bar(model: nn.Module, most: int, is_main: bool = True) -> Iterator[None]:
    """Show a bar of sampled tokens per response, at most ``most``, while the with block samples.

    A model embeds its input once per token. The bar is shown only in a terminal.
    """
    with tqdm(total=most, desc="sampling", leave=False, disable=None if is_main else True) as bar:

        def count(module, inputs, output) -> None:
            bar.update()

        hook = model.get_input_embeddings().register_forward_hook(count)
        try:
            yield
        finally:
            hook.remove()


@contextmanager
def optimization_bar(optimizer: Optimizer, most: int, is_main: bool = True) -> Iterator[None]:
    """Show a bar of a PPO step's updates, at most ``most``, while the with block takes the step.

    The bar is shown only in a terminal. It stays at 0 while the samples' log-probabilities are
    computed.
    """
    with tqdm(total=most, desc="updates", leave=False, disable=None if is_main else True) as bar:

        def count(optimizer, arguments, options) -> None:
            bar.update()

        hook = optimizer.register_step_post_hook(count)
        try:
            yield
        finally:
            hook.remove()
