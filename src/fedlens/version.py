"""The version of Fedlens, which a run writes down."""

__version__ = "0.1.0"
