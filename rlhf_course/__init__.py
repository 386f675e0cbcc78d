"""Share code between Hands-on RLHF's notebooks and scripts.

Import the classic PPO API from here. Each name loads on first use, so that ``import rlhf_course``
stays fast.
"""

import importlib

from rlhf_course.runtime import old_names

_PUBLIC = {
    "PPOConfig": "rlhf_course.ppo.config",
    "PPOTrainer": "rlhf_course.ppo.trainer",
    "AutoModelForCausalLMWithValueHead": "rlhf_course.policy.network",
    "create_reference_model": "rlhf_course.policy.reference",
    "LengthSampler": "rlhf_course.data.reviews",
    "AdaptiveKLController": "rlhf_course.ppo.algorithm",
    "FixedKLController": "rlhf_course.ppo.algorithm",
    "set_seed": "accelerate.utils",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str):
    advice = old_names.advice(old_names.IMPORT, name)
    if advice is not None:
        raise ImportError(advice)  # "from rlhf_course import" would hide an AttributeError's text
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rlhf_course' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
