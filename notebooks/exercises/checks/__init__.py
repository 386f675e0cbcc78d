"""Parts of the exercises' engine: comparison, common mistakes, a time limit."""
