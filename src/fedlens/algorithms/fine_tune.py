"""Fine-tuning: FedAvg, and at the end each client tunes the final model on its own examples.

w_k = the final w after `epochs` passes of local training over the examples of client k (Yu et al.,
"Salvaging Federated Learning by Local Adaptation", 2020, arXiv:2002.04758). With no passes it would
be FedAvg.
"""

from dataclasses import replace

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.pieces import Tuned


@paper
def fine_tune(base: Algorithm, epochs: int = 5) -> Algorithm:
    """Let each client tune the final model.

    Args:
        epochs: passes over its examples at the end of the run.
    """
    at_least(epochs, 1, "fine-tune: epochs")
    return replace(base, personal=Tuned(epochs))
