"""Practice 5 to 8: references pass, lazy answers fail, notebooks run."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import practice5 as p5
import practice6 as p6
import practice7 as p7
import practice8 as p8
import pytest
import torch

from rlhf_course.course.presets import ROOT
from rlhf_course.ppo.algorithm import gae

FOLDER = ROOT / "notebooks" / "practice"


def test_5_stop_in_time():
    lazy = [lambda h, n=n: len(h["kl"]) > n for n in (0, 30, 99)]
    lazy += [lambda h: h["proxy"][-1] > 1]
    assert p5.check(lambda h: h["repeats"][-1] > h["repeats"][0] + 0.2, 0)
    assert not any(p5.check(stop, 0) for stop in lazy)
    assert np.diff(p5.make_runs(1)["proxy"]).min() > -1e-9  # the proxy never falls


def test_6_predict_then_run(tmp_path, monkeypatch, capsys):
    base, after = [2, 2, 0.1, 1, 0.1], [0.5, 0.6, 0, 1.5, 0.2]
    noise = np.random.default_rng(0).normal(0, 0.01, (4, 12, 5))
    monkeypatch.setattr(p6, "runs", lambda seed, x: noise + (after if x else base))
    good = dict(zip(p6.STATS, [0.4, 1, 0, 1.4, 0.2], strict=True))
    late, (file, card) = good | {p6.STATS[0]: 0.5}, p6.files(0, tmp_path)
    assert not p6.check(good, 0, tmp_path)
    p6.commit(good, 0, tmp_path)
    assert not p6.check(late, 0, tmp_path) and not card.exists()
    assert p6.check(good, 0, tmp_path) and p6.check(good, 0, tmp_path)
    p6.commit(late, 0, tmp_path)
    assert not p6.check(late, 0, tmp_path)
    file.write_text(json.dumps({"sha256": p6.digest(late, 0)}))
    assert not p6.check(late, 0, tmp_path)
    assert "Another commitment" in capsys.readouterr().out
    for factor in (0, 0.5, 1, 2):  # nothing, all down, all the same, all up
        lazy = {name: factor * x for name, x in zip(good, base, strict=True)}
        assert not p6.score(lazy, p6.read_json(card)["metrics"])


def ppo_step(b, f):
    c, mask = b.config, f.response_mask(b.response_ids, b.lengths, b.pad)
    seen = torch.cat([b.query_mask, mask.long()], 1)
    where = b, seen, f.position_ids(seen)
    with torch.no_grad():
        (old, v), (ref, _) = (p7.run_network(x, *where) for x in (b.network, b.reference))
    v, kl, losses = v * mask, (old - ref) * mask, []

    def mean(x):
        return (x * mask).sum() / mask.sum()

    rewards = f.token_rewards(b.scores, kl, mask, b.beta)
    advantages, returns = gae(rewards, v, mask, c.gamma, c.lam)
    white = f.whiten(advantages, mask)
    for _ in range(c.ppo_epochs):
        new, values = p7.run_network(b.network, *where)
        pg = f.policy_loss(new, old, white, mask, c.cliprange)
        vf = mean(f.value_loss(values, v, returns, c.cliprange_value))
        b.optimizer.zero_grad()
        (pg + c.vf_coef * vf).backward()
        b.optimizer.step()
        losses.append([pg.item(), vf.item()])
    kl = kl.sum(1).mean().item()
    beta = f.next_beta(b.beta, kl, c.target, len(b.scores), c.horizon)
    found = kl, mean(returns), *np.mean(losses, 0), beta
    return dict(zip(p7.STATS, found, strict=True))


def test_7_assemble(capsys):
    made, zeros = p7.SET.exercises, dict.fromkeys(p7.STATS, 0.0)
    right = {name: made[name].solution for name in p7.NAMES}
    assert p7.check(ppo_step, SimpleNamespace(**right))
    two = {"position_ids": "column_numbers", "whiten": "wrong_divisor"}
    for mistakes in ({"next_beta": "not_clipped"}, two):
        mine = dict(right)
        for name, mistake in mistakes.items():
            _, formula, *_ = made[name].mistakes[mistake]
            mine[name] = formula
        assert not p7.check(ppo_step, SimpleNamespace(**mine))
        assert capsys.readouterr().out.endswith(f"Wrong: {', '.join(mistakes)}.\n")
    lazy = [lambda b, f: zeros, lambda b, f: ppo_step(copy.deepcopy(b), f)]
    lazy += [lambda b, f: setattr(b.config, "ppo_epochs", 1) or ppo_step(b, f)]
    for step in lazy:
        assert not p7.check(step, SimpleNamespace(**right))
        assert "Check ppo_step" in capsys.readouterr().out


def test_8_is_grpo_better():
    def paired(ppo, grpo, t=None):
        gap, n = grpo - ppo, len(ppo)
        width = (t or p8.t_quantile(0.975, n - 1)) * gap.std(ddof=1) / n**0.5
        return gap.mean() - width, gap.mean() + width

    six = range(6), range(6)
    assert all(p8.check(six, paired, seed) for seed in range(3))
    bold = (six, lambda a, b: paired(a, b, 1.96)), (([0] * 6,) * 2, paired)
    wide = (six, lambda a, b: (-9, 9)), (([0, 1],) * 2, paired)
    assert not any(p8.check(*lazy, 0) for lazy in (*bold, *wide))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[5-8]_*.ipynb")), ids=lambda p: p.stem)
def test_an_unsolved_notebook_runs(path, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("predict_runs.STEPS", "predict_runs.RUNS", "practice6.STEPS"):
        monkeypatch.setattr(name, 2)
    names, cells = {}, json.loads(path.read_text(encoding="utf-8"))["cells"]
    for cell in (x for x in cells if x["cell_type"] == "code"):
        exec("".join(cell["source"]), names)
    said = capsys.readouterr().out
    assert "✘" in said and "✔" not in said
