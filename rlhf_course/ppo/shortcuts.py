"""What PPO does by itself to be fast: said once per run, and left out with ``PPOConfig(fast=False)``."""

from __future__ import annotations

from functools import cache

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf_course.policy import FullPrecisionHead, can_pack
from rlhf_course.ppo.config import PPOConfig

MANY, WIDE = 2**17, 64  # numbers in a layer's input, and its width: with fewer, copies cost more than products save


def choose_shortcuts(
    config: PPOConfig,
    accelerator: Accelerator,
    model: nn.Module,
    ref_model: nn.Module | None,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Print which shortcuts apply to this run; those that belong to models are taken here."""
    on_cpu = accelerator.device.type == "cpu"
    by_onednn = config.fast and on_cpu and onednn_is_faster()
    for network in filter(None, (model, ref_model)):
        multiply_by_onednn(network, by_onednn)
    if not config.fast:
        return
    chosen = {
        "several samples per row": on_cpu and can_pack(model),
        "the first epoch reuses the first pass": config.mini_batch_size == config.batch_size,
        "fused Adam": getattr(optimizer, "defaults", {}).get("fused"),
        "products by oneDNN": by_onednn,
    }
    names = ", ".join(name for name, applies in chosen.items() if applies)
    _say_once(f"PPO on {accelerator.device.type}: {names or 'as written'}; PPOConfig(fast=False) does without.")


@cache
def _say_once(sentence: str) -> None:
    PartialState().print(sentence)


class _ByOneDNN:
    """Mixed into a linear layer: large products in float32 go to oneDNN, with the same weights and gradients."""

    def forward(self, x: Tensor) -> Tensor:
        large = x.is_cpu and x.dtype == self.weight.dtype == torch.float32 and x.numel() >= MANY
        if not large or torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.enabled:
            return super().forward(x)
        weight = self.weight.t() if isinstance(self, Conv1D) else self.weight
        return nn.functional.linear(x.to_mkldnn(), weight, self.bias).to_dense()


WITH_ONEDNN = {kind: type(kind.__name__, (_ByOneDNN, kind), {}) for kind in (nn.Linear, FullPrecisionHead, Conv1D)}
WITHOUT_ONEDNN = {fast: plain for plain, fast in WITH_ONEDNN.items()}


def onednn_is_faster() -> bool:
    """Whether torch's usual matrix product, MKL's, leaves half of this CPU unused: AVX-512 on a processor by AMD."""
    cpu = torch.cpu.get_capabilities()
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return libraries and cpu.get("cpu_name", "").startswith("AMD") and cpu.get("avx512_f", False)


def multiply_by_onednn(model: nn.Module, wanted: bool) -> None:
    """Let the linear layers of a model use oneDNN, or no longer; narrow ones, such as adapters, never do."""
    kinds = WITH_ONEDNN if wanted else WITHOUT_ONEDNN
    for layer in model.modules():
        if type(layer) in kinds and min(layer.weight.shape) >= WIDE:
            layer.__class__ = kinds[type(layer)]
