"""Baichuan-7B checkpoints: converted to a native Llama, and made at toy size."""
