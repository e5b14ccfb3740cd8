"""A run: rounds, evaluation, record, checkpoint, and the folder that all of it is kept in."""
