"""A Ray cluster of the tests' own; the fixture `ray` of conftest.py starts one."""

import os

import pytest

LONG = bool(os.environ.get("FEDLENS_RAY"))  # as `make test-ray` has it

# Ray itself leaves files and processes to be collected.
RAY_MARKS = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
