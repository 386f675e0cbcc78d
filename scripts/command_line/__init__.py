"""What the commands share: options, the output folder, and how a command ends."""
