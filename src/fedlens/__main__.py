"""`python -m fedlens` is the command line."""

from fedlens.cli.main import main

main()
