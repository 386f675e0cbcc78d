"""Plant sixty mistakes in PPO's core, one at a time, and record which ones the tests notice.

    python dev/mutants.py [--only NAME] [--record FILE]

Each mistake is made in a copy of the checkout, where pytest stops at the first failing test: that
test kills the mutant. A mutant that no test kills survives. FILE (default: build/mutants.json)
records the test that kills each mutant, or "survived"; recorded mutants are not run again.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600  # until pytest is stopped; there is no verdict then
# Quickest first, as pytest stops at the first failure; a file that does not exist is left out.
FILES = "algorithm checkpoint detectors fixtures inputs deviations fast_path trainer "
FILES += "numbers classic_tutorial scripts"
COPIED = "rlhf_course", "tests", "scripts"


class Mutant(NamedTuple):
    """A mistake: ``old``, which occurs once in ``rlhf_course/ppo/{file}.py``, becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


M = Mutant
MUTANTS = [
    M("mean over padding too", "algorithm", "/ total(mask.sum())", "/ mask.numel()"),
    M("biased variance", "algorithm", "n / (n - 1).clamp(min=1)", "n / n"),
    M("whitening: shift_mean inverted", "algorithm", "if not shift_mean:", "if shift_mean:"),
    M("whitening leaks into padding", "algorithm", "return white * mask", "return white"),
    M("KL reversed", "algorithm", "= logprobs - ref_logprobs", "= ref_logprobs - logprobs"),
    M(
        "mse penalty without the half",
        "algorithm",
        "0.5 * difference.square()",
        "difference.square()",
    ),
    M("full KL under the reference", "algorithm", "(logprobs.exp() *", "(ref_logprobs.exp() *"),
    M("KL as a bonus", "algorithm", "-kl_coef * kl * mask", "kl_coef * kl * mask"),
    M(
        "score at the number of tokens, holes ignored",
        "algorithm",
        "mask.shape[1] - 1 - mask.flip(1).argmax(1)",
        "mask.sum(1).long() - 1",
    ),
    M("GAE: next value times lambda", "algorithm", "gamma * next_value -", "lam * next_value -"),
    M(
        "GAE: running sum without gamma",
        "algorithm",
        "gamma * lam * next_advantage",
        "lam * next_advantage",
    ),
    M(
        "GAE: a value after the end",
        "algorithm",
        "next_value = torch.zeros_like(values[:, 0])",
        "next_value = values[:, -1]",
    ),
    M(
        "returns without values",
        "algorithm",
        "advantages, advantages + values",
        "advantages, advantages",
    ),
    M(
        "policy loss: minimum",
        "algorithm",
        "torch.maximum(unclipped, clipped), ratio,",
        "torch.minimum(unclipped, clipped), ratio,",
    ),
    M(
        "upper clip bound 1 / (1 - e)",
        "algorithm",
        "1 - cliprange, 1 + cliprange)\n    return",
        "1 - cliprange, 1 / (1 - cliprange))\n    return",
    ),
    M(
        "values clipped around returns",
        "algorithm",
        "old_values + cliprange",
        "returns + cliprange",
    ),
    M("KL controller: sign", "algorithm", "current / self.target - 1", "1 - current / self.target"),
    M("KL controller: per step, not sample", "algorithm", "error * n_steps /", "error /"),
    M(
        "running moments: biased",
        "algorithm",
        "self.squares / (self.count - 1)",
        "self.squares / self.count",
    ),
    M("accumulation: mini-batches weigh alike", "update", "count / sum(counts)", "1 / len(counts)"),
    M(
        "early stopping at the target itself",
        "update",
        "1.5 * config.target_kl",
        "config.target_kl",
    ),
    M(
        "ratio threshold never skips",
        "update",
        "if not ratio > config.ratio_threshold:",
        "if not np.isinf(ratio):",
    ),
    M("value loss without its coefficient", "update", "config.vf_coef * value_loss", "value_loss"),
    M(
        "loss averaged over padding",
        "update",
        "(per_token * mask).sum() / tokens",
        "(per_token * mask).mean()",
    ),
    M(
        "policykl: sign",
        "update",
        "experience.logprobs - outputs.logprobs,",
        "outputs.logprobs - experience.logprobs,",
    ),
    M(
        "mini-batches in order",
        "update",
        "np.random.permutation(len(samples))",
        "np.arange(len(samples))",
    ),
    M(
        "gradients never zeroed",
        "update",
        "optimizer.zero_grad()\n            accumulated",
        "accumulated",
    ),
    M(
        "advantages not whitened",
        "update",
        "ppo.masked_whiten(advantages, mask, total=total)",
        "advantages",
    ),
    M(
        "whitened rewards lose their mean",
        "update",
        "shift_mean=False, total",
        "shift_mean=True, total",
    ),
    M(
        "gamma and lambda swapped",
        "update",
        "gamma=config.gamma, lam=config.lam",
        "gamma=config.lam, lam=config.gamma",
    ),
    M("old values keep their graph", "update", "values.detach() * mask", "values * mask"),
    M(
        "mask one token too long",
        "rollout",
        "response_lengths.max())) < response",
        "response_lengths.max())) <= response",
    ),
    M("response masks ignored", "rollout", "mask &= pad_sequence(", "_ = pad_sequence("),
    M(
        "positions one too late",
        "rollout",
        "torch.arange(1, ids.shape[1])",
        "torch.arange(ids.shape[1] - 1)",
    ),
    M("labels one too early", "rollout", "ids[:, 1:][predicts]", "ids[:, :-1][predicts]"),
    M("parts leave rows in sorted order", "rollout", "row = order[place]", "row = place"),
    M(
        "suppressed at the second token",
        "rollout",
        "begins = next_column == starts",
        "begins = next_column == starts + 1",
    ),
    M("suppressed at every token", "rollout", "[:, token] = begins", "[:, token] = True"),
    M("EOS dropped", "sampling", "is_end.int().argmax(1) + 1", "is_end.int().argmax(1)"),
    M(
        "responses cut at the later end",
        "sampling",
        "torch.minimum(first_end, limits)",
        "torch.maximum(first_end, limits)",
    ),
    M(
        "positions count left padding",
        "sampling",
        "(attention_mask.cumsum(1) - 1)",
        "(torch.ones_like(attention_mask).cumsum(1) - 1)",
    ),
    M(
        "sampling suppresses every token",
        "sampling",
        "begin_suppress if t == 0 else ()",
        "begin_suppress",
    ),
    M(
        "one random number for all rows",
        "sampling",
        "torch.rand(len(logits), 1,",
        "torch.rand(1, 1,",
    ),
    M("positions stand still", "sampling", "positions[:, -1:] + 1", "positions[:, -1:]"),
    M("new tokens are not seen", "sampling", "(0, longest), value=1", "(0, longest), value=0"),
    M(
        "queries padded on the right",
        "sampling",
        'settings["pad_token_id"], padding_side="left"',
        'settings["pad_token_id"], padding_side="right"',
    ),
    M(
        "rows that go on written elsewhere",
        "sampling",
        "responses[rows, t]",
        "responses[: len(rows), t]",
    ),
    M(
        "further EOS of chat models ignored",
        "sampling",
        'getattr(saved, "eos_token_id", None) or model',
        "model",
    ),
    M(
        "optimizer not restored",
        "trainer",
        'self.optimizer.load_state_dict(state["optimizer"])',
        "pass",
    ),
    M(
        "no generator restored",
        "checkpoint",
        '    set_random_state(state["random"]',
        '    (state["random"]',
    ),
    M(
        "NumPy's generator not restored",
        "checkpoint",
        'np.random.set_state(state["numpy"])',
        "pass",
    ),
    M("KL coefficient not restored", "trainer", 'self.kl_ctl.value = state["kl_coef"]', "pass"),
    M(
        "running moments not restored",
        "trainer",
        'vars(self.running).update(state["moments"])',
        "pass",
    ),
    M(
        "schedule not restored",
        "trainer",
        'self.lr_scheduler.load_state_dict(state["schedule"])',
        "pass",
    ),
    M(
        "step one too many",
        "trainer",
        'self.current_step = state["step"]',
        'self.current_step = state["step"] + 1',
    ),
    M(
        "older checkpoints stay, the new one goes",
        "checkpoint",
        "trainer.checkpoints.pop(0)",
        "trainer.checkpoints.pop()",
    ),
    M(
        "ratio inverted",
        "algorithm",
        "exp(logprobs - old_logprobs)",
        "exp(old_logprobs - logprobs)",
    ),
    M(
        "value loss: minimum",
        "algorithm",
        "0.5 * torch.maximum(unclipped, clipped)",
        "0.5 * torch.minimum(unclipped, clipped)",
    ),
    M("scores over their variance", "algorithm", "** 0.5 if self.count", "if self.count"),
    M(
        "dropout stays on",
        "trainer",
        "without_dropout(self.model, checkpointing=True)",
        "nullcontext()",
    ),
]


def mutated(mutant: Mutant) -> str:
    """The text of the file with the mistake; raises ``SystemExit`` unless it can be made once."""
    text = (ROOT / f"rlhf_course/ppo/{mutant.file}.py").read_text()
    if (times := text.count(mutant.old)) != 1:
        sys.exit(f"Mutant '{mutant.name}': its old text occurs {times} times in {mutant.file}.py.")
    text = text.replace(mutant.old, mutant.new)
    compile(text, f"{mutant.file}.py", "exec")  # a syntax error would be no mistake to notice
    return text


def copy_course(folder: Path) -> None:
    """The code and its tests in ``folder``, with links to all else."""
    for path in ROOT.iterdir():
        if path.name in COPIED:
            ignore = shutil.ignore_patterns("__pycache__", "fixtures")
            shutil.copytree(path, folder / path.name, ignore=ignore)
        elif path.name not in (".git", "build"):
            (folder / path.name).symlink_to(path)
    (folder / "tests/fixtures").symlink_to(ROOT / "tests/fixtures")


def verdict(mutant: Mutant | None) -> str:
    """The test that fails with this mistake, "survived", or why there is no verdict."""
    names = [f"tests/test_{name}.py" for name in FILES.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [name for name in names if (ROOT / name).exists()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copy_course(folder)
        if mutant:
            (folder / f"rlhf_course/ppo/{mutant.file}.py").write_text(mutated(mutant))
        env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"no verdict: pytest took more than {SECONDS} s"
    failed = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", done.stdout, re.M)
    if done.returncode == 1 and failed:
        return failed[1]
    last = (done.stdout + done.stderr).strip()[-300:]
    return f"no verdict: status {done.returncode}: {last}" if done.returncode else "survived"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", help="one mutant")
    parser.add_argument("--record", metavar="FILE", type=Path, default=ROOT / "build/mutants.json")
    options = parser.parse_args()
    for mutant in MUTANTS:
        mutated(mutant)
    if options.only and options.only not in [mutant.name for mutant in MUTANTS]:
        sys.exit(f"There is no mutant '{options.only}'.")
    verdicts = json.loads(options.record.read_text()) if options.record.exists() else {}
    verdicts = {
        name: result for name, result in verdicts.items() if not result.startswith("no verdict")
    }
    chosen = [m for m in MUTANTS if options.only in (None, m.name) and m.name not in verdicts]
    if chosen and (sound := verdict(None)) != "survived":
        sys.exit(f"Without a mutant the tests fail already: {sound}")
    for mutant in chosen:
        started = time.time()
        verdicts[mutant.name] = verdict(mutant)
        options.record.parent.mkdir(exist_ok=True)
        options.record.write_text(json.dumps(verdicts, indent=1, sort_keys=True) + "\n")
        print(f"{time.time() - started:5.0f} s  {mutant.name}: {verdicts[mutant.name]}", flush=True)
    shown = [m for m in MUTANTS if m.name in verdicts]
    for mutant in shown:
        print(f"{mutant.file:10}  {mutant.name:45}  {verdicts[mutant.name].splitlines()[0]}")
    killed = sum("::" in verdicts[m.name].partition("no verdict")[0] for m in shown)
    print(f"{killed} of {len(shown)} mutants killed")


if __name__ == "__main__":
    main()
