"""A trained model in use: it classifies images, is tested on other data, and is exported."""
