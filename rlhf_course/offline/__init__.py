"""The embedded world: texts, models and gold rewards made by code, for running without network or GPU."""
