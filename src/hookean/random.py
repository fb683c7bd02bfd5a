"""Randomness as a function of (seed, stream, index, step), so that no chain's numbers depend on another's.

`Noise` is what one step of a dynamics draws from. Every call takes the next counter, so a key cannot be
used twice; tests hand in other objects with the same two methods to see drift and diffusion without chance.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

from hookean.types import Params


class Stream(enum.IntEnum):
    """What random numbers are for. Each purpose has its own stream."""

    START = 0
    MOMENTUM = 1
    NOISE = 2
    BATCH = 3
    CENTRE = 4
    SCENARIO = 5


def stream_key(seed: jax.Array, stream: Stream, index: int | jax.Array = 0) -> jax.Array:
    """Key of one stream of one chain (or worker)."""
    return jax.random.fold_in(jax.random.fold_in(seed, stream), index)


class Noise:
    """Random numbers of one step."""

    def __init__(self, key: jax.Array, step: int | jax.Array = 0) -> None:
        """Start the counter of the step `step` of the stream `key`."""
        self._key = jax.random.fold_in(key, step)
        self._calls = 0

    def _leaf_keys(self, like: Params) -> Params:
        key = jax.random.fold_in(self._key, self._calls)
        self._calls += 1
        leaves, structure = jax.tree.flatten(like)
        return jax.tree.unflatten(structure, [jax.random.fold_in(key, i) for i in range(len(leaves))])

    def substep(self, index: int | jax.Array) -> Noise:
        """A stream of its own for step `index` of several that share this noise."""
        return Noise(jax.random.fold_in(self._key, 2**31 - 1), index)

    def normal(self, like: Params) -> Params:
        """Independent standard normals with the shapes and types of `like`."""
        return jax.tree.map(
            lambda leaf, key: jax.random.normal(key, leaf.shape, leaf.dtype), like, self._leaf_keys(like)
        )

    def signs(self, like: Params) -> Params:
        """Independent fair signs, -1 or +1."""
        return jax.tree.map(
            lambda leaf, key: jax.random.rademacher(key, leaf.shape, leaf.dtype), like, self._leaf_keys(like)
        )


def shuffled(key: jax.Array, positions: jax.Array, count: int | jax.Array) -> jax.Array:
    """Where `positions` of range(count) land under a random permutation that `key` names.

    A permutation that can be looked up at single places without ever being stored: the swap-or-not shuffle
    (Hoang, Morris, Rogaway 2012). In each round the random pivot pairs x with pivot - x (mod count), and a fair
    coin shared by the pair decides whether they change places.
    """
    bits = 32 - jax.lax.clz(jnp.asarray(count - 1, jnp.int32))
    rounds = 6 * jnp.maximum(bits, 4)

    def one_round(i: jax.Array, x: jax.Array) -> jax.Array:
        pivot_key, coin_key = (jax.random.fold_in(jax.random.fold_in(key, i), use) for use in range(2))
        pivot = jax.random.randint(pivot_key, (), 0, count)
        partner = (pivot - x) % count
        named = jax.vmap(jax.random.fold_in, (None, 0))(coin_key, jnp.maximum(x, partner))
        coins = jax.random.key_data(named)[:, 0] & 1  # the pair's key is itself a hash: no need to draw from it
        return jnp.where(coins == 1, partner, x)

    return jax.lax.fori_loop(0, rounds, one_round, positions)
