"""A run: rounds, evaluation, records, checkpoints, and the run folder that holds them."""
