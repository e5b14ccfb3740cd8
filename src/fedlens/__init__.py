"""Fedlens."""
