"""Define the policy's value head, adapters and reference; load and save policies."""
