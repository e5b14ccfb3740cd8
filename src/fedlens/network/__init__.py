"""Models as functions of parameters, buffers, images and keys, with fast implementations."""
