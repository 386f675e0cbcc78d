"""Train notebook 10's tiny chat model, measure it with the rubric, and write its card.

    python dev/models/train_chat_mini.py

The model stands in for SmolLM2-135M-Instruct in tests. Its training answers have faults by design,
so that training on the rubric can improve every item.
"""

import argparse
import random
import re
import time
from pathlib import Path

import torch
import yaml
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from rlhf_course.course.presets import ROOT
from rlhf_course.data import as_prompt, tokenize_answers
from rlhf_course.data.encoding import check_template, prompt_ids
from rlhf_course.data.rubric import RUBRIC, WISH, content_stems, words_of
from rlhf_course.policy.network import AutoModelForCausalLMWithValueHead
from rlhf_course.ppo.sampling import SAMPLING, generate
from rlhf_course.questions import load_questions, question_of
from rlhf_course.runtime.files import atomic_file, atomic_folder
from rlhf_course.synthetic.dialogues import NAMES, make_pairs
from rlhf_course.synthetic.grammar import Pair
from rlhf_course.synthetic.small_models import fine_tune

NAME = "chat-mini"
SEED = 0
PAIRS = 12_000
QUESTIONS = 200  # to measure the model with
VOCABULARY = 1000
STEPS = 750
BATCH = 16
RATE = 3e-3
TEMPERATURE = 0.9  # the learned distribution at this temperature is the model's own
MOST_TOKENS = 40  # per sampled answer
START = "<|im_start|>"
END = "<|im_end|>"
# SmolLM2's template without its system sentence.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The share of training answers that get each change; see draw_answer.
SHARES = {
    "off_topic": 0.2,
    "subject": 0.65,
    "short": 0.5,
    "long": 0.25,
    "repeat": 0.25,
    "split": 0.35,
}
SENTENCE_END = re.compile(r"(?<=[.!?]) ")


def make_dialogues(held_out: set[str]) -> list[Pair]:
    """Return pairs with one turn, without those whose question is held out.

    The seed differs from that of notebook 10's questions.
    """
    pairs = [pair for pair in make_pairs(PAIRS, seed=SEED + 1) if pair.prompt.count("Human:") == 1]
    return [pair for pair in pairs if question_of(pair) not in held_out]


def subject_of(question: str) -> str:
    """Return the last word that names a topic, or else the question's last content word."""
    names = set().union(*NAMES.values())
    words = [word for word in words_of(question) if content_stems(word)]
    named = [word for word in words if word.removesuffix("s") in names]
    return (named or words)[-1]


def draw_answer(dice: random.Random, pair: Pair, other: Pair) -> str:
    """Draw an answer to a pair's question, with some of the faults in ``SHARES``.

    It may answer the question of ``other``, be cut to two sentences, have two sentences of a
    second answer, repeat one of its first two sentences, or have two paragraphs. An answer to its
    own question may begin with the subject.
    """
    has = {kind: dice.random() < share for kind, share in SHARES.items()}
    source = other if has["off_topic"] else pair
    sentences = SENTENCE_END.split(source.chosen)
    if has["short"]:
        sentences = sentences[:2]
    if has["long"]:
        sentences += SENTENCE_END.split(source.rejected)[:2]
    if has["repeat"]:
        place = dice.randrange(min(2, len(sentences)))
        sentences.insert(place, sentences[place])
    if has["subject"] and not has["off_topic"]:
        sentences[0] = f"About your {subject_of(question_of(pair))}: {sentences[0]}"
    if has["split"] and len(sentences) > 1:
        place = dice.randint(1, min(2, len(sentences) - 1))
        sentences[place] = f"\n\n{sentences[place]}"
    return " ".join(sentences).replace(" \n\n", "\n\n")


def ask(question: str) -> str:
    """Return a question and the instruction as a prompt."""
    return as_prompt(f"{question} {WISH}")


def make_rows(pairs: list[Pair]) -> list[dict]:
    """Return one row of prompt and answer for each pair."""
    dice = random.Random(SEED)
    rows = []
    for pair in pairs:
        answer = draw_answer(dice, pair, other=dice.choice(pairs))
        rows.append({"prompt": ask(question_of(pair)), "answer": answer})
    return rows


def train_tokenizer(rows: list[dict]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with the ChatML template on the rows' texts."""
    texts = [f"user\n{row['prompt']}assistant\n{row['answer']}" for row in rows]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=VOCABULARY, special_tokens=[START, END], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        padding_side="left",
    )
    tokenizer.chat_template = TEMPLATE
    check_template(tokenizer)
    return tokenizer


def train_model(rows: list[dict], tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a bfloat16 Llama, trained on the rows' answers and sharpened by ``TEMPERATURE``."""
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,  # at 0.02, a narrow model starts to learn late
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    tokens, _ = tokenize_answers(Dataset.from_list(rows), tokenizer, config.max_position_embeddings)
    fine_tune(
        model,
        rows=tokens["input_ids"],
        masks=tokens["completion_mask"],
        steps=STEPS,
        batch=BATCH,
        lr=RATE,
        title="fine-tuning",
    )
    model = model.bfloat16()
    with torch.no_grad():
        model.model.norm.weight /= TEMPERATURE  # divides all logits
    return model


def measure(folder: Path, tokenizer, questions: list[str]) -> dict[str, float]:
    """Print three sampled answers, and return the share of answers that meet each rubric item."""
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    prompts = prompt_ids(tokenizer, [ask(question) for question in questions])
    queries = [torch.tensor(ids) for ids in prompts]
    set_seed(SEED)
    responses = generate(policy, tokenizer, queries, max_new_tokens=MOST_TOKENS, **SAMPLING)
    ended = [response[-1].item() == tokenizer.eos_token_id for response in responses]
    answers = tokenizer.batch_decode(responses, skip_special_tokens=True)
    for question, answer in list(zip(questions, answers, strict=True))[:3]:
        print(f"{question!r}: {answer!r}")
    cases = list(zip(questions, answers, ended, strict=True))
    return {name: sum(item(*case) for case in cases) / len(cases) for name, item in RUBRIC.items()}


def write_card(folder: Path, model: LlamaForCausalLM, rows: int, shares: dict[str, float]) -> None:
    """Fill the model's numbers into its card."""
    cards = yaml.safe_load((ROOT / "models/cards.yaml").read_text(encoding="utf-8"))
    measured = "\n".join(f"| `{name}` | {share:.0%} |" for name, share in shares.items())
    card = cards[NAME].format(
        parameters=model.num_parameters() / 1e6,
        vocabulary=model.config.vocab_size,
        rows=rows,
        steps=STEPS,
        batch=BATCH,
        rate=RATE,
        temperature=TEMPERATURE,
        questions=QUESTIONS,
        tokens=MOST_TOKENS,
        measured=measured,
        **SHARES,
    )
    with atomic_file(folder / "README.md") as path:
        path.write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser("train_chat_mini.py", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "models")
    target = parser.parse_args().output / NAME
    start = time.perf_counter()
    _, held_out = load_questions("dialogues")
    pairs = make_dialogues(set(held_out))
    rows = make_rows(pairs)
    tokenizer = train_tokenizer(rows)
    model = train_model(rows, tokenizer)
    with atomic_folder(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder, save_jinja_files=False)
    print(f"trained in {time.perf_counter() - start:.0f} s")
    shares = measure(target, tokenizer, held_out[:QUESTIONS])
    print(shares)
    write_card(target, model, len(rows), shares)


if __name__ == "__main__":
    main()
