"""Files: written whole or not at all, read with care, locked while they are written."""
