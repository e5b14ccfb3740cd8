"""`python -m fedlens` is the command line."""

from fedlens.cli import main

main()
