"""Race this course's PPO loop against TRL 0.11.4's: sampling, scoring and the step, turn by turn.

    python dev/benchmark/against_trl.py --old_python OLD_PYTHON

OLD_PYTHON is the interpreter of an environment with TRL 0.11.4; tests/fixtures/make_fixtures.py
lists its packages. benchmark_ppo.py defines the loops. TRL samples responses one by one, as the
tutorials do, and then in one batch. A ratio is this course's seconds divided by TRL's.
"""

import argparse
import random
import sys

import benchmark_ppo
from against import Runner, race, report_turn

LOOPS = ("one-by-one", "batched")


def work(threads: int, is_batched: bool) -> None:
    """Take a turn for each line of stdin (name, seed) with the library of this interpreter."""
    import torch

    torch.set_num_threads(threads)
    options = ["--batched"] if is_batched else []
    loop = benchmark_ppo.make_loop(benchmark_ppo.parse_options(options))
    batch = benchmark_ppo.BATCH["tiny"]
    for line in sys.stdin:
        seed = int(line.split()[1])
        random.seed(seed)
        torch.manual_seed(seed)
        with report_turn(steps=1):
            benchmark_ppo.one_step(*loop, batch, benchmark_ppo.LENGTHS)


def main(arguments: list[str] | None = None) -> None:
    """Race this course's loop against both of TRL's."""
    parser = argparse.ArgumentParser(
        "against_trl.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--old_python", help="interpreter of an environment with TRL 0.11.4")
    add("--pairs", type=int, default=5, help="pairs of turns to measure for each loop")
    add("--threads", type=int, default=2, help="PyTorch threads")
    add("--work", choices=LOOPS, help=argparse.SUPPRESS)  # this process takes the steps
    chosen = parser.parse_args(arguments)
    if chosen.work is not None:
        work(chosen.threads, is_batched=chosen.work == "batched")
        return
    if chosen.old_python is None:
        parser.error("name the interpreter with TRL 0.11.4: --old_python PATH.")
    for loop in LOOPS:
        worker = ["-W", "ignore", __file__, "--threads", str(chosen.threads), "--work", loop]
        ours = Runner([sys.executable, *worker])
        theirs = Runner([chosen.old_python, *worker])
        race(loop, ours, theirs, chosen.pairs)
        ours.close()
        theirs.close()


if __name__ == "__main__":
    main()
