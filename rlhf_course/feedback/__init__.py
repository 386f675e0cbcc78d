"""Ask people to compare texts, and learn their taste from the answers (notebook 09)."""
