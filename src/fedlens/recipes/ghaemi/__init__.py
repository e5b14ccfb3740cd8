"""Hafez Ghaemi's report on FedAvg, FedProx and LIADMM for Fashion-MNIST (Tehran, 2022)."""
