"""Faster layers for training one client at a time on a CPU."""
