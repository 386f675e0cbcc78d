"""Train language models with PPO through the classic stepwise API."""
