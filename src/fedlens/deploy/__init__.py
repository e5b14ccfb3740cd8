"""Taking a model away: to ask it about images, to test it elsewhere, to run it without Fedlens."""
