"""What a step of a TorchRL env takes, as action leaves of the engine.

Knows TorchRL's specs and trees of leaves. Does not know envs or the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.adapters.torchrl_trees import Branch, Leaf, leaves_of, tree_of
from shoal.engine.spec import ArraySpec, LeafPath, LeafSpec, ObjectSpec
from shoal.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["GIVEN", "NEXT", "OTHERS", "STEP_MASK", "Inputs"]

GIVEN = ("<given>",)
"""An action leaf: which states, then which entries of ``next``, the caller gave. Bits."""
STEP_MASK = ("<step>",)
"""An action leaf of envs with a batch of their own: which of it to step."""
OTHERS = ("<others>",)
"""An action leaf, mostly absent: entries that do not fit their specs, as they came."""
NEXT = "<next>"
"""First key of the action leaves that were found in ``next``."""

_MAX_BITS = 63


class Inputs:
    """What a step of one env takes, read off its specs.

    Attributes:
        actions: the tree of the actions, all of which have to be given.
        states: the tree of the states; the env knows those that are not given.
        following: the tree of states that the env returns too, so that a policy may have
            put them into ``next``.
        has_mask: the env has a batch, part of which may be stepped.
        leaves: all of it as action leaves of the engine.
    """

    def __init__(self, specs: Mapping[Any, Any], batch_size: torch.Size) -> None:
        inputs, outputs = specs["input_spec"], specs["output_spec"]
        self.actions = tree_of(inputs["full_action_spec"])
        self.states = tree_of(inputs["full_state_spec"])
        returned = {leaf.path for leaf in leaves_of(tree_of(outputs["full_observation_spec"]))}
        self.following = _only(self.states, returned)
        self.has_mask = bool(batch_size)
        self.state_leaves = list(leaves_of(self.states))
        self.next_leaves = list(leaves_of(self.following))
        self.leaves: dict[LeafPath, LeafSpec] = {
            leaf.path: leaf.spec for leaf in leaves_of(self.actions)
        }
        self.action_leaves = list(leaves_of(self.actions))
        # A state may be an action, too: then it has been given.
        self.state_leaves = [leaf for leaf in self.state_leaves if leaf.path not in self.leaves]
        self.states = _only(self.states, {leaf.path for leaf in self.state_leaves})
        self.leaves.update({leaf.path: leaf.spec for leaf in self.state_leaves})
        self.leaves.update({(NEXT, *leaf.path): leaf.spec for leaf in self.next_leaves})
        if len(self.state_leaves) + len(self.next_leaves) > _MAX_BITS:
            raise SpecError(
                key="full_state_spec",
                expected=f"at most {_MAX_BITS} states, those in next among them",
                actual=f"{len(self.state_leaves)} and {len(self.next_leaves)}",
            )
        self.has_bits = bool(self.state_leaves)
        if self.has_bits:
            self.leaves[GIVEN] = ArraySpec((), np.dtype(np.int64))
        self.leaves[OTHERS] = ObjectSpec("entries that do not fit", is_optional=True)
        if self.has_mask:
            self.leaves[STEP_MASK] = ArraySpec(tuple(batch_size), np.dtype(np.bool_))


def _only(branch: Branch, paths: set[LeafPath]) -> Branch:
    """Returns the part of a tree with these leaves; none of a lazy stack."""
    children: dict[str, Any] = {}
    for name, child in branch.children.items():
        if isinstance(child, Leaf):
            if child.path in paths:
                children[name] = child
        elif isinstance(child, Branch):
            inner = _only(child, paths)
            if inner.children:
                children[name] = inner
        elif any(leaf.path in paths for leaf in leaves_of(child)):
            children[name] = child
    return Branch(branch.batch_size, children)
