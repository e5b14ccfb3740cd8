"""Augmentation of whole batches of images, between the data set and the model."""

from fedlens.augment.augment import Augment as Augment
