"""The policy: a value head, adapters, the reference, loading and saving."""
