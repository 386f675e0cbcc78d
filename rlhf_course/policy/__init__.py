"""The policy: a value head, adapters, the reference, and how all of it is loaded and saved."""
