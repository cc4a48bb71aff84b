"""The tree of completions on which claims are enumerated."""

from kl_comedy.kl.oracle import Tree

TREE = Tree.build(vocabulary=3, length=4)
