"""What the notebooks share: presets, run cards, plots."""
