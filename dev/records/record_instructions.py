"""Train SmolLM2-135M-Instruct on instructions that a program verifies, one seed at a time.

    python dev/records/record_instructions.py --seed 0

A run trains with leave-one-out (RLOO) and writes figs/measured/small/08_SEED.json, answers to
thirty held-out questions and an adapter. It saves its state every few steps in build/small; the
same command resumes an interrupted run, and skips a finished one.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_course.course.presets import ROOT
from rlhf_course.course.run_card import quiet_libraries
from rlhf_course.data.encoding import answer_ids, prompt_ids
from rlhf_course.data.instructions import ONLY_TESTED, TRAINED, Instruction
from rlhf_course.data.transcripts import as_prompt
from rlhf_course.evaluation import mean_ci
from rlhf_course.policy.network import AutoModelForCausalLMWithValueHead
from rlhf_course.ppo.sampling import generate
from rlhf_course.runtime.files import atomic_file, hold

MODEL = ROOT / "build" / "models" / "SmolLM2-135M-Instruct-T0.7"
QUESTIONS = ROOT / "models" / "hh-questions"
REVIEWS = ROOT / "models" / "imdb-openings" / "test-00000-of-00001.parquet"
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EVALUATION_SEED = 1000
SHOWN = 10  # held-out questions per trained instruction whose answers are kept


@dataclass(frozen=True)
class Settings:
    """Store one run's settings."""

    seed: int = 0
    steps: int = 9
    questions: int = 12  # per step; the trained instructions take turns
    answers: int = 4  # per question
    new_tokens: int = 40
    learning_rate: float = 5e-4
    clip: float = 1.0
    rank: int = 16
    alpha: int = 32
    first_layer: int = 15  # of 30; layers below it have no adapter, and need no backward pass
    held_out: int = 64  # questions per trained instruction
    held_out_untrained: int = 32  # questions per instruction that is only tested, and texts
    save_every: int = 3


@dataclass
class Answers:
    """Store sampled answers: prompts and responses as token ids, texts, and who ended them."""

    prompts: list[Tensor]
    responses: list[Tensor]
    texts: list[str]
    ended: list[bool]


def load_policy(settings: Settings):
    """Return the policy, with a new adapter, and its tokenizer.

    The linear layers are in bfloat16 if the CPU multiplies matrices in it. The embedding, which is
    also the head, stays in float32, like the adapter.
    """
    has_bf16 = torch.cpu._is_avx512_bf16_supported()
    dtype = torch.bfloat16 if has_bf16 else torch.float32
    torch.manual_seed(settings.seed)
    network = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    network.get_input_embeddings().float()
    lora = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=LAYERS,
        layers_to_transform=list(range(settings.first_layer, network.config.num_hidden_layers)),
        layers_pattern="layers",
        task_type="CAUSAL_LM",
    )
    policy = AutoModelForCausalLMWithValueHead(get_peft_model(network, lora))
    return policy.eval(), AutoTokenizer.from_pretrained(MODEL)


def autocast(policy):
    """Return the context that multiplies matrices in the base's precision."""
    weight = policy.pretrained_model.get_base_model().model.layers[0].self_attn.q_proj.weight
    return torch.autocast("cpu", torch.bfloat16, weight.dtype == torch.bfloat16)


def sample(policy, tokenizer, questions: Sequence[str], new_tokens: int) -> Answers:
    """Sample one answer to each question."""
    ids = prompt_ids(tokenizer, [as_prompt(question) for question in questions])
    prompts = [torch.tensor(row) for row in ids]
    with autocast(policy):
        responses = generate(
            policy,
            tokenizer,
            prompts,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
        )
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    ended = [int(row[-1]) == tokenizer.eos_token_id for row in responses]
    return Answers(prompts, responses, texts, ended)


def token_logprobs(policy, prompts: Sequence[Tensor], responses: Sequence[Tensor]):
    """Return each response token's log-probability and entropy (N,), and its row (N,), in nats."""
    rows = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    input_ids = pad_sequence(rows, batch_first=True)  # padding on the right changes nothing
    place = torch.arange(input_ids.shape[1])
    starts = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)
    ends = torch.tensor([len(row) for row in rows]).unsqueeze(1)
    predicts = (place >= starts - 1) & (place < ends - 1)
    network = policy.pretrained_model.get_base_model()
    with autocast(policy):
        hidden = network.model(input_ids, use_cache=False).last_hidden_state
    logprobs = network.lm_head(hidden[predicts].float()).log_softmax(-1)
    labels = torch.cat(list(responses)).unsqueeze(1)
    entropies = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
    return logprobs.gather(1, labels).squeeze(1), entropies, predicts.nonzero()[:, 0]


def leave_one_out(rewards: Tensor) -> Tensor:
    """Return advantages (P, G): each reward minus the mean of the question's other answers."""
    others = rewards.sum(1, keepdim=True) - rewards
    return rewards - others / (rewards.shape[1] - 1)


def read_questions(split: str) -> list[dict]:
    """Return the rows of a split: question and, in the split test, answer."""
    lines = (QUESTIONS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def draw_batch(settings: Settings, step: int) -> tuple[list[str], list[Instruction]]:
    """Return a step's prompts and their instructions, each repeated once per answer."""
    generator = random.Random(f"{settings.seed} {step}")
    rows = generator.sample(read_questions("train"), settings.questions)
    instructions = islice(cycle(TRAINED), settings.questions)
    prompts = []
    repeated = []
    for row, instruction in zip(rows, instructions, strict=True):
        prompts += [instruction.append_to(row["question"])] * settings.answers
        repeated += [instruction] * settings.answers
    return prompts, repeated


def verify(instructions: Sequence[Instruction], answers: Answers) -> list[float]:
    """Return each answer's reward: 1 if it obeys its instruction and ended itself, else 0."""
    rows = zip(instructions, answers.texts, answers.ended, strict=True)
    return [float(instruction.obeys(text, ended)) for instruction, text, ended in rows]


def update(policy, optimizer, answers: Answers, advantages: Tensor, settings: Settings) -> float:
    """Take one policy-gradient step; return the gradient's norm before clipping.

    Answers with advantage 0 have no gradient and are left out. The divisor is a constant, as in
    Dr. GRPO, because a mean over each answer's tokens would favor long wrong answers.
    """
    live = advantages.nonzero()[:, 0].tolist()
    if not live:
        return 0.0
    prompts = [answers.prompts[row] for row in live]
    responses = [answers.responses[row] for row in live]
    logprobs, _, row_of = token_logprobs(policy, prompts, responses)
    weight = advantages[live][row_of]
    loss = -(logprobs * weight).sum() / (len(advantages) * settings.new_tokens)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(adapter_weights(policy), settings.clip)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def adapter_weights(policy) -> list[Tensor]:
    """Return the trained tensors."""
    return [p for name, p in policy.named_parameters() if "lora_" in name]


def train_step(policy, optimizer, tokenizer, settings: Settings, step: int) -> dict:
    """Sample, verify and update once; return the step's statistics.

    The step's number seeds all its draws, so a resumed run continues as an uninterrupted one.
    """
    began = time.perf_counter()
    prompts, instructions = draw_batch(settings, step)
    torch.manual_seed(10_000 * (settings.seed + 1) + step)
    answers = sample(policy, tokenizer, prompts, settings.new_tokens)
    sampled = time.perf_counter()
    rewards = torch.tensor(verify(instructions, answers))
    grouped = rewards.view(settings.questions, settings.answers)
    norm = update(policy, optimizer, answers, leave_one_out(grouped).flatten(), settings)
    tokens = sum(len(row) for row in answers.responses)
    row = {
        "step": step + 1,
        "reward": rewards.mean().item(),
        "live_groups": (grouped != grouped[:, :1]).any(1).float().mean().item(),
        "ended": float(np.mean(answers.ended)),
        "tokens": tokens / len(prompts),
        "gradient_norm": norm,
        "seconds": time.perf_counter() - began,
        "sampling_s": sampled - began,
        "tokens_per_s": tokens / (sampled - began),
    }
    for instruction in TRAINED:
        of_this = [
            r for r, i in zip(rewards.tolist(), instructions, strict=True) if i is instruction
        ]
        row[f"reward, {instruction.name}"] = float(np.mean(of_this))
    return row


def train(policy, tokenizer, settings: Settings, folder: Path) -> list[dict]:
    """Train from the folder's saved state, if there is one; return the statistics of all steps."""
    optimizer = torch.optim.AdamW(adapter_weights(policy), settings.learning_rate, weight_decay=0.0)
    state_file = folder / "state.pt"
    history = []
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        set_peft_model_state_dict(policy.pretrained_model, state["adapter"])
        optimizer.load_state_dict(state["optimizer"])
        history = state["history"]
        print(f"resumed after step {len(history)}", flush=True)
    for step in range(len(history), settings.steps):
        history.append(train_step(policy, optimizer, tokenizer, settings, step))
        print(json.dumps(rounded(history[-1])), flush=True)
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            state = {
                "adapter": get_peft_model_state_dict(policy.pretrained_model),
                "optimizer": optimizer.state_dict(),
                "history": history,
            }
            with atomic_file(state_file) as file:
                torch.save(state, file)
            write_lines(folder / "log.jsonl", [rounded(row) for row in history])
    return history


def round_adapter(policy) -> None:
    """Round the adapter to bfloat16, so that the evaluated weights are those of the saved file."""
    for weight in adapter_weights(policy):
        weight.data = weight.data.bfloat16().float()


@torch.no_grad()
def evaluate(policy, tokenizer, settings: Settings, folder: Path) -> dict[str, dict]:
    """Answer the held-out questions under each instruction; return a table per instruction.

    Both evaluations of a run use the same seeds. A finished instruction is read from the folder.
    """
    held_out = [row["question"] for row in read_questions("test")]
    tables = {}
    for number, instruction in enumerate((*TRAINED, *ONLY_TESTED)):
        file = folder / f"{instruction.name.replace(' ', '_')}.json"
        if not file.exists():
            is_trained = instruction in TRAINED
            questions = held_out[: settings.held_out if is_trained else settings.held_out_untrained]
            torch.manual_seed(EVALUATION_SEED + number)
            prompts = [instruction.append_to(question) for question in questions]
            answers = sample(policy, tokenizer, prompts, settings.new_tokens)
            table = {"rows": answer_rows(instruction, questions, answers)}
            if is_trained:
                table |= measure(policy, answers)
            write_json(file, table)
            share = np.mean([row["obeys"] for row in table["rows"]])
            print(f"{instruction.name}: {share:.3f}", flush=True)
        tables[instruction.name] = json.loads(file.read_text(encoding="utf-8"))
    return tables


def answer_rows(instruction: Instruction, questions: Sequence[str], answers: Answers) -> list[dict]:
    """Return a row per answer."""
    obeys = verify([instruction] * len(questions), answers)
    return [
        {
            "question": question,
            "answer": answers.texts[row],
            "ended": answers.ended[row],
            "obeys": obeys[row],
            "tokens": len(answers.responses[row]),
        }
        for row, question in enumerate(questions)
    ]


def measure(policy, answers: Answers) -> dict[str, float]:
    """Return the entropy per token, and the KL to the reference per answer, in nats.

    The KL is estimated by the mean, over answers, of the summed log-ratio.
    """
    logprobs, entropies, _ = token_logprobs(policy, answers.prompts, answers.responses)
    if policy.pretrained_model.get_model_status().enabled is False:
        return {"entropy": entropies.mean().item(), "kl": 0.0}  # this is the reference
    with policy.pretrained_model.disable_adapter():
        reference, _, _ = token_logprobs(policy, answers.prompts, answers.responses)
    kl = (logprobs - reference).sum() / len(answers.responses)
    return {"entropy": entropies.mean().item(), "kl": kl.item()}


@torch.no_grad()
def text_losses(policy, tokenizer, settings: Settings, file: Path) -> dict[str, float]:
    """Return the loss in nats per token on film reviews and on hh-rlhf's preferred answers.

    People wrote the reviews. Language models wrote the answers, and people preferred them.
    """
    if not file.exists():
        rows = read_questions("test")[: settings.held_out_untrained]
        prompts = prompt_ids(tokenizer, [as_prompt(row["question"]) for row in rows])
        replies = answer_ids(tokenizer, [row["answer"] for row in rows])
        reviews = pd.read_parquet(REVIEWS)["text"][: settings.held_out_untrained].tolist()
        review_ids = [tokenizer(text)["input_ids"] for text in reviews]
        sets = {
            "preferred answers": (prompts, replies),
            "film reviews": ([ids[:1] for ids in review_ids], [ids[1:] for ids in review_ids]),
        }
        losses = {}
        for name, (given, continued) in sets.items():
            given = [torch.tensor(ids) for ids in given]
            continued = [torch.tensor(ids) for ids in continued]
            losses[name] = -token_logprobs(policy, given, continued)[0].mean().item()
        write_json(file, losses)
    return json.loads(file.read_text(encoding="utf-8"))


def compare(before: dict, after: dict) -> dict[str, dict]:
    """Return, per instruction, the shares that obey, their paired difference and statistics."""
    rows = {}
    trained = [instruction.name for instruction in TRAINED]
    for name in before:
        old = pd.DataFrame(before[name]["rows"])
        new = pd.DataFrame(after[name]["rows"])
        difference, interval = mean_ci(new["obeys"] - old["obeys"])
        rows[name] = {
            "trained": name in trained,
            "questions": len(old),
            "before": old["obeys"].mean(),
            "after": new["obeys"].mean(),
            "difference": difference,
            "interval": interval,
            "ended_before": old["ended"].mean(),
            "ended_after": new["ended"].mean(),
            "tokens_before": old["tokens"].mean(),
            "tokens_after": new["tokens"].mean(),
        }
        if name in trained:
            rows[name]["entropy_before"] = before[name]["entropy"]
            rows[name]["entropy_after"] = after[name]["entropy"]
            rows[name]["kl"] = after[name]["kl"]
    return {name: rounded(row) for name, row in rows.items()}


def shown_texts(before: dict, after: dict) -> list[dict]:
    """Return the first questions of each trained instruction with both unedited answers."""
    texts = []
    for instruction in TRAINED:
        pairs = zip(before[instruction.name]["rows"], after[instruction.name]["rows"], strict=True)
        for old, new in islice(pairs, SHOWN):
            texts.append(
                {
                    "instruction": instruction.words,
                    "question": old["question"],
                    "before": old["answer"],
                    "after": new["answer"],
                    "obeys_before": old["obeys"],
                    "obeys_after": new["obeys"],
                }
            )
    return texts


def rounded(row: dict) -> dict:
    """Return the row with its numbers rounded to six digits."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}


def write_json(file: Path, value) -> None:
    """Write a JSON file."""
    with atomic_file(file) as path:
        path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_lines(file: Path, rows: Sequence[dict]) -> None:
    """Write a JSON Lines file."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    with atomic_file(file) as path:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def print_estimate(policy, tokenizer, settings: Settings) -> None:
    """Time a batch of short answers, and print how long a whole run would take at this speed."""
    prompts, _ = draw_batch(settings, 0)
    began = time.perf_counter()
    answers = sample(policy, tokenizer, prompts, settings.new_tokens // 4)
    seconds = time.perf_counter() - began
    tokens = sum(len(row) for row in answers.responses)
    evaluations = 2 * len(TRAINED) * (settings.held_out + settings.held_out_untrained)
    # Whole answers take about 2.5 times as long; an update takes about half of its sampling.
    batches = 2.5 * (1.5 * settings.steps + evaluations / len(prompts))
    minutes = seconds * batches / 60
    print(f"{tokens / seconds:.1f} tokens per second: about {minutes:.0f} minutes", flush=True)


def check_settings(folder: Path, settings: Settings) -> None:
    """Raise ``ValueError`` if the folder has another run's results; else note the settings."""
    file = folder / "settings.json"
    values = asdict(settings)
    if file.exists():
        saved = json.loads(file.read_text(encoding="utf-8"))
        changed = [name for name, value in values.items() if saved.get(name) != value]
        if changed:
            raise ValueError(
                f"{folder} has a run with another {', '.join(changed)}: repeat its settings, or"
                " remove the folder."
            )
    write_json(file, values)


def run(settings: Settings, output: Path, work: Path) -> dict:
    """Evaluate, train, evaluate; write the card, the texts and the adapter; return the card."""
    folder = work / f"08_{settings.seed}"
    check_settings(folder, settings)
    policy, tokenizer = load_policy(settings)
    print_estimate(policy, tokenizer, settings)
    # The same for all seeds, because a new adapter changes nothing.
    start = work / f"before_{settings.held_out}_{settings.held_out_untrained}"
    with policy.pretrained_model.disable_adapter():
        before = evaluate(policy, tokenizer, settings, start)
        losses_before = text_losses(policy, tokenizer, settings, start / "text_losses.json")
    history = train(policy, tokenizer, settings, folder)
    round_adapter(policy)
    after = evaluate(policy, tokenizer, settings, folder / "after")
    losses_after = text_losses(policy, tokenizer, settings, folder / "after" / "text_losses.json")
    card = {
        "model": MODEL.name,
        "method": "RLOO",
        "settings": asdict(settings),
        "threads": torch.get_num_threads(),
        "instructions": compare(before, after),
        "text_losses": {"before": rounded(losses_before), "after": rounded(losses_after)},
        "training_minutes": round(sum(row["seconds"] for row in history) / 60, 1),
        "steps": [rounded(row) for row in history],
    }
    adapter = get_peft_model_state_dict(policy.pretrained_model)
    with atomic_file(output / f"08_{settings.seed}_adapter.safetensors") as file:
        save_file({name: weight.bfloat16() for name, weight in adapter.items()}, file)
    write_lines(output / f"08_{settings.seed}_texts.jsonl", shown_texts(before, after))
    write_json(output / f"08_{settings.seed}.json", card)
    return card


def load_recorded(seed: int, output: Path):
    """Return a recorded run's policy, after training, and its tokenizer."""
    card = json.loads((output / f"08_{seed}.json").read_text(encoding="utf-8"))
    policy, tokenizer = load_policy(Settings(**card["settings"]))
    weights = load_file(output / f"08_{seed}_adapter.safetensors")
    weights = {name: weight.float() for name, weight in weights.items()}
    set_peft_model_state_dict(policy.pretrained_model, weights)
    return policy, tokenizer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("seed", "steps", "questions", "held_out"):
        default = getattr(Settings, name)
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, default=ROOT / "figs" / "measured" / "small")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "small")
    chosen = parser.parse_args(arguments)
    settings = Settings(chosen.seed, chosen.steps, chosen.questions, held_out=chosen.held_out)
    if (chosen.output / f"08_{settings.seed}.json").exists():
        print(f"seed {settings.seed} is already recorded in {chosen.output}")
        return
    quiet_libraries()
    with hold(chosen.work / f"08_{settings.seed}"):
        card = run(settings, chosen.output, chosen.work)
    print(json.dumps(card["instructions"], indent=1))


if __name__ == "__main__":
    sys.exit(main())
