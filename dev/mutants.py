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
    M(
        "whitening: shift_mean inverted",
        "algorithm",
        "(white if shift_mean else white + mean)",
        "(white + mean if shift_mean else white)",
    ),
    M(
        "whitening leaks into padding",
        "algorithm",
        "else white + mean) * mask",
        "else white + mean)",
    ),
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
    M("GAE: running sum without gamma", "algorithm", "alpha=gamma * lam", "alpha=lam"),
    M(
        "GAE: a value after the end",
        "algorithm",
        "next_value = torch.zeros_like(running)",
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
        "score_scaling",
        "self.m2 / (self.count - 1)",
        "self.m2 / self.count",
    ),
    M(
        "accumulation: mini-batches weigh alike",
        "update",
        "/ sum(tokens)",
        "/ (count * len(tokens))",
    ),
    M(
        "early stopping at the target itself",
        "update",
        "1.5 * config.target_kl",
        "config.target_kl",
    ),
    M(
        "ratio threshold never skips",
        "update",
        "if ratio > config.ratio_threshold:",
        "if np.isinf(ratio):",
    ),
    M("value loss without its coefficient", "update", "config.vf_coef * vf", "vf"),
    M(
        "loss averaged over padding",
        "update",
        "(per_token * mask).sum() / tokens",
        "(per_token * mask).mean()",
    ),
    M("policykl: sign", "update", "part.logprobs - logprobs,", "logprobs - part.logprobs,"),
    M(
        "mini-batches in order",
        "update",
        "np.random.permutation(len(rollout))",
        "np.arange(len(rollout))",
    ),
    M("gradients never zeroed", "update", "optimizer.zero_grad()\n            some", "some"),
    M(
        "advantages not whitened",
        "update",
        "ppo.masked_whiten(advantages, mask, total=total)",
        "advantages",
    ),
    M("whitened rewards lose their mean", "update", "mask, False, total)", "mask, True, total)"),
    M("gamma and lambda swapped", "update", "config.gamma, config.lam", "config.lam, config.gamma"),
    M("old values keep their graph", "update", "values.detach() * mask", "values * mask"),
    M(
        "mask one token too long",
        "rollout",
        "lengths[1].max())) < lengths",
        "lengths[1].max())) <= lengths",
    ),
    M("response masks ignored", "rollout", "mask &= pad_sequence(", "_ = pad_sequence("),
    M("positions one too late", "rollout", "starts - 1 + column", "starts + column"),
    M("labels one too early", "rollout", "ids[:, 1:].flatten()", "ids[:, :-1].flatten()"),
    M("parts leave rows in sorted order", "rollout", "(rows.unsqueeze(1) *", "(number *"),
    M("suppressed at the second token", "rollout", "(column == 0)", "(column == 1)"),
    M("suppressed at every token", "rollout", "[:, token] = begins", "[:, token] = True"),
    M("EOS dropped", "sampling", "is_end.int().argmax(1) + 1", "is_end.int().argmax(1)"),
    M(
        "responses cut at the later end",
        "sampling",
        "torch.minimum(first_end.cpu(), limits)",
        "torch.maximum(first_end.cpu(), limits)",
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
    M("queries padded on the right", "sampling", 'padding_side="left"', 'padding_side="right"'),
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
        "checkpoint",
        'trainer.optimizer.load_state_dict(state["optimizer"])',
        "pass",
    ),
    M(
        "no generator restored",
        "checkpoint",
        '_set_random_state(state["random"]',
        '(state["random"]',
    ),
    M(
        "NumPy's generator not restored",
        "checkpoint",
        'np.random.set_state(state["numpy"])',
        "pass",
    ),
    M(
        "KL coefficient not restored",
        "checkpoint",
        'trainer.kl_ctl.value = state["kl_coef"]',
        "pass",
    ),
    M(
        "running moments not restored",
        "checkpoint",
        'vars(trainer.running).update(state["moments"])',
        "pass",
    ),
    M("schedule not restored", "checkpoint", "part.load_state_dict(state[name])", "pass"),
    M(
        "step one too many",
        "checkpoint",
        'trainer.current_step = state["step"]',
        'trainer.current_step = state["step"] + 1',
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
    M("scores over their variance", "score_scaling", "** 0.5 if self.count", "if self.count"),
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
