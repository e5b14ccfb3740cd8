"""Hsu, Qi and Brown: federated visual classification with real-world data distribution, 2020."""
