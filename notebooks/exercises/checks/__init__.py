"""What the exercises' engine uses: comparison, common mistakes, a time limit."""
