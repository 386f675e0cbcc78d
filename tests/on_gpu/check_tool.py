"""The pretend GPU itself: it catches what a real one would refuse, counts, and gives a CPU's
numbers.
"""

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


def test_a_tensor_made_on_the_wrong_device_is_found_where_it_is_used():
    class Faulty(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.places = torch.nn.Embedding(8, 3)

        def forward(self, x):
            return x + self.places(torch.arange(len(x)))

    with pytest.raises(RuntimeError, match=MIXED):
        Faulty().to("cuda")(on_gpu(2, 3))


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
        torch.ones(2, 2, dtype=torch.long, device="cuda") @ torch.ones(
            2, dtype=torch.long, device="cuda"
        )


def counted(operation) -> tuple[int, int]:
    """Launches and waits."""
    x = on_gpu(4, 4)
    COUNTS.clear()
    operation(x)
    return tuple(
        sum(map(sum, (c.values() for c in found.values())))
        for found in (COUNTS.launches, COUNTS.waits)
    )


@pytest.mark.parametrize(
    "operation, launches, waits",
    [
        (lambda x: x + 1, 1, 0),
        (lambda x: x[1:].t().unsqueeze(0).view(1, 4, 3).detach(), 0, 0),
        (lambda x: x.new_empty(3), 0, 0),
        (lambda x: x.new_zeros(3), 1, 0),
        (lambda x: x.cpu(), 1, 1),
        (lambda x: x.sum().item(), 1, 1),
        (lambda x: bool(x.any()), 1, 1),
        (lambda x: x[0].tolist(), 1, 1),
        (lambda x: x.nonzero(), 1, 1),
        (lambda x: x[x > 3], 2, 1),
        (lambda x: torch.tensor([1, 2], device="cuda"), 1, 1),
        (lambda x: torch.ones(4).to("cuda"), 1, 1),
        (lambda x: torch.ones(4).to("cuda", non_blocking=True), 1, 0),
        (lambda x: torch.ones(10**5).to("cuda", non_blocking=True), 1, 1),
        (lambda x: torch.ones(10**5).pin_memory().to("cuda", non_blocking=True), 1, 0),
        (lambda x: x[[1, 2]], 2, 1),
        (lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x), 1, 0),
        (lambda x: torch._foreach_add([x] * 31, 1.0), 2, 0),
    ],
)
def test_launches_and_waits_are_counted(operation, launches, waits):
    assert counted(operation) == (launches, waits)


def train(kind, config, device: str):
    """Return losses of three fused Adam steps with left padding, final gradients and weights."""
    torch.manual_seed(0)
    model = kind(config).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(1, 40, (4, 9), generator=torch.Generator().manual_seed(0)).to(device)
    mask = (torch.arange(9) >= torch.tensor([0, 2, 4, 1]).unsqueeze(1)).long().to(device)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    named = dict(model.named_parameters())
    return (
        losses,
        {n: p.grad.cpu() for n, p in named.items()},
        {n: p.detach().cpu() for n, p in named.items()},
    )


MODELS = {
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2),
    ),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_adam_and_masked_attention_agree_with_the_cpu(name):
    kind, config = MODELS[name]
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    (losses, *found), (expected, *tensors) = train(kind, config, "cuda"), train(kind, config, "cpu")
    assert losses == pytest.approx(expected, abs=1e-5)
    for ours, theirs in zip(found, tensors, strict=True):
        for parameter in theirs:
            torch.testing.assert_close(ours[parameter], theirs[parameter], atol=1e-5, rtol=1e-5)


def test_a_graph_records_without_doing_and_replays_on_the_same_memory():
    """Values that changed in between are read; what the host would wait for cannot be captured."""
    x, total, graph = on_gpu(2, 3), torch.zeros((), device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = 2 * x[0]
        total += doubled.sum()
    assert total.item() == 0
    x.fill_(1)
    COUNTS.clear()
    for _ in range(2):
        graph.replay()
    assert (
        total.item() == 12 and doubled.tolist() == [2, 2, 2] and COUNTS.launches[""]["graph"] == 2
    )
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(graph),
    ):
        x.sum().item()
