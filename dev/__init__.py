"""Build the course's notebooks, models, exercises and tables. Students do not need this folder."""
