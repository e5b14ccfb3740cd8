"""A module as a function of parameters, buffers, images and keys, and what makes it fast."""
