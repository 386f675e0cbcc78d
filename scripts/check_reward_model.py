"""Search a reward model for faults, using held-out pairs, baselines, and bad answers.

    python scripts/check_reward_model.py MODEL --pairs DATA

MODEL is a folder or Hub id of a sequence classifier or an adapter. DATA is a folder or Hub id of
preference pairs: columns chosen and rejected contain transcripts, messages, or answers to the
prompts in column prompt. Writes check-up.html and check-up.json to --output. Exits with 2 if the
verdict advises against PPO, or with 1 after an error. "No objection" means only that the check-up
found no fault: PPO may still degrade the texts.
"""

import argparse
import json
import sys
from pathlib import Path

from rlhf_course.command_line import exits

LEVELS = (
    "stop: PPO would exploit the fault; watch: PPO may find it, so monitor it in training."
    " The check-up finds faults; it does not show that PPO will succeed."
)
ENCODINGS = ("transcript", "chat", "template", "pair")
SPECIAL = 8  # tokens around an answer
LONGEST_PROBE = 5  # in lengths of the normal answer


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "check_reward_model.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="folder or Hub id of the reward model")
    parser.add_argument("--pairs", required=True, help="folder or Hub id of preference pairs")
    parser.add_argument("--data_dir", help="subfolder of the dataset")
    parser.add_argument(
        "--columns", help="columns, such as prompt=question,chosen=response_j,rejected=response_k"
    )
    parser.add_argument("--split", default="test", help="pairs not used in training")
    parser.add_argument("--limit", type=int, default=1000, help="maximum number of pairs")
    parser.add_argument("--label", help="label whose logit is the score")
    parser.add_argument(
        "--encoding",
        choices=ENCODINGS,
        help="how prompt and answer become tokens (default: as the model was trained, if its folder"
        " says so; a model from elsewhere: its chat template if it has one; an encoder: pair)",
    )
    parser.add_argument(
        "--probes", type=Path, help="JSON lines: prompt, answer, and bad answers in other columns"
    )
    parser.add_argument("--audit_prompts", type=int, default=300, help="prompts in the audit")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/check-up"),
        help="folder (default: build/check-up)",
    )
    chosen = parser.parse_args(arguments)
    if chosen.limit < 20:
        parser.error(f"--limit is {chosen.limit}; use 20 or more")
    if chosen.audit_prompts < 2:
        parser.error(f"--audit_prompts is {chosen.audit_prompts}; use 2 or more")
    return chosen


def load_score(chosen: argparse.Namespace):
    """Return the scorer, a function of prompts and answers, with its tokenizer and token limit.

    A classifier's label has no token limit: SentimentReward cuts long texts on the left.
    """
    from rlhf_course.rewards import RewardModel, SentimentReward
    from rlhf_course.runtime.hub import download

    download(chosen.model)
    if chosen.label:
        reward = SentimentReward(chosen.model, chosen.label, chosen.batch_size)

        def score(prompts, answers):
            texts = [f"{prompt} {answer}" for prompt, answer in zip(prompts, answers, strict=True)]
            return reward(texts)

        return score, reward.tokenizer, None
    model = RewardModel(chosen.model, batch_size=chosen.batch_size, form=chosen.encoding)
    if model.form in ("chat", "template") and not model.tokenizer.chat_template:
        raise ValueError(f"{chosen.model} has no chat template; omit --encoding {model.form}.")
    return model, model.tokenizer, model.max_length


def keep_fitting(pairs, tokenizer, most: int | None, audit_prompts: int):
    """Return the pairs of at most ``most`` tokens, and short ones as a dict of columns.

    The dict has the prompts and chosen answers of up to ``audit_prompts`` pairs of at most
    ``most`` / 5 tokens.
    """
    chosen_ids = tokenizer(pairs["chosen"][:])["input_ids"]
    rejected_ids = tokenizer(pairs["rejected"][:])["input_ids"]
    sizes = [
        max(len(chosen), len(rejected)) + SPECIAL
        for chosen, rejected in zip(chosen_ids, rejected_ids, strict=True)
    ]
    most = most or max(sizes) * LONGEST_PROBE
    kept = [row for row, size in enumerate(sizes) if size <= most]
    short = [row for row in kept if sizes[row] * LONGEST_PROBE <= most][:audit_prompts]
    if len(kept) < len(pairs):
        print(f"Dropped {len(pairs) - len(kept)} pairs with an answer of more than {most} tokens.")
    if len(short) < 2:
        limit = f"at most {most // LONGEST_PROBE} tokens"
        raise ValueError(f"The audit needs two pairs of {limit}; there are {len(short)}. Add some.")
    normal = pairs.select(short)
    return pairs.select(kept), {"prompt": normal["prompt"][:], "answer": normal["chosen"][:]}


def prepare(model, prompts: list[str], answers: list[str]) -> None:
    """Let a RewardModel share prompts if it can; print what it reads, and how long it will take.

    ``prompts`` and ``answers`` are all texts that will be scored.
    """
    from rlhf_course.rewards import measure_speed, shares_prompts

    row = model.encode(prompts[:1], answers[:1])[0]
    shown = model.tokenizer.decode(row)
    print(f"Encoding {model.form}, for example: {shown[:60]!r} … {shown[-60:]!r}")
    print(f"The score is read at {model.read_at(row)}.")
    model.share_prompts = shares_prompts(model, prompts, answers)
    model.show_progress = True
    tokens, seconds = measure_speed(model, prompts, answers)
    print(f"{len(answers):,} texts, {tokens:,} tokens: about {seconds / 60:.1f} minutes.")


def load_probes(file: Path | None) -> dict | None:
    """Return a JSON Lines file of probes as a dict of columns, or None for no file."""
    if file is None:
        return None
    import pandas as pd

    rows = pd.read_json(file, lines=True, dtype=False)
    if len(rows.columns) < 3 or not {"prompt", "answer"} < {*rows.columns}:
        raise ValueError(
            f"{file} has the columns {', '.join(map(str, rows.columns))}; add prompt, answer, and"
            " at least one column of bad answers."
        )
    return {name: rows[name].tolist() for name in rows}


def draw(result) -> dict[str, str]:
    """Return a dict from caption to figure, a PNG in base64."""
    from rlhf_course.audit import PASS
    from rlhf_course.command_line.page import picture
    from rlhf_course.course.plots import audit_bars, chosen_and_rejected

    figures = {
        "Scores of both answers, and their differences within a pair": chosen_and_rejected(
            result.pairs["chosen"], result.pairs["rejected"]
        ),
        "How often the normal answer scores higher than a bad one": audit_bars(
            {"reward model": result.audit}, PASS
        ),
    }
    return {caption: picture(figure) for caption, figure in figures.items()}


def main(arguments: list[str]) -> int:
    chosen = parse_arguments(arguments)
    from rlhf_course.audit.checkup import STOP, check_up, collect_texts, plan_audit
    from rlhf_course.course.run_card import quiet_libraries
    from rlhf_course.data import describe, load_pairs
    from rlhf_course.rewards import RewardModel
    from rlhf_course.runtime.files import check_folder, read_json

    quiet_libraries()
    output = check_folder(chosen.output)
    old = output / "check-up.json"
    if old.exists() and read_json(old).get("model") != chosen.model:
        raise FileExistsError(
            f"{old} is not a check-up of {chosen.model}. Choose another --output."
        )
    pairs, dropped = load_pairs(chosen.pairs, chosen.split, chosen.data_dir, chosen.columns)
    pairs = pairs.shuffle(seed=chosen.seed).select(range(min(chosen.limit, len(pairs))))
    print(f"{len(pairs)} pairs of {chosen.pairs}, split {chosen.split}; {describe(dropped)}")
    probes = load_probes(chosen.probes)
    score, tokenizer, most = load_score(chosen)
    pairs, normal = keep_fitting(pairs, tokenizer, most, chosen.audit_prompts)
    audited = plan_audit(pairs, probes or normal, chosen.seed)
    if isinstance(score, RewardModel):
        prepare(score, *collect_texts(pairs, audited))
    result = check_up(score, pairs, audited, chosen.seed)
    write_results(output, chosen, result, len(pairs))
    for finding in result.findings:
        print(f"{finding.level:5}  {finding.question:45}  {finding.measured}")
    print(f"\n{result.verdict}\nOpen next: {output / 'check-up.html'}")
    return 2 if result.advice(STOP) else 0


def write_results(output: Path, chosen: argparse.Namespace, result, pairs: int) -> None:
    """Write check-up.html and check-up.json."""
    from rlhf_course.command_line import page
    from rlhf_course.runtime.files import atomic_file

    findings = [finding._asdict() for finding in result.findings]
    page.write(
        output / "check-up.html",
        title=f"Check-up of {chosen.model} on {chosen.pairs}",
        verdict=result.verdict,
        about=f"{pairs:,} held-out pairs. Intervals are 95 %. {LEVELS}",
        columns={"question": "question", "measured": "measured", "level": "verdict"},
        rows=findings,
        pictures=draw(result),
    )
    summary = {
        "model": chosen.model,
        "verdict": result.verdict,
        "pairs": pairs,
        "findings": findings,
    }
    with atomic_file(output / "check-up.json") as path:
        path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(exits.run("check_reward_model.py", main))
