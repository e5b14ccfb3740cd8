"""A model for each client: published boards, and where it is worth it to federate."""
