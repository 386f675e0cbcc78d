"""What Apple's GPUs and Windows lack, by pretending: none of it was tried on such a machine."""

import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from benchmark import benchmark_worker
from builders import make_samples, make_trainer, python
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_course.course import run_card
from rlhf_course.course.presets import ROOT
from rlhf_course.ppo import sampling
from rlhf_course.ppo.algorithm import RunningMoments

PEAK = pytest.mark.parametrize("peak_memory", [run_card.peak_memory, benchmark_worker.peak_memory])


class NoDoubles(TorchDispatchMode):
    """Refuses float64, as Apple's mps does."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **options or {})
        if isinstance(found, torch.Tensor) and found.dtype == torch.float64:
            raise TypeError("the MPS framework doesn't support float64")
        return found


class OnApple(torch.Tensor):
    """A tensor that must come to the host before it becomes float64."""

    def double(self):
        raise TypeError("the MPS framework doesn't support float64")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_apples_gpus_draw_tokens_in_float32_and_others_in_float64():
    assert sampling.finest_float(torch.device("mps")) == torch.float32
    assert {sampling.finest_float(torch.device(kind)) for kind in ("cpu", "cuda")} == {
        torch.float64
    }


def test_a_ppo_step_needs_no_float64_where_there_is_none(monkeypatch):
    trainer, (queries, _, scores) = make_trainer(score_clip=1.0), make_samples()
    with pytest.raises(TypeError, match="float64"), NoDoubles():
        trainer.generate(queries, do_sample=True, top_k=0, max_new_tokens=4)
    monkeypatch.setattr(sampling, "finest_float", lambda device: torch.float32)
    with NoDoubles():
        responses = trainer.generate(
            queries, do_sample=True, top_k=0, max_new_tokens=4, return_prompt=False
        )
        stats = trainer.step(queries, responses, scores)
    assert all(0 <= int(token) < 40 for response in responses for token in response)
    assert stats["objective/kl"] == pytest.approx(0, abs=1e-5)


def test_scores_are_averaged_on_the_host():
    scores, moments = torch.tensor([1.0, 2.0, 6.0]), RunningMoments()
    moments.update(scores.as_subclass(OnApple))
    assert (moments.mean, moments.std) == pytest.approx((3, scores.std().item()))


@PEAK
def test_peak_memory_is_in_bytes(peak_memory):
    now = psutil.Process().memory_info().rss
    assert 0.9 * now < peak_memory() < psutil.virtual_memory().total and peak_memory() < 20 * now


@PEAK
def test_macos_counts_peak_memory_in_bytes(peak_memory, monkeypatch):
    there = SimpleNamespace(
        RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_maxrss=3_000_000_000)
    )
    monkeypatch.setitem(sys.modules, "resource", there)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_memory() == 3_000_000_000


@PEAK
def test_windows_is_asked_through_psutil(peak_memory, monkeypatch):
    memory = SimpleNamespace(rss=1, peak_wset=3_000_000_000)
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: memory))
    assert peak_memory() == 3_000_000_000


def test_what_windows_lacks_is_not_imported():
    code = (
        "import psutil, sys; sys.modules['resource'] = None; sys.path.insert(0, 'scripts')\n"
        "import rlhf_course, rlhf_course.course.run_card, rlhf_course.worlds.build, "
        "rlhf_course.course.plots, benchmark.benchmark_worker"
    )
    done = python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
