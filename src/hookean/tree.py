"""Arithmetic on pytrees of parameters, and names for their leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hookean.types import Params

tree_map = jax.tree.map


def dot(left: Params, right: Params) -> jax.Array:
    """Sum of the products of all entries."""
    terms = tree_map(lambda x, y: jnp.sum(x * y), left, right)
    return jax.tree.reduce(jnp.add, terms, jnp.zeros(()))


def size(tree: Params) -> int:
    """Number of entries of all leaves."""
    return sum(int(np.prod(jnp.shape(leaf))) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: Params) -> int:
    """Memory of all leaves."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def same_structure(left: Params, right: Params) -> bool:
    """Whether two pytrees differ in their leaves only."""
    return bool(jax.tree.structure(left) == jax.tree.structure(right))  # type: ignore[operator]


def like(value: Any, tree: Params) -> Params:
    """`value` spread over the leaves of `tree`; a pytree of the same structure passes through."""
    return value if same_structure(value, tree) else tree_map(lambda _: value, tree)


def select(condition: jax.Array, chosen: Params, otherwise: Params) -> Params:
    """`chosen` where the scalar condition holds, else `otherwise`."""
    return tree_map(lambda x, y: jnp.where(condition, x, y), chosen, otherwise)


def stack(trees: list[Params]) -> Params:
    """Equal trees stacked along a new leading axis."""
    return tree_map(lambda *leaves: jnp.stack(leaves), *trees)


def row(tree: Params, index: Any) -> Params:
    """Entry `index` along the leading axis of every leaf."""
    return tree_map(lambda leaf: leaf[index], tree)


def set_row(tree: Params, index: Any, value: Params) -> Params:
    """`tree` with entry `index` of the leading axis replaced."""
    return tree_map(lambda leaf, new: leaf.at[index].set(new), tree, value)


def leaf_names(tree: Params, bare: str = "params") -> list[str]:
    """Paths such as `layers/0/kernel`, in the order of `jax.tree.leaves`; `bare` for a bare array."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") or bare for path, _ in paths]


def not_finite(tree: Params, bare: str = "params") -> str | None:
    """Name of the first leaf with a NaN or an Inf."""
    for name, leaf in zip(leaf_names(tree, bare), jax.tree.leaves(tree), strict=True):
        if not np.all(np.isfinite(np.asarray(leaf))):
            return name
    return None


def fingerprint(tree: Params) -> str:
    """Names, types and shapes of all leaves."""
    leaves = zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
    return ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves)
