"""How long a PPO step takes, here and in the old library."""
