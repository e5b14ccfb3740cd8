"""Which clients are asked to train in a round, which of them report, and when (virtual clock)."""
