"""Define PPO's settings, with the names and defaults from the classic stepwise API."""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields

from rlhf_course.ppo import algorithm

NUMBERS = {int: int, float: float, int | None: int, float | None: float}


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
    # Speedups: False uses transformers' generate, recomputes the first pass and unfuses Adam.
    fast: bool = True
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
    ratio_threshold: float = 10.0  # a mini-batch with a larger mean ratio is skipped

    # Early stopping: a step's epochs end when policykl > 1.5 * target_kl.
    early_stopping: bool = False
    target_kl: float = 1.0

    # Scores.
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = None

    # These have no effect; old scripts may set them.
    exp_name: str = "ppo"
    task_name: str | None = None
    query_dataset: str | None = None
    reward_model: str | None = None
    steps: int = 20_000
    compare_steps: int = 1
    forward_batch_size: int | None = None
    optimize_cuda_cache: bool | None = None
    optimize_device_cache: bool = False
    push_to_hub_if_best_kwargs: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if str(self.log_with).lower() in ("none", "null"):  # as YAML files write None
            self.log_with = None
        for entry in fields(self):  # YAML reads 1e-5 as text; NaN would go unnoticed
            value, kind = getattr(self, entry.name), NUMBERS.get(entry.type)
            if entry.type is bool and not isinstance(value, bool):
                raise ValueError(f"{entry.name} is {value!r}; it must be True or False.")
            if kind and value is not None:
                # Settings that None turns off cannot be 0, nor can ``target``, a divisor.
                above = entry.default is None or (entry.name == "target" and self.adap_kl_ctrl)
                setattr(self, entry.name, _number(entry.name, value, kind, above))
        self._check_sizes()
        if max(self.gamma, self.lam) > 1:
            raise ValueError(f"gamma {self.gamma} and lam {self.lam} must be at most 1.")
        if self.logprob_chunk_size is not None and self.kl_penalty == "full":
            raise ValueError("kl_penalty 'full' needs logprob_chunk_size=None.")
        if self.kl_penalty not in ("kl", "abs", "mse", "full"):
            raise ValueError(
                f"kl_penalty {self.kl_penalty!r} is unknown; choose one of kl, abs, mse, full."
            )
        if self.kl_penalty != "kl":
            warnings.warn(
                f"kl_penalty {self.kl_penalty!r} does not maximize score - beta * KL; 'kl' does.",
                stacklevel=1,  # all callers share this line, so Python warns once
            )
        if self.use_score_norm and not self.use_score_scaling:
            raise ValueError("use_score_norm needs use_score_scaling=True; set both.")

    def _check_sizes(self) -> None:
        size = self.mini_batch_size * self.gradient_accumulation_steps
        if size < 1 or self.batch_size < 1 or self.batch_size % size or self.ppo_epochs < 1:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of {size}, mini_batch_size times "
                f"gradient_accumulation_steps; ppo_epochs ({self.ppo_epochs}) must be at least 1."
            )
        if self.adap_kl_ctrl and self.horizon <= 0.2 * self.batch_size:
            raise ValueError(  # β · (1 − 0.2 · batch_size / horizon)
                f"horizon is {self.horizon:g} samples, so the KL coefficient could turn negative. "
                f"Use {self.batch_size} or more, or adap_kl_ctrl=False."
            )

    def to_dict(self) -> dict:
        """Return the settings as a dictionary, for trackers."""
        return asdict(self)


def _number(name: str, value, kind: type, is_positive: bool) -> int | float:
    """Convert ``value`` (number or text) to a number; raise ``ValueError`` if out of range."""
    try:
        number = kind(float(value))
        is_inside = number > 0 or (number == 0 and not is_positive)
        if isinstance(value, bool) or number != float(value) or not is_inside:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        what = ("whole number", "number")[kind is float] + (" of at least", " above")[is_positive]
        raise ValueError(f"{name} is {value!r}; it must be a {what} 0.") from None
    return number
