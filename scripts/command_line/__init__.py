"""Code that the commands share: options, the output folder, exit codes."""
