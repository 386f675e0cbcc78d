"""The losses of notebook 07, as its cells define them, against those of trl's trainers."""

import ast
import json
import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from rlhf_course.course import losses
from rlhf_course.course.presets import ROOT

PROMPT, LENGTHS = 3, (5, 2, 4, 1)  # tokens of each prompt, and of each response
GROUP = 2  # responses per prompt
WANTED = {"clipped", "leave_one_out", "rloo_loss", "group_advantages", "grpo_loss", "dpo_loss"}


@pytest.fixture(scope="module")
def notebook():
    """The notebook's functions, and nothing else of it."""
    cells = json.loads((ROOT / "notebooks/07_after_ppo.ipynb").read_text(encoding="utf-8"))["cells"]
    found = {"torch": torch, "logsigmoid": logsigmoid}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        for part in ast.parse("".join(cell["source"])).body:
            if isinstance(part, ast.FunctionDef) and part.name in WANTED:
                exec(compile(ast.Module([part], []), part.name, "exec"), found)
    assert WANTED <= found.keys()
    return SimpleNamespace(**found)


def definitions(source: str) -> dict[str, str]:
    """Functions of a source by name, without regard to comments and layout."""
    parts = [part for part in ast.parse(source).body if isinstance(part, ast.FunctionDef)]
    return {part.name: ast.unparse(part) for part in parts if part.name in WANTED}


def test_the_module_has_the_losses_of_the_notebook():
    """The deeper notebooks and the hand-over import what notebook 07 defines and explains."""
    cells = json.loads((ROOT / "notebooks/07_after_ppo.ipynb").read_text(encoding="utf-8"))["cells"]
    shown = {}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        shown |= definitions("".join(cell["source"]))
    module = (ROOT / "rlhf_course/course/losses.py").read_text(encoding="utf-8")
    assert shown == definitions(module) and shown.keys() == WANTED


def test_one_call_gives_each_method_its_own_loss():
    torch.manual_seed(0)
    new, old, ref = torch.randn(3, 4, 5).log_softmax(-1).unbind(0)
    mask, rewards = torch.ones(4, 5), torch.randn(2, 2)
    kl = ((old - ref) * mask).sum(1).view(2, 2)
    expected = {
        "RLOO": losses.rloo_loss(
            new, old, mask, losses.leave_one_out(rewards - 0.1 * kl).flatten()
        ),
        "GRPO": losses.grpo_loss(
            new, old, ref, mask, losses.group_advantages(rewards).flatten(), 0.1
        ),
        "Dr. GRPO": losses.grpo_loss(
            new, old, ref, mask, losses.group_advantages(rewards, False).flatten(), 0.1, 5
        ),
        "Dr. GRPO, KL in reward": losses.grpo_loss(
            new,
            old,
            ref,
            mask,
            losses.group_advantages(rewards - 0.1 * kl, False).flatten(),
            0.0,
            5,
        ),
    }
    assert list(expected) == losses.METHODS
    for method, loss in expected.items():
        assert torch.equal(losses.loss_of(method, new, old, ref, mask, rewards, 0.1), loss)


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """Four responses of different lengths to two prompts, and three policies' log-probabilities."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=259, n_embd=16, n_layer=1, n_head=2, eos_token_id=0)
    models = [GPT2LMHeadModel(config).eval() for _ in range(3)]
    folder = str(tmp_path_factory.mktemp("policy"))
    models[0].save_pretrained(folder)
    models[0].config._name_or_path = folder  # where trl's trainers load a reference from
    prompts = torch.randint(3, 259, (2, PROMPT)).repeat_interleave(GROUP, 0)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    responses = torch.randint(3, 259, mask.shape) * mask
    ids = torch.cat([prompts, responses], 1)
    attention = torch.cat([torch.ones_like(prompts), mask], 1)

    def logprobs(model):
        found = model(ids, attention_mask=attention).logits[:, PROMPT - 1 : -1].log_softmax(-1)
        return found.gather(-1, responses.unsqueeze(-1)).squeeze(-1)

    with torch.no_grad():
        found = dict(zip(("new", "old", "ref"), map(logprobs, models), strict=True))
    found |= {"prompts": prompts, "responses": responses, "mask": mask, "ids": ids}
    scores = torch.tensor([[1.0, -0.5], [0.2, 2.0]])
    return SimpleNamespace(policy=models[0], reference=models[2], scores=scores, **found)


@pytest.fixture(scope="module")
def trl_loss(batch, tmp_path_factory):
    """What a trainer of trl says of the batch, given its own names of the tensors."""
    import trl

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/gpt2-imdb-mini")
    tokenizer.pad_token = tokenizer.eos_token

    def loss(name, inputs, **options):
        options |= {"output_dir": str(tmp_path_factory.mktemp(name)), "report_to": "none"}
        options |= {"use_cpu": True, "bf16": False}
        if name == "DPO":
            data = {"prompt": ["a film"], "chosen": ["good"], "rejected": ["bad"]}
            more, extra = {"ref_model": batch.reference}, (False,)
        else:
            options |= {"num_generations": GROUP, "max_completion_length": max(LENGTHS)}
            options |= {"per_device_train_batch_size": 4}
            data = {"prompt": ["a film", "a plot"]}
            more, extra = {"reward_funcs": lambda completions, **_: [0.0]}, ()
        more |= {"train_dataset": Dataset.from_dict(data), "processing_class": tokenizer}
        config = getattr(trl, f"{name}Config")(**options)
        trainer = getattr(trl, f"{name}Trainer")(model=batch.policy, args=config, **more)
        trainer.model.eval()
        with torch.no_grad():
            return trainer._compute_loss(trainer.model, inputs, *extra).item()

    return loss


def completions(batch, **more):
    ids = {"prompt_ids": batch.prompts, "prompt_mask": torch.ones_like(batch.prompts)}
    return ids | {"completion_ids": batch.responses, "completion_mask": batch.mask} | more


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_losses_equal_those_of_trl(kind, notebook, batch, trl_loss):
    divide, longest = kind == "grpo", max(LENGTHS) if kind == "dr_grpo" else None
    advantage = notebook.group_advantages(batch.scores, divide).flatten()
    ours = notebook.grpo_loss(
        batch.new, batch.old, batch.ref, batch.mask, advantage, 0.1, longest
    ).item()
    inputs = completions(
        batch, advantages=advantage, old_per_token_logps=batch.old, ref_per_token_logps=batch.ref
    )
    theirs = trl_loss(
        "GRPO", inputs, beta=0.1, epsilon=0.2, loss_type=kind, use_bias_correction_kl=False
    )
    assert ours == pytest.approx(theirs, abs=1e-5) and abs(ours) > 1e-3


def test_rloo_equals_trl(notebook, batch, trl_loss):
    advantage = notebook.leave_one_out(batch.scores).flatten()
    ours = notebook.rloo_loss(batch.new, batch.old, batch.mask, advantage).item()
    inputs = completions(batch, advantages=advantage, old_logps=(batch.old * batch.mask).sum(1))
    assert (
        ours == pytest.approx(trl_loss("RLOO", inputs, beta=0.0, epsilon=0.2), abs=1e-5)
        and abs(ours) > 1e-3
    )


def test_dpo_equals_trl(notebook, batch, trl_loss):
    of_response = ((batch.new - batch.ref) * batch.mask).sum(1)
    ours = notebook.dpo_loss(*of_response.chunk(2), 0.1).mean().item()
    inputs = {
        "input_ids": batch.ids,
        "attention_mask": torch.cat([torch.ones_like(batch.prompts), batch.mask], 1),
        "completion_mask": torch.cat([torch.zeros_like(batch.prompts), batch.mask], 1),
    }
    assert ours == pytest.approx(trl_loss("DPO", inputs, beta=0.1), abs=1e-5)
    assert abs(ours - math.log(2)) > 1e-4  # not the loss of a policy that is the reference


def test_advantages_equal_those_of_trl(notebook, batch):
    """Group standard deviation with n − 1, as trl's, and its 1e-4; the others' mean."""
    std, mean = torch.std_mean(batch.scores, 1, keepdim=True)
    expected = (batch.scores - mean) / (std + 1e-4)
    assert torch.equal(notebook.group_advantages(batch.scores), expected)
    assert torch.equal(
        notebook.leave_one_out(batch.scores), torch.tensor([[1.5, -1.5], [-1.8, 1.8]])
    )


@pytest.mark.parametrize("corrected", [False, True])
def test_the_ratio_before_k3_makes_the_tilt_exponential(corrected):
    """One token, exact: the fixed point of GRPO's loss without and with trl's correction of k3."""
    torch.manual_seed(0)
    ref, reward, beta = torch.randn(6).double().softmax(0), torch.randn(6).double(), 0.5
    logits = ref.log().requires_grad_()
    optimizer = torch.optim.SGD([logits], 0.5)
    for _ in range(4000):
        new, old = logits.log_softmax(0), logits.log_softmax(0).detach()
        k3 = ref / new.exp() - 1 - (ref.log() - new)
        ratio, advantage = (new - old).exp(), reward - old.exp() @ reward
        optimizer.zero_grad()
        (old.exp() @ (beta * k3 * (ratio if corrected else 1) - ratio * advantage)).backward()
        optimizer.step()
    tilt = (ref.log() + reward / beta).softmax(0)
    gap = (logits.softmax(0) - tilt).abs().max()
    assert gap < 1e-3 if corrected else gap > 0.02
