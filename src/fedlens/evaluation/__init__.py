"""How good models are: metrics, on whole data sets and by client, with their intervals."""
