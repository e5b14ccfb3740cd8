"""Which noise is in the sums of a tree, node by node: what `TreeNoise` must add up to."""

from fedlens.privacy.factorisation import Tree

Node = tuple[int, int, int]  # tree, level, place


def nodes_of(tree: Tree, rounds: int) -> set[Node]:
    """The nodes whose noise is in the sum of the first `rounds` rounds."""
    trees = [*range(0, rounds, tree.restart)]
    sizes = [min(tree.restart, rounds - start) for start in trees]
    return {
        (number, level, (size >> level) - 1)
        for number, size in enumerate(sizes)
        for level in range(size.bit_length())
        if size >> level & 1
    }


def weights_of(tree: Tree, round: int) -> dict[Node, int]:
    """The noise of round 0, 1, ... as a sum over nodes: new ones added, old ones taken away."""
    before, after = nodes_of(tree, round), nodes_of(tree, round + 1)
    return dict.fromkeys(sorted(after - before), 1) | dict.fromkeys(sorted(before - after), -1)
