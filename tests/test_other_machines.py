"""What Windows lacks is not needed; nobody has tried the course there yet."""

from builders import python

from rlhf_course.course.presets import ROOT


def test_what_windows_lacks_is_not_imported():
    code = (
        "import psutil, sys; sys.modules |= dict.fromkeys(['resource', 'fcntl'])\n"
        "import rlhf_course, rlhf_course.course.run_card, rlhf_course.course.plots\n"
        "from rlhf_course import PPOTrainer"
    )
    done = python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
