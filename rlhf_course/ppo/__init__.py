"""Proximal policy optimisation for language models, with the classic stepwise API."""
