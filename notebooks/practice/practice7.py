"""Exercise 7, assemble: one PPO step of the student's own functions against the trainer."""

import ast
import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

sys.path.append(str(Path(__file__).resolve().parents[1] / "exercises"))
from ex03_ppo_step_by_step import SET  # noqa: E402

NAMES = tuple(SET.exercises)
STATS = (  # in the order in which a step computes them
    "objective/kl",
    "ppo/returns/mean",
    "ppo/loss/policy",
    "ppo/loss/value",
    "beta",
)
TOLERANCE, EOS = 1e-5, 39


def my_functions(notebook: str) -> SimpleNamespace:
    """The seven functions from a solved exercise notebook; nothing else in it runs."""
    cells = json.loads(Path(notebook).expanduser().read_text(encoding="utf-8"))["cells"]
    names = {"torch": torch}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        source = "".join(cell["source"])
        if any(f"def {name}(" in source for name in NAMES):
            kept = [x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef)]
            exec(compile(ast.Module(kept, []), notebook, "exec"), names)
    return SimpleNamespace(**{name: names[name] for name in NAMES if name in names})


def make_policy(seed: int) -> AutoModelForCausalLMWithValueHead:
    """A random GPT-2 of 40 tokens with a value head."""
    torch.manual_seed(seed)
    special = {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": EOS}
    shape = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0)
    config = GPT2Config(**shape, **special, **rates, initializer_range=0.2)
    return AutoModelForCausalLMWithValueHead(GPT2LMHeadModel(config)).eval()


def make_batch(seed: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """What a step gets, and what the trainer makes of the same: numbers and weights."""
    policy, reference = make_policy(seed), make_policy(seed)
    for p in policy.parameters():
        p.data += 0.03 * torch.randn(p.shape)
    n, rate = 6, 0.3
    queries = [torch.randint(39, (2 + i % 4,)) for i in range(n)]
    responses = [torch.randint(39, (3 + (3 * i) % 5,)) for i in range(n)]
    for response in responses[::2]:
        response[-1] = EOS  # sampled, so it counts
    scores = torch.randn(n)
    sizes = {"batch_size": n, "mini_batch_size": n, "ppo_epochs": 3}
    config = PPOConfig(**sizes, init_kl_coef=0.4, cliprange_value=0.1, vf_coef=0.3, horizon=100)
    network = copy.deepcopy(policy)
    tokenizer = SimpleNamespace(pad_token_id=EOS, eos_token_id=EOS)
    sgd = torch.optim.SGD(policy.parameters(), lr=rate)
    trainer = PPOTrainer(config, policy, reference, tokenizer, optimizer=sgd)
    stats = trainer.step(queries, responses, scores)
    stats = {name: stats[name] for name in STATS[:-1]} | {"beta": trainer.kl_ctl.value}
    weights = [p.detach().cpu() for p in policy.parameters()]
    q, r = (max(map(len, rows)) for rows in (queries, responses))
    ids = torch.full((n, q + r), EOS)
    for row, (query, response) in enumerate(zip(queries, responses)):
        ids[row, q - len(query) : q + len(response)] = torch.cat([query, response])
    lengths = torch.tensor([len(query) for query in queries])
    given = SimpleNamespace(
        ids=ids,
        query_mask=(torch.arange(q) >= q - lengths.unsqueeze(1)).long(),
        response_ids=ids[:, q:],
        lengths=torch.tensor([len(response) for response in responses]),
        pad=EOS,
        scores=scores,
        beta=config.init_kl_coef,
        config=config,
        network=network,
        reference=reference.cpu(),
        optimizer=torch.optim.SGD(network.parameters(), lr=rate),
    )
    return given, SimpleNamespace(stats=stats, weights=weights)


def run_network(network, b, attention_mask, positions) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and values of the response tokens, (B, R) each."""
    logits, _, values = network(b.ids, attention_mask=attention_mask, position_ids=positions)
    q = b.query_mask.shape[1]
    logprobs = logits[:, q - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, b.response_ids.unsqueeze(-1))[..., 0], values[:, q - 1 : -1]


def differs(step, functions: dict, given, trainer) -> str | None:
    """What of a step is not as the trainer's, first in the order of the step; or None."""
    called, b = set(), copy.deepcopy(given)
    b.optimizer = torch.optim.SGD(b.network.parameters(), lr=given.optimizer.defaults["lr"])

    def noting(name):
        def call(*arguments):
            called.add(name)
            return functions[name](*arguments)

        return call

    try:
        found = step(b, SimpleNamespace(**{name: noting(name) for name in functions}))
        found = {name: float(found[name]) for name in STATS}
    except NotImplementedError:
        return "something is not written yet"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if left := [name for name in functions if name not in called]:
        return f"the step never calls {', '.join(left)}"
    for name, expected in trainer.stats.items():
        if not abs(found[name] - expected) <= TOLERANCE * max(1, abs(expected)):
            return f"{name} is {found[name]:.6g}; the trainer has {expected:.6g}"
    moved = zip(b.network.parameters(), trainer.weights)
    apart = max((p.detach() - w).abs().max().item() for p, w in moved)
    return None if apart <= TOLERANCE else f"a weight after the step is off by {apart:.1e}"


def check(step, own, seed: int = 0) -> bool:
    """Print whether a step equals the trainer's, and if not, which function is wrong."""
    given, trainer = make_batch(seed)
    right = {name: SET.exercises[name].solution for name in NAMES}
    if missing := [name for name in NAMES if not hasattr(own, name)]:
        print(f"✘ {', '.join(missing)} missing: own needs all of {', '.join(NAMES)}.")
        return False
    mine = {name: getattr(own, name) for name in NAMES}
    if (said := differs(step, mine, given, trainer)) is None:
        print(f"✔ numbers and weights equal the trainer's to {TOLERANCE:.0e}.")
        return True
    print(f"✘ {said}.")
    if said := differs(step, right, given, trainer):
        print(f"  Even with correct functions {said}: look at ppo_step itself.")
        return False
    wrong = {name: differs(step, right | {name: mine[name]}, given, trainer) for name in NAMES}
    for name, said in wrong.items():
        if said:
            print(f"  ppo_step is right; {name} is wrong. With it alone, {said}.")
    return False
