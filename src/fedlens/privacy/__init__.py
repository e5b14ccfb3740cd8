"""Differential privacy: what was released, what it costs, and the noise that is added."""
