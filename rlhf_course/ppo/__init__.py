"""Proximal policy optimization for language models, with the classic stepwise API."""
