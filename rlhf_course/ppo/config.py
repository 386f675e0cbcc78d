"""Define PPO's settings, with the names and defaults from the classic stepwise API."""

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields

from rlhf_course.ppo import algorithm
from rlhf_course.runtime import old_names

KL_PENALTIES = ("kl", "abs", "mse", "full")
# The range of each number. Fields have no metadata, because HfArgumentParser reads it as its own
# options.
RANGES = {
    "seed": {"at_least": 0},
    "batch_size": {"at_least": 1},
    "mini_batch_size": {"at_least": 1},
    "gradient_accumulation_steps": {"at_least": 1},
    "ppo_epochs": {"at_least": 1},
    "logprob_chunk_size": {"at_least": 1},
    "learning_rate": {"at_least": 0},
    "max_grad_norm": {"above": 0},
    "init_kl_coef": {"at_least": 0},
    "target": {"at_least": 0},
    "horizon": {"at_least": 0},
    "gamma": {"at_least": 0, "at_most": 1},
    "lam": {"at_least": 0, "at_most": 1},
    "cliprange": {"at_least": 0},
    "cliprange_value": {"at_least": 0},
    "vf_coef": {"at_least": 0},
    "ratio_threshold": {"at_least": 0},
    "target_kl": {"at_least": 0},
    "score_clip": {"above": 0},
    "steps": {"at_least": 0},
    "total_ppo_epochs": {"at_least": 0},
}


def read_number(
    name: str,
    value,
    kind: type = float,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> int | float:
    """Return a number, or the text of one (YAML reads 1e-5 as text), as an int or float.

    Raises ``ValueError``, with ``name`` and ``value``, for anything else, for NaN and Inf, and for
    a number out of range.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    is_valid = (
        math.isfinite(number)
        and not isinstance(value, bool)
        and (kind is float or number.is_integer())
        and (at_least is None or number >= at_least)
        and (above is None or number > above)
        and (at_most is None or number <= at_most)
    )
    if is_valid:
        return kind(number)
    limits = {"of at least": at_least, "above": above, "of at most": at_most}
    expected = "a whole number" if kind is int else "a finite number"
    expected += " and".join(f" {word} {x:g}" for word, x in limits.items() if x is not None)
    raise ValueError(f"{name} is {value!r}; it must be {expected}.")


@dataclass
class PPOConfig:
    """Configure :class:`~rlhf_course.PPOTrainer`; every default is the classic API's.

    Raises ``ValueError`` for unknown, out-of-range, or conflicting values.
    """

    # Model and tracking.
    model_name: str | None = None
    seed: int = 0
    log_with: str | None = None  # None, "wandb" or "tensorboard"
    tracker_project_name: str = "trl"
    tracker_kwargs: dict = field(default_factory=dict)
    accelerator_kwargs: dict = field(default_factory=dict)  # e.g. {"mixed_precision": "bf16"}
    project_kwargs: dict = field(default_factory=dict)  # e.g. {"logging_dir": "runs"}
    remove_unused_columns: bool = True

    # Sizes: one step() takes batch_size samples and goes over them ppo_epochs times.
    batch_size: int = 128
    mini_batch_size: int = 128
    gradient_accumulation_steps: int = 1
    ppo_epochs: int = 4
    gradient_checkpointing: bool = False
    # Speedups: False uses transformers' generate, recomputes the first pass, gives each sample a
    # row of its own and unfuses Adam.
    fast: bool = True
    # Compare sampling and scoring with a plain forward pass when the trainer is made: four passes.
    self_test: bool = True
    # How many tokens' logits are in memory together; None means all in a mini-batch.
    logprob_chunk_size: int | None = None

    # Optimizer.
    learning_rate: float = 1.41e-5
    max_grad_norm: float | None = None

    # Tokens that never begin a response (EOS, to forbid empty responses): sampling, policy
    # and reference give them probability 0 there.
    begin_suppress_tokens: list[int] = field(default_factory=list)

    # KL to the reference: reward per token = -coefficient * KL.
    kl_penalty: str = "kl"
    adap_kl_ctrl: bool = True
    init_kl_coef: float = 0.2
    target: float = 6.0  # nats per response
    horizon: float = 10_000  # samples

    # Advantages.
    gamma: float = 1.0
    lam: float = 0.95
    whiten_rewards: bool = False

    # Losses. To change the method, pass a policy_loss with algorithm.policy_loss's signature.
    policy_loss: Callable = algorithm.policy_loss
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    ratio_threshold: float = 10.0  # above it, a mini-batch is skipped

    # Early stopping: a step's epochs end when policykl > 1.5 * target_kl.
    early_stopping: bool = False
    target_kl: float = 1.0

    # Scores.
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = None

    # For your loop: how many samples to take, and in how many calls of step() (default: steps /
    # batch_size, rounded up). The trainer reads neither.
    steps: int = 20_000
    total_ppo_epochs: int | None = None

    # These have no effect; old scripts may set them.
    exp_name: str = "ppo"
    task_name: str | None = None
    query_dataset: str | None = None
    reward_model: str | None = None
    compare_steps: int = 1
    forward_batch_size: int | None = None
    optimize_cuda_cache: bool | None = None
    optimize_device_cache: bool = False
    push_to_hub_if_best_kwargs: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if str(self.log_with).lower() in ("none", "null"):  # as YAML files write None
            self.log_with = None
        self._check_each()
        self._check_together()
        if self.total_ppo_epochs is None:
            self.total_ppo_epochs = math.ceil(self.steps / self.batch_size)
        if self.kl_penalty != "kl":
            warnings.warn(
                f"kl_penalty {self.kl_penalty!r} does not maximize score - beta * KL; 'kl' does.",
                stacklevel=1,  # all callers share this line, so Python warns once
            )

    def _check_each(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type is bool and not isinstance(value, bool):
                raise ValueError(f"{entry.name} is {value!r}; it must be True or False.")
            if entry.name in RANGES and not (value is None and entry.default is None):
                kind = int if entry.type in (int, int | None) else float
                limits = RANGES[entry.name]
                setattr(self, entry.name, read_number(entry.name, value, kind, **limits))
        if self.kl_penalty not in KL_PENALTIES:
            raise ValueError(
                f"kl_penalty {self.kl_penalty!r} is unknown; choose one of"
                f" {', '.join(KL_PENALTIES)}."
            )

    def _check_together(self) -> None:
        size = self.mini_batch_size * self.gradient_accumulation_steps
        if self.batch_size % size:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of {size}, mini_batch_size times"
                " gradient_accumulation_steps."
            )
        if self.adap_kl_ctrl:
            read_number("target", self.target, above=0)  # a divisor
            if self.horizon <= 0.2 * self.batch_size:  # β · (1 − 0.2 · batch_size / horizon)
                raise ValueError(
                    f"horizon is {self.horizon:g} samples, so the KL coefficient could turn"
                    f" negative. Use {self.batch_size} or more, or adap_kl_ctrl=False."
                )
        if self.logprob_chunk_size is not None and self.kl_penalty == "full":
            raise ValueError("kl_penalty 'full' needs logprob_chunk_size=None.")
        if self.use_score_norm and not self.use_score_scaling:
            raise ValueError("use_score_norm needs use_score_scaling=True; set both.")

    def __getattr__(self, name: str):
        advice = old_names.advice(old_names.CONFIG, name)
        if advice is not None:
            raise AttributeError(advice)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def to_dict(self) -> dict:
        """Return the settings as a dictionary, for trackers."""
        return asdict(self)
