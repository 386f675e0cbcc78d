"""Notebook 08 with its own ids at preset full, and with problems that no answer solves."""

import json
import math

import matplotlib as mpl
import pytest
import torch

from dev.simulated_hub import serve
from dev.simulated_hub.chat import verifiable_repositories
from rlhf_course.course.presets import ROOT
from rlhf_course.data.instructions import TRAINED
from rlhf_course.problems import instruction_problems, sums

SECTIONS_1_AND_2 = "imports settings verifiers load-problems load prompts-of respond score base"
SECTIONS_1_AND_2 += " loss loop train train-run"
FEW = {"steps": 2, "prompts": 2, "group": 2, "held_out": 4, "response_tokens": 8, "looks": 1}
SAMPLES = 12_000


def run(cells: list[str], parameters: dict, name: str = "08_verifiable_rewards") -> dict:
    """Run the named code cells of a notebook; return its variables."""
    mpl.use("agg")
    notebook = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text("utf-8"))
    code = {c["id"]: "".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"}
    names = {"__name__": "notebook", "seed": 0} | parameters
    for cell in cells:
        exec(compile(code[cell], f"cell {cell}", "exec"), names)
    return names


@pytest.fixture(scope="module")
def at_full(tmp_path_factory):
    """Return the variables after sections 1 and 2 at preset full."""
    folder = tmp_path_factory.mktemp("run")
    contents = verifiable_repositories(tmp_path_factory.mktemp("tokenizer"))
    parameters = {"preset": "full", "overrides": FEW, "output_dir": str(folder)}
    with serve(contents) as hub, pytest.MonkeyPatch.context() as patch:
        hub.use(patch, folder / "home")
        names = run(SECTIONS_1_AND_2.split(), parameters)
        hub.check(folder)
    return names


def test_full_reads_the_problems_and_writes_the_template(at_full):
    problem = at_full["held_out"][0]
    [prompt] = at_full["prompts_of"](at_full["policy"].tokenizer, [problem])
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>assistant\n")
    assert problem["question"] in prompt
    assert problem["answer"].isdigit()
    assert len(at_full["history"]) == FEW["steps"]


def test_samples_at_full_follow_the_scored_distribution(at_full):
    """The chi-square statistic of first tokens; rare tokens share one cell."""
    policy = at_full["policy"]
    problem = at_full["held_out"][0]
    torch.manual_seed(0)
    batch, _ = at_full["respond"](policy, [problem] * SAMPLES, tokens=1)
    first = batch.input_ids[:, -1]
    prompts = at_full["prompts_of"](policy.tokenizer, [problem])
    ids = policy.tokenizer(prompts, add_special_tokens=False, return_tensors="pt")
    with at_full["autocast"](), torch.no_grad():
        logits = policy.pretrained_model(**ids).logits[0, -1]
        scored = at_full["forward"](policy, batch.select(torch.arange(1)))[0]
    expected = SAMPLES * logits.float().softmax(-1)
    probability = expected[first[0]].item() / SAMPLES
    assert scored.item() == pytest.approx(math.log(probability), abs=0.05)
    counts = torch.bincount(first, minlength=len(expected)).float()
    common = expected >= 10
    in_cells = torch.cat([expected[common], expected[~common].sum(0, keepdim=True)])
    counted = torch.cat([counts[common], counts[~common].sum(0, keepdim=True)])
    used = in_cells > 0
    chi_square = ((counted - in_cells) ** 2 / in_cells)[used].sum().item()
    freedom = int(used.sum()) - 1
    # The statistic has mean `freedom` and variance 2 · `freedom`.
    assert freedom >= 5
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_problems_that_no_answer_solves_stop_no_section(tmp_path, capsys):
    """A file of one's own."""
    rows = [{"question": f"{i}+{i}=", "answer": "unknown"} for i in range(10, 30)]
    file = tmp_path / "problems.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    overrides = FEW | {"dataset": str(file), "prompts": 1, "pass_prompts": 2}
    parameters = {"preset": "scratch", "overrides": overrides, "output_dir": str(tmp_path)}
    sections_3_and_4 = "after parts right-of bases pass-at-k"
    names = run([*SECTIONS_1_AND_2.split(), *sections_3_and_4.split()], parameters)
    printed = capsys.readouterr().out
    assert "No group was live" in printed
    assert "easier problems, another model" in printed
    assert (names["passes"]["policy"] == 0).all()


def test_dynamic_sampling_draws_what_the_formula_says_if_few_groups_are_live(tmp_path):
    few = {"prompts": 1, "group": 2, "pass_prompts": 2, "draws": 4}
    parameters = {"preset": "tiny", "overrides": few, "output_dir": str(tmp_path)}
    cells = "imports settings pass-rates dynamic".split()
    names = run(cells, parameters, "deeper/rare_tokens")
    expected = 1 / names["live"]
    mean, half_width = names["drawn_groups"]
    assert abs(mean - expected) < 2 * half_width


def test_sums_have_their_digits_and_their_answers():
    problems = sums(200, 2, 5, seed=1)
    assert problems == sums(200, 2, 5, seed=1) != sums(200, 2, 5, seed=2)
    numbers = [problem["question"].removesuffix("=").split("+") for problem in problems]
    assert {len(a) for a, _ in numbers} == {2, 3, 4, 5}
    assert all(len(a) == len(b) for a, b in numbers)
    assert [int(a) + int(b) for a, b in numbers] == [int(p["answer"]) for p in problems]


def test_instructions_take_turns():
    problems = instruction_problems("test", TRAINED)
    names = [instruction.name for instruction in TRAINED]
    assert [problem["answer"] for problem in problems[:6]] == names * 2
    for problem, instruction in zip(problems, TRAINED, strict=False):
        assert problem["question"].endswith(f"? {instruction.words}")
