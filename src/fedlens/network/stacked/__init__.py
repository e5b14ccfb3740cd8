"""A model of many clients at once: it is traced, and each layer is one batched product."""
