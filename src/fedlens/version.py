"""The version of Fedlens, which every run records."""

__version__ = "0.1.0"
