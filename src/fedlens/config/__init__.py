"""The description of a run: experiments, their keys and options, and what has a name."""
