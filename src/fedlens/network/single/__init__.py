"""Layers that save work where one client trains at a time, on a CPU."""
