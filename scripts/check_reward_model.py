"""Check whether a reward model is ready for PPO, using held-out pairs, baselines, and bad answers.

    python scripts/check_reward_model.py MODEL --pairs DATA

MODEL is a folder or Hub id of a sequence classifier or an adapter. DATA is a folder or Hub id of
preference pairs: columns chosen and rejected contain transcripts, messages, or answers to the
prompts in column prompt. Writes check-up.html and check-up.json to --output. Exits with 2 if the
verdict advises against PPO, or with 1 after an error.
"""

import argparse
import json
import sys
from pathlib import Path

from rlhf_course.command_line import exits

LEVELS = "stop: PPO would exploit the fault; watch: PPO may find it, so monitor it in training."
SPECIAL = 8  # tokens around an answer
LONGEST_PROBE = 5  # in answer lengths
AUDITED = 300  # pairs


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
    parser.add_argument("--split", default="test", help="pairs not used in training")
    parser.add_argument("--limit", type=int, default=1000, help="maximum number of pairs")
    parser.add_argument("--label", help="label whose logit is the score")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="apply the tokenizer's chat template (default: if it has one)",
    )
    parser.add_argument(
        "--probes", type=Path, help="JSON lines: prompt, answer, and bad answers in other columns"
    )
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
    return chosen


def load_score(chosen: argparse.Namespace):
    """Return the scorer (prompts, answers → scores), its tokenizer, and its token limit."""
    from rlhf_course.rewards import ChatRewardModel, RewardModel, SentimentReward
    from rlhf_course.runtime.hub import download

    download(chosen.model)
    if chosen.label:
        reward = SentimentReward(chosen.model, chosen.label, chosen.batch_size)

        def score(prompts, answers):
            return reward([f"{p} {a}" for p, a in zip(prompts, answers, strict=True)])

        return score, reward.tokenizer, None  # reward truncates long texts on the left
    model = RewardModel(chosen.model, batch_size=chosen.batch_size)
    has_template = model.tokenizer.chat_template is not None
    if chosen.chat and not has_template:
        raise ValueError(f"{chosen.model} has no chat template; omit --chat.")
    if chosen.chat is False:
        model.tokenizer.chat_template = None  # RewardModel would apply it
    elif has_template:
        model = ChatRewardModel(model.model, model.tokenizer, batch_size=chosen.batch_size)
    return model, model.tokenizer, model.max_length


def keep_fitting(pairs, tokenizer, max_tokens: int | None):
    """Return the pairs of at most ``max_tokens`` tokens, and short ones as a dict of columns.

    The dict has the prompts and chosen answers of up to 300 pairs of at most ``max_tokens`` / 5
    tokens, so that every probe fits.
    """
    chosen = tokenizer(pairs["chosen"][:])["input_ids"]
    rejected = tokenizer(pairs["rejected"][:])["input_ids"]
    both = zip(chosen, rejected, strict=True)
    sizes = [max(len(first), len(second)) + SPECIAL for first, second in both]
    if max_tokens is None:
        max_tokens = max(sizes) * LONGEST_PROBE
    kept = [row for row, size in enumerate(sizes) if size <= max_tokens]
    if len(kept) < len(pairs):
        dropped = len(pairs) - len(kept)
        print(f"Dropped {dropped} pairs with an answer of more than {max_tokens} tokens.")
    short = [row for row in kept if sizes[row] * LONGEST_PROBE <= max_tokens][:AUDITED]
    if len(short) < 2:
        raise ValueError(
            f"The audit needs two pairs of at most {max_tokens // LONGEST_PROBE} tokens; there are"
            f" {len(short)}. Add some."
        )
    audited = pairs.select(short)
    columns = {"prompt": audited["prompt"][:], "answer": audited["chosen"][:]}
    return pairs.select(kept), columns


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


def pictures(check_up) -> dict[str, str]:
    """Return a dict from caption to figure, a PNG in base64, of a check-up's scores and audit."""
    from rlhf_course.audit import PASS
    from rlhf_course.command_line.page import picture
    from rlhf_course.course.plots import audit_bars, chosen_and_rejected

    scores = chosen_and_rejected(check_up.pairs["chosen"], check_up.pairs["rejected"])
    bars = audit_bars({"reward model": check_up.audit}, PASS)
    figures = {
        "Scores of both answers, and their differences within a pair": scores,
        "How often the normal answer scores higher than a bad one": bars,
    }
    return {caption: picture(figure) for caption, figure in figures.items()}


def main(arguments: list[str]) -> int:
    """Check the model and write both files; return 2 if the verdict is against PPO, else 0."""
    chosen = parse_arguments(arguments)
    from rlhf_course.audit.checkup import STOP, check_up
    from rlhf_course.command_line import page
    from rlhf_course.course.run_card import quiet_libraries
    from rlhf_course.data import describe, load_pairs
    from rlhf_course.runtime.files import atomic_file, check_folder, read_json

    quiet_libraries()
    output = check_folder(chosen.output)
    old = output / "check-up.json"
    if old.exists() and read_json(old).get("model") != chosen.model:
        raise FileExistsError(
            f"{old} is not a check-up of {chosen.model}. Choose another --output."
        )
    pairs, dropped = load_pairs(chosen.pairs, chosen.split, chosen.data_dir)
    pairs = pairs.shuffle(seed=chosen.seed).select(range(min(chosen.limit, len(pairs))))
    print(f"{len(pairs)} pairs of {chosen.pairs}, split {chosen.split}; {describe(dropped)}")
    probes = load_probes(chosen.probes)
    score, tokenizer, max_tokens = load_score(chosen)
    pairs, answers = keep_fitting(pairs, tokenizer, max_tokens)
    checked = check_up(score, pairs, probes or answers, chosen.seed)
    result = {
        "model": chosen.model,
        "verdict": checked.verdict,
        "pairs": len(pairs),
        "findings": [finding._asdict() for finding in checked.findings],
    }
    page.write(
        output / "check-up.html",
        title=f"Check-up of {chosen.model} on {chosen.pairs}",
        verdict=checked.verdict,
        about=f"{len(pairs):,} held-out pairs. Intervals are 95 %. {LEVELS}",
        columns={"question": "question", "measured": "measured", "level": "verdict"},
        rows=result["findings"],
        pictures=pictures(checked),
    )
    with atomic_file(output / "check-up.json") as path:
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for finding in checked.findings:
        print(f"{finding.level:5}  {finding.question:45}  {finding.measured}")
    print(f"\n{checked.verdict}\nOpen next: {output / 'check-up.html'}")
    return 2 if checked.advice(STOP) else 0


if __name__ == "__main__":
    sys.exit(exits.run("check_reward_model.py", main))
