"""Uses of a trained model: to classify images, to test it on other data, and to export it."""
