"""Steps, and the images that each is shown."""

import torch

from fedlens.core.federation import Examples
from fedlens.rounds.client import StepInput, each_step


def some_steps(clients: int, steps: int, batch: int) -> StepInput:
    """Steps whose numbers tell client, step and place."""
    chosen = torch.arange(clients * steps * batch).view(clients, steps, batch)
    each = torch.arange(clients * steps).view(clients, steps)
    rest = dict.fromkeys(("counts", "dropout_keys", "augment_keys", "ones"), each)
    return StepInput(chosen, labels=chosen, mask=chosen, step=torch.arange(steps), **rest)


def test_images_are_the_same_however_many_steps_are_read_at_once():
    now = some_steps(clients=3, steps=5, batch=2)
    images = torch.randint(256, (30, 6, 5, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    examples = Examples(images, torch.zeros(30, dtype=torch.int64))
    for at_once in (1, 2, 5, 7, None):
        read = list(each_step(examples, now, lambda some: some.float() / 255, at_once))
        assert len(read) == 5
        for number, (one, shown) in enumerate(read):
            assert int(one.step) == number
            assert torch.equal(one.chosen, now.chosen[:, number])
            assert torch.equal(one.counts, now.counts[:, number])
            assert torch.equal(shown, images[one.chosen] / 255)


def test_images_that_nobody_prepares_are_shown_as_they_are():
    now = some_steps(clients=2, steps=3, batch=1)
    images = torch.randint(256, (6, 1, 4, 4), dtype=torch.uint8)
    examples = Examples(images, torch.zeros(6, dtype=torch.int64))
    for one, shown in each_step(examples, now, at_once=2):
        assert shown.dtype is torch.uint8 and torch.equal(shown, images[one.chosen])
