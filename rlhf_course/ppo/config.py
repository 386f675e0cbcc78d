"""The settings of PPO, under the names and with the defaults of the classic stepwise API."""

import math
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral

from rlhf_course.runtime.argument_checks import read_number

KL_PENALTIES = ("kl", "abs", "mse", "full")
LIMITS = (
    "cliprange",
    "cliprange_value",
    "ratio_threshold",
    "target_kl",
    "score_clip",
    "max_grad_norm",
)
RANGES = (  # what settings may be, in words and as a test that NaN fails; an infinite limit is none
    (
        int,
        "a whole number of at least 1",
        lambda x: x >= 1,
        ("batch_size", "mini_batch_size", "ppo_epochs"),
    ),
    (
        int,
        "a whole number of at least 1",
        lambda x: x >= 1,
        ("gradient_accumulation_steps", "logprob_chunk_size"),
    ),
    (int, "a whole number from 0 to 2³² − 1", lambda x: 0 <= x < 2**32, ("seed",)),
    (float, "a number from 0 to 1", lambda x: 0 <= x <= 1, ("gamma", "lam")),
    (
        float,
        "finite, 0 or more",
        lambda x: 0 <= x < math.inf,
        ("learning_rate", "init_kl_coef", "vf_coef"),
    ),
    (float, "a number above 0", lambda x: x > 0, ("target", "horizon", *LIMITS)),
)
NUMBERS = {name: what for *what, names in RANGES for name in names}


def check_number(name: str, value) -> int | float:
    """``value`` as the number that the setting ``name`` takes. Raises ``ValueError`` for none, or
    out of range.
    """
    kind, words, fits = NUMBERS[name]
    if (number := read_number(kind, value, fits)) is None:
        raise ValueError(f"{name} is {value!r}; it must be {words}.")
    return number


@dataclass
class PPOConfig:
    """Settings of :class:`~rlhf_course.PPOTrainer`; every default is the classic one.

    Raises ``ValueError`` when a number is out of range, sizes do not divide, or a name is unknown.
    """

    # What is trained, and how the run is tracked.
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
    # False: no packed rows, no reused pass, no fused Adam, transformers' generate; the same numbers
    fast: bool = True
    logprob_chunk_size: int | None = (
        None  # response tokens whose logits are in memory at once; None: a mini-batch's
    )

    # Optimizer.
    learning_rate: float = 1.41e-5
    max_grad_norm: float | None = None

    # Tokens that never begin a response (EOS, to rule out empty ones): their probability is 0 in
    # sampling and in the log-probabilities of policy and reference alike.
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

    # Losses.
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    ratio_threshold: float = 10.0  # a mini-batch with a larger mean ratio is skipped

    # Early stopping of the epochs of a step, at policykl > 1.5 * target_kl.
    early_stopping: bool = False
    target_kl: float = 1.0

    # Scores.
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = None

    # Accepted so that old scripts run; they change nothing here.
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
        if str(self.log_with).lower() in (
            "none",
            "null",
        ):  # as files of options and trl's commands have it
            self.log_with = None
        for name, default in ((entry.name, entry.default) for entry in fields(self)):
            value = getattr(self, name)
            if isinstance(default, bool) and not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; it must be True or False.")
            if name in NUMBERS and not (value is default is None):
                setattr(self, name, check_number(name, value))
        tokens = self.begin_suppress_tokens
        if not isinstance(tokens, list | tuple) or not all(
            isinstance(x, Integral) and x >= 0 for x in tokens
        ):
            raise ValueError(
                f"begin_suppress_tokens is {tokens!r}; it must be a list of token ids, like"
                " [50256]."
            )
        if self.batch_size % self.backward_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of mini_batch_size ×"
                f" gradient_accumulation_steps = {self.mini_batch_size} ×"
                f" {self.gradient_accumulation_steps} = {self.backward_batch_size}. Choose sizes"
                " that divide."
            )
        if (
            self.adap_kl_ctrl and self.horizon <= 0.2 * self.batch_size
        ):  # β · (1 − 0.2 · batch_size / horizon)
            raise ValueError(
                f"horizon is {self.horizon:g} samples, too few for steps of {self.batch_size}: the"
                f" KL coefficient could turn negative. Take {self.batch_size} or more, or"
                " adap_kl_ctrl=False."
            )
        if self.logprob_chunk_size is not None and self.kl_penalty == "full":
            raise ValueError(
                "logprob_chunk_size is not for kl_penalty 'full', which needs all logits at once."
            )
        if self.kl_penalty not in KL_PENALTIES:
            raise ValueError(
                f"kl_penalty {self.kl_penalty!r} is unknown; choose one of"
                f" {', '.join(KL_PENALTIES)}."
            )
        if self.use_score_norm and not self.use_score_scaling:
            raise ValueError(
                "use_score_norm centres scaled scores: set use_score_scaling=True with it."
            )

    @property
    def backward_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.mini_batch_size * self.gradient_accumulation_steps

    def passes(self) -> dict:
        """How forward passes are done, as :func:`~rlhf_course.ppo.rollout.forward` takes it."""
        packed = None if self.fast else False
        return {
            "begin_suppress": self.begin_suppress_tokens,
            "chunk": self.logprob_chunk_size,
            "packed": packed,
        }

    def to_dict(self) -> dict:
        """The settings as a flat dictionary, for trackers."""
        return asdict(self)
