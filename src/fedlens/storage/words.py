"""Numbers of things, in words."""


def count_of(count: int, one: str) -> str:
    """`1 client`, `25 clients`: a number, and what there are so many of."""
    return f"{count:,} {one}{'' if count == 1 else 's'}"
