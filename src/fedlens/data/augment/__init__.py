"""Augmentation of whole batches of images, between the data set and the model."""

from fedlens.data.augment.augment import Augment as Augment
