"""Provide the engine's parts: comparison, common mistakes, a time limit."""
