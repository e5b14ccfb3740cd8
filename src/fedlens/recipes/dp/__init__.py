"""Published accuracies under differential privacy, and what it costs the four papers' methods."""
