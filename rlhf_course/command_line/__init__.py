"""Provide code that commands share: options, output folders, exit codes."""
