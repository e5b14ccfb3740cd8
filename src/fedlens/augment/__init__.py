"""What happens to a whole batch of images between the data set and the model."""

from fedlens.augment.augment import Augment as Augment
