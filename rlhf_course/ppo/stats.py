"""Load the meaning of each statistic of a PPO step from stats.yaml."""

from pathlib import Path

import yaml

MEANING: dict[str, str] = yaml.safe_load(Path(__file__).with_name("stats.yaml").read_text("utf-8"))
