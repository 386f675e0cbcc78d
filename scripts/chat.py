"""Ask one or two policies the same question, and see their answers side by side, token by token.

    python scripts/chat.py
    python scripts/chat.py BEFORE AFTER
    python scripts/chat.py BEFORE AFTER --kl --question "How do I learn to juggle?"

BEFORE and AFTER are folders or hub ids of chat models, or of adapters such as train_ppo.py's
policy/. Without them, the model that `make real` gets answers, and the adapter that the course
trained on it. Without --question, questions come from the terminal, until Ctrl-D. Each question
is a dialogue of its own.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from rlhf_course.command_line import exits

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT / "build/models/SmolLM2-135M-Instruct"
SHARPENED = ROOT / "build/models/SmolLM2-135M-Instruct-T0.7"
RECORDED = ROOT / "figs/measured/small/08_0_adapter.safetensors"
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class Speaker:
    """Hold a policy, its tokenizer, and the answer that it is giving."""

    name: str
    model: object
    tokenizer: object
    generator: object  # its own, so that equal policies give equal answers
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    kl: float | None = None  # of the answer, to the first policy, in nats

    def text(self) -> str:
        """Return the answer so far."""
        return self.tokenizer.decode(self.answer, skip_special_tokens=True).strip()


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "chat.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("policies", nargs="*", metavar="POLICY", help="BEFORE and AFTER")
    parser.add_argument("--question", help="ask this and exit")
    parser.add_argument("--max_new_tokens", type=int, default=96, help="default: 96")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: 1; 0 is greedy")
    parser.add_argument(
        "--top_p", type=float, default=0.9, help="share of probability to keep (default: 0.9)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kl",
        action="store_true",
        help="show KL to the first policy: of the next-token distributions, summed over the answer",
    )
    chosen = parser.parse_args(arguments)
    if len(chosen.policies) > 2:
        parser.error(f"there are {len(chosen.policies)} policies; name one or two")
    if chosen.temperature < 0:
        parser.error(f"--temperature is {chosen.temperature}; use 0 or more")
    if not 0 < chosen.top_p <= 1:
        parser.error(f"--top_p is {chosen.top_p}; use a number above 0, up to 1")
    if chosen.max_new_tokens < 1:
        parser.error(f"--max_new_tokens is {chosen.max_new_tokens}; use 1 or more")
    return chosen


def default_policies() -> list[str]:
    """Return the real model's folder and, for its sharpened copy, the recorded adapter's folder.

    Raises ``FileNotFoundError`` if the model is missing.
    """
    if SHARPENED.exists():
        return [str(SHARPENED), str(unpack_recorded(SHARPENED))]
    if REAL.exists():
        print("For the adapter too, run python scripts/get_real_model.py --temperature 0.7.")
        return [str(REAL)]
    raise FileNotFoundError(f"{REAL} is missing. Run make real, or name a policy.")


def unpack_recorded(base: Path) -> Path:
    """Return a folder with the recorded adapter in peft's layout; write it unless it exists.

    dev/records/record_instructions.py trained it, on the upper 15 of 30 layers.
    """
    from peft import LoraConfig
    from safetensors.torch import load_file, save_file

    from rlhf_course.runtime.files import atomic_folder, check_folder

    folder = check_folder(base.with_name(f"{base.name}-instructions"))
    if folder.exists():
        return folder
    config = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=LAYERS,
        layers_to_transform=list(range(15, 30)),
        layers_pattern="layers",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    weights = {name: weight.float() for name, weight in load_file(RECORDED).items()}
    with atomic_folder(folder) as new:
        config.save_pretrained(new)
        save_file(weights, new / "adapter_model.safetensors")
    return folder


def load(source: str, seed: int) -> Speaker:
    """Load a policy from a folder, an adapter's folder, or a hub id."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlhf_course.policy.save_load import load_model, load_tokenizer

    model = load_model(AutoModelForCausalLM, source, dtype=torch.float32).eval()
    base = source
    has_tokenizer = Path(source, "tokenizer_config.json").exists()
    if hasattr(model, "peft_config") and not has_tokenizer:
        base = model.peft_config["default"].base_model_name_or_path
    path = Path(source).resolve()
    is_policy = path.name in ("policy", "model")  # the training commands' names
    name = f"{path.parent.name}/{path.name}" if is_policy else path.name
    return Speaker(name, model, load_tokenizer(base), torch.Generator().manual_seed(seed))


def draw(logits, chosen: argparse.Namespace, generator) -> int:
    """Draw a token from logits (V,), of the likeliest tokens that have ``top_p`` together."""
    import torch

    if chosen.temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = (logits / chosen.temperature).softmax(-1).sort(descending=True)
    is_kept = probabilities.cumsum(-1) - probabilities < chosen.top_p
    cumulative = (probabilities * is_kept).cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(1, generator=generator, dtype=torch.float64) * cumulative[-1]
    place = torch.searchsorted(cumulative, uniform, right=True).clamp(max=len(tokens) - 1)
    return int(tokens[place])


def end_tokens(speaker: Speaker) -> set[int]:
    """Return the ids that end an answer; a chat model's config may list several."""
    saved = getattr(speaker.model, "generation_config", None)
    ends = getattr(saved, "eos_token_id", None) or speaker.tokenizer.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}


def speak(speaker: Speaker, question: str, chosen: argparse.Namespace) -> Iterator[None]:
    """Sample the answer to a question; yield after each token."""
    import torch

    from rlhf_course.data import prompt_ids
    from rlhf_course.data.transcripts import as_prompt

    speaker.prompt = prompt_ids(speaker.tokenizer, [as_prompt(question)])[0]
    speaker.answer = []
    speaker.kl = None
    ends = end_tokens(speaker)
    input_ids = torch.tensor([speaker.prompt])
    cache = None
    for _ in range(chosen.max_new_tokens):
        with torch.inference_mode():
            output = speaker.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        token = draw(output.logits[0, -1].float(), chosen, speaker.generator)
        speaker.answer.append(token)
        yield
        if token in ends:
            return
        input_ids = torch.tensor([[token]])


def measure_kl(speaker: Speaker, first: Speaker) -> float:
    """Return the KL of an answer's next-token distributions to the first policy's, in nats.

    The KLs are summed over the answer's tokens, at temperature 1. Raises ``ValueError`` for
    tokenizers that differ.
    """
    import torch

    if speaker.tokenizer.get_vocab() != first.tokenizer.get_vocab():
        raise ValueError("--kl needs policies with the same tokenizer. Omit --kl.")
    input_ids = torch.tensor([speaker.prompt + speaker.answer])
    predicts = slice(len(speaker.prompt) - 1, -1)
    with torch.inference_mode():
        logits = speaker.model(input_ids=input_ids).logits[0, predicts]
        first_logits = first.model(input_ids=input_ids).logits[0, predicts]
    logprobs = logits.float().log_softmax(-1)
    first_logprobs = first_logits.float().log_softmax(-1)
    return (logprobs.exp() * (logprobs - first_logprobs)).sum().item()


def show(speakers: list[Speaker]):
    """Return the answers so far, side by side."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(expand=True)
    panels = []
    for speaker in speakers:
        grid.add_column(ratio=1)
        about = f"{len(speaker.answer)} tokens"
        if speaker.kl is not None:
            about += f", KL {speaker.kl:.2f} nats"
        panels.append(Panel(Text(speaker.text()), title=Text(speaker.name), subtitle=about))
    grid.add_row(*panels)
    return grid


def answer(speakers: list[Speaker], question: str, chosen: argparse.Namespace, console) -> None:
    """Show all speakers' answers to a question while they are sampled."""
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        streams = [speak(speaker, question, chosen) for speaker in speakers]
        for _ in zip_longest(*streams):
            live.update(show(speakers), refresh=True)
        if chosen.kl:
            for speaker in speakers[1:]:
                speaker.kl = measure_kl(speaker, speakers[0])
        live.update(show(speakers), refresh=True)


def ask(speakers: list[Speaker], chosen: argparse.Namespace, console) -> None:
    """Answer questions from the terminal or a pipe, until their end or Ctrl-C."""
    while True:
        try:
            question = input("Question: ").strip()
            if question:
                answer(speakers, question, chosen, console)
        except (EOFError, KeyboardInterrupt):
            print()
            return


def main(arguments: list[str]) -> None:
    chosen = parse_arguments(arguments)
    from rich.console import Console

    from rlhf_course.course.run_card import quiet_libraries

    quiet_libraries()
    sources = chosen.policies or default_policies()
    speakers = [load(source, chosen.seed) for source in sources]
    console = Console()
    if chosen.question is None:
        ask(speakers, chosen, console)
        return
    console.print(f"Question: {chosen.question}", markup=False)
    answer(speakers, chosen.question, chosen, console)


if __name__ == "__main__":
    sys.exit(exits.run("chat.py", main))
