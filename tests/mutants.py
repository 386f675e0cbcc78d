"""Sixty mistakes in PPO's core, one at a time: which of them do the tests notice?

    python tests/mutants.py [--only NAME] [--files FILE ...] [--jobs N]

Each mistake goes into a copy of the package, where pytest runs FILES until a test fails. A mutant
is killed by a failing test or by a timeout. Results go to build/mutants.json; a mutant recorded
there as killed, or as survivor of the same files, is not run again.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "build/mutants.json"
SECONDS = 240  # until a mutant counts as killed by time
# Quickest first: pytest stops at the first failure.
FILES = "algorithm numbers checkpoint detectors deviations fixtures fast_path inputs trainer"

PRELOADED = "accelerate", "datasets", "peft", "transformers"  # once for all forks


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
        "GAE: values of padding count",
        "algorithm",
        "values, counts = values * mask, mask > 0",
        "values, counts = values, mask >= 0",
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
    M("running moments: biased", "algorithm", "self.m2 / (self.count - 1)", "self.m2 / self.count"),
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
    M("ratio threshold never skips", "update", "ratio > config.ratio_threshold", "ratio < 0"),
    M("value loss without its coefficient", "update", "config.vf_coef * vf", "vf"),
    M(
        "loss averaged over padding",
        "update",
        "(per_token * mask).sum() / tokens",
        "(per_token * mask).mean()",
    ),
    M(
        "policykl: sign",
        "update",
        '"policy/policykl": part.logprobs - logprobs',
        '"policy/policykl": logprobs - part.logprobs',
    ),
    M(
        "mini-batches in order",
        "update",
        "np.random.permutation(len(rollout))",
        "np.arange(len(rollout))",
    ),
    M(
        "gradients never zeroed",
        "update",
        "            optimizer.zero_grad()\n            some",
        "            some",
    ),
    M(
        "advantages not whitened",
        "update",
        "ppo.masked_whiten(advantages, mask, total=total)",
        "advantages",
    ),
    M("whitened rewards lose their mean", "update", "shift_mean=False", "shift_mean=True"),
    M("gamma and lambda swapped", "update", "config.gamma, config.lam", "config.lam, config.gamma"),
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
        "(first + self.query_lengths - 1)",
        "(first + self.query_lengths)",
    ),
    M(
        "labels one too early",
        "rollout",
        "(self.query_lengths.unsqueeze(1) + response_column)",
        "(self.query_lengths.unsqueeze(1) + response_column - 1)",
    ),
    M(
        "packed: positions do not restart",
        "rollout",
        "fill(column, 0)",
        "torch.arange(width).repeat(rows, 1)",
    ),
    M(
        "packed: samples see their neighbors",
        "rollout",
        "same = sample.unsqueeze(1) == sample.unsqueeze(2)",
        "same = torch.ones(rows, width, width, dtype=torch.bool)",
    ),
    M(
        "packed: samples see their future",
        "rollout",
        "same.tril().unsqueeze(1)",
        "same.unsqueeze(1)",
    ),
    M(
        "packed: a row one token too full",
        "rollout",
        "left >= lengths[sample]",
        "left >= lengths[sample] - 1",
    ),
    M("chunks leave rows in sorted order", "rollout", "rows.to(place.device)[row] *", "row *"),
    M(
        "suppressed at the second token",
        "rollout",
        "% part.mask.shape[1] == 0",
        "% part.mask.shape[1] == 1",
    ),
    M("suppressed at every token", "rollout", "begins.unsqueeze(1)", "True"),
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
    M(
        "longest length included",
        "../data/lengths",
        "range(min_value, max_value)",
        "range(min_value, max_value + 1)",
    ),
    M(
        "rows that go on written elsewhere",
        "sampling",
        "responses[rows, t], total",
        "responses[: len(rows), t], total",
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
        'trainer.kl_ctl.value, trainer.current_step = state["kl_coef"],',
        "trainer.current_step =",
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
        'state["kl_coef"], state["step"]',
        'state["kl_coef"], state["step"] + 1',
    ),
    M(
        "older checkpoints stay, the new one goes",
        "checkpoint",
        "trainer.checkpoints.pop(0)",
        "trainer.checkpoints.pop()",
    ),
]


def copy_of_course(mutant: Mutant | None, folder: Path) -> None:
    """The package and its tests in ``folder``, with the mistake; links to all else."""
    for path in ROOT.iterdir():
        if path.name in ("rlhf_course", "tests"):
            ignore = shutil.ignore_patterns("__pycache__")  # its dates do not tell mutants apart
            shutil.copytree(path, folder / path.name, ignore=ignore)
        elif path.name not in (".git", "build"):
            (folder / path.name).symlink_to(path)
    if mutant:
        path = folder / "rlhf_course/ppo" / f"{mutant.file}.py"
        text = path.read_text().replace(mutant.old, mutant.new)
        compile(text, mutant.file, "exec")
        path.write_text(text)


def pytest_in_fork(folder: Path, files: list[str]) -> tuple[int, str]:
    """Exit status (negative: signal) and output of ``pytest -x`` in a copy of the course.

    The process is a fork of this one, which has imported torch and transformers: that saves six
    seconds per mutant.
    """
    log = folder / "log"
    if (child := os.fork()) == 0:
        signal.alarm(SECONDS)
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode, sys.path[:0] = True, [str(folder), str(folder / "tests")]
        import pytest

        names = [f"tests/test_{file}.py" for file in files]
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *names]))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, log.read_text()


def examine(mutant: Mutant | None, files: list[str]) -> dict:
    """Who killed the mutant, or None; and the seconds that it took."""
    started = time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copy_of_course(mutant, folder)
        status, output = pytest_in_fork(folder, files)
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", output, re.M)
    killer = failed[1] if failed else f"status {status}: {output[-300:]}"
    killer = "timeout" if status == -signal.SIGALRM else killer if status else None
    return {"killed_by": killer, "files": files, "seconds": round(time.time() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="name of one mutant")
    parser.add_argument("--files", nargs="+", default=FILES.split(), help="tests/test_FILE.py")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    for mutant in MUTANTS:
        times = (ROOT / f"rlhf_course/ppo/{mutant.file}.py").read_text().count(mutant.old)
        if times != 1:
            sys.exit(f"Mutant '{mutant.name}': its old text occurs {times} times in {mutant.file}.")
    for module in PRELOADED:
        importlib.import_module(module)
    if sound := examine(None, options.files)["killed_by"]:
        sys.exit(f"Without a mutant the tests fail already: {sound}")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}

    def is_open(mutant: Mutant) -> bool:
        seen = record.get(mutant.name, {"killed_by": None, "files": []})
        return not seen["killed_by"] and not set(options.files) <= set(seen["files"])

    def run(mutant: Mutant) -> None:
        result = examine(mutant, options.files)
        result["files"] += record.get(mutant.name, {}).get("files", [])
        record[mutant.name] = result
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True))
        print(f"{result['seconds']:6.1f} s  {mutant.name}: {result['killed_by']}", flush=True)

    chosen = [m for m in MUTANTS if options.only in (None, m.name) and is_open(m)]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, chosen))
    survivors = [m for m in MUTANTS if m.name in record and not record[m.name]["killed_by"]]
    for mutant in survivors:
        print(f"survived: {mutant.file}: {mutant.name}")
    print(f"{len(record) - len(survivors)} of {len(record)} mutants killed")


if __name__ == "__main__":
    main()
