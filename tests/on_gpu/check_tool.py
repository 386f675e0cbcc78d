"""The simulated GPU itself: it refuses what CUDA refuses, counts waits, and computes as a CPU."""

import numpy as np
import pytest
import torch
from pretend_gpu.counts import COUNTS
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

MIXED = "Expected all tensors to be on the same device"


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape).to("cuda")


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + torch.ones(2, 3),
        lambda x: torch.cat([x, torch.ones(1, 3)]),
        lambda x: x @ torch.ones(3, 2),
        lambda x: torch.where(torch.ones(2, 3).bool(), x, x),
        lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: x.add_(torch.ones(2, 3)),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, torch.ones(2, 3)),
        lambda x: torch.nn.functional.embedding(torch.tensor([1]), x),
    ],
)
def test_operations_that_mix_devices_are_refused(operation):
    with pytest.raises(RuntimeError, match=MIXED):
        operation(on_gpu(2, 3))


def test_a_host_tensor_is_not_indexed_from_the_device_but_the_device_is_from_the_host():
    rows = torch.tensor([1, 0])
    with pytest.raises(RuntimeError, match="indices should be"):
        torch.ones(2, 3)[rows.to("cuda")]
    assert on_gpu(2, 3)[rows].cpu().tolist() == [[3, 4, 5], [0, 1, 2]]


@pytest.mark.parametrize("read", [lambda x: x.numpy(), np.asarray])
def test_numpy_does_not_read_from_the_device(read):
    with pytest.raises(TypeError, match="convert cuda:0 device type tensor to numpy"):
        read(on_gpu(2))


def test_integers_have_no_matrix_product_as_on_cuda():
    with pytest.raises(NotImplementedError, match="not implemented"):
        on_gpu(2, 2).long() @ on_gpu(2).long()


WITHOUT_WAIT = [
    lambda x: x + 1,
    lambda x: x[1:].t().unsqueeze(0),
    lambda x: x.new_zeros(3),
    lambda x: torch._foreach_add([x] * 3, 1.0),
    lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    lambda x: torch.ones(4).to("cuda", non_blocking=True),
]
WITH_WAIT = [
    lambda x: x.cpu(),
    lambda x: x.sum().item(),
    lambda x: bool(x.any()),
    lambda x: x[0].tolist(),
    lambda x: x.nonzero(),
    lambda x: x[x > 3],
    lambda x: x[[1, 2]],
    lambda x: torch.tensor([1, 2], device="cuda"),
    lambda x: torch.ones(4).to("cuda"),
]


@pytest.mark.parametrize("operation", WITHOUT_WAIT + WITH_WAIT)
def test_waits_are_counted(operation):
    x = on_gpu(4, 4)
    COUNTS.clear()
    operation(x)
    assert COUNTS.waits.total() == (operation in WITH_WAIT) and COUNTS.operations > 0


def train(kind, config, device: str):
    """Return the losses of three steps of fused Adam, and the last gradients and weights."""
    torch.manual_seed(0)
    model = kind(config).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(1, 40, (4, 9), generator=torch.Generator().manual_seed(0)).to(device)
    mask = (torch.arange(9) >= torch.tensor([0, 2, 4, 1]).unsqueeze(1)).long().to(device)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        loss = model(input_ids=ids, labels=ids.masked_fill(mask == 0, -100), **given).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    named = dict(model.named_parameters())
    gradients = {name: p.grad.cpu() for name, p in named.items()}
    return losses, gradients, {name: p.detach().cpu() for name, p in named.items()}


LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_positions=16, n_embd=16, n_layer=2, n_head=2)),
    "llama": (LlamaForCausalLM, LlamaConfig(**LLAMA)),
}


@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_adam_and_masked_attention_agree_with_the_cpu(name):
    kind, config = MODELS[name]
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    config.vocab_size = 40
    (losses, *found), (expected, *tensors) = train(kind, config, "cuda"), train(kind, config, "cpu")
    assert losses == pytest.approx(expected, abs=1e-5)
    for ours, theirs in zip(found, tensors, strict=True):
        for parameter in theirs:
            torch.testing.assert_close(ours[parameter], theirs[parameter], atol=1e-5, rtol=1e-5)
