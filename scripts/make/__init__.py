"""What makes the course: its notebooks, models, exercises and tables. Students need none of it."""
