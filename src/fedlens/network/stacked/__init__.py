"""A model of many clients at once: it is read layer by layer, and each layer is one product."""
