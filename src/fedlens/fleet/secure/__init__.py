"""Sums that a server cannot look behind: a protocol between sites and their server."""
