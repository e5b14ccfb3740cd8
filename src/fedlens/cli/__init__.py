"""The command line, roughly one file per command."""
