"""Zhuo and Li: FedNS, ICIP 2021."""
