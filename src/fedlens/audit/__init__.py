"""What an attacker learns from a run: the claim of privacy, measured."""
