"""The networks of the experiments, as plain functions on pytrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hookean.types import Params

# -- fully connected ---------------------------------------------------------------------------------------------------


def dense_init(sizes: Sequence[int], gain: float = 2.0) -> Callable[[jax.Array], Params]:
    """Weights N(0, gain / fan_in), biases 0: with gain 2 the start of He et al. 2015, made for rectifiers."""

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, len(sizes) - 1)
        return [
            {"w": jax.random.normal(k, (i, o)) * jnp.sqrt(gain / i), "b": jnp.zeros(o)}
            for k, i, o in zip(keys, sizes[:-1], sizes[1:], strict=True)
        ]

    return init


def dense(params: Params, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jax.nn.relu) -> jax.Array:
    """Layers with `activation` between them."""
    for layer in params[:-1]:
        x = activation(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


# -- residual ----------------------------------------------------------------------------------------------------------

WIDTHS = (16, 32, 64)


def residual_init(blocks: int = 5, widths: Sequence[int] = WIDTHS, classes: int = 10) -> Callable[[jax.Array], Params]:
    """A residual network of 6 blocks + 2 layers (He et al. 2016, for CIFAR-10) that needs no normalisation.

    Fixup (Zhang, Dauphin and Ma 2019, arXiv 1901.09321): He's start, but in each of the L = 3 blocks residual branches
    the first convolution is scaled by 1/sqrt(L) and the second is 0, and so is the last layer. A bias for each channel
    stands in for Fixup's scalar biases; its scalar factors are left out, so that the network is He's without its
    batch normalisation.
    """
    branches = blocks * len(widths)

    def convolution(key: jax.Array, inputs: int, outputs: int, scale: float) -> Params:
        w = jax.random.normal(key, (9 * inputs, outputs)) * jnp.sqrt(2 / (9 * inputs)) * scale
        return {"w": w, "b": jnp.zeros(outputs)}

    def block(key: jax.Array, inputs: int, outputs: int) -> Params:
        second = {"w": jnp.zeros((9 * outputs, outputs)), "b": jnp.zeros(outputs)}
        return {"first": convolution(key, inputs, outputs, branches**-0.5), "second": second}

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, (len(widths), blocks))
        stages, inputs = [], widths[0]
        for width, own in zip(widths, keys, strict=True):
            stages.append({"enter": block(own[0], inputs, width)})
            if blocks > 1:  # alike, and stacked, so that one is compiled for all
                stages[-1]["rest"] = jax.vmap(lambda k, w=width: block(k, w, w))(own[1:])
            inputs = width
        last = {"w": jnp.zeros((widths[-1], classes)), "b": jnp.zeros(classes)}
        return {"first": convolution(jax.random.fold_in(key, 1), 3, widths[0], 1.0), "stages": stages, "last": last}

    return init


def residual(params: Params, x: jax.Array) -> jax.Array:
    """Logits of images [B, H, W, 3]."""
    x = jax.nn.relu(_convolution(params["first"], x))
    for number, stage in enumerate(params["stages"]):
        x = _block(stage["enter"], x, stride=2 if number > 0 else 1)
        if "rest" in stage:
            x = jax.lax.scan(lambda x, layers: (_block(layers, x), None), x, stage["rest"])[0]
    return jnp.mean(x, (1, 2)) @ params["last"]["w"] + params["last"]["b"]


def _block(layers: Any, x: jax.Array, stride: int = 1) -> jax.Array:
    branch = jax.nn.relu(_convolution(layers["first"], x, stride))
    return jax.nn.relu(_shortcut(x, stride, branch.shape[-1]) + _convolution(layers["second"], branch))


def _shortcut(x: jax.Array, stride: int, channels: int) -> jax.Array:
    """Option A of He et al.: every other pixel, and zeros for the new channels."""
    x = x[:, ::stride, ::stride]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, channels - x.shape[-1])))


def _convolution(layer: Any, x: jax.Array, stride: int = 1) -> jax.Array:
    """3 x 3, padded with zeros, as one product of matrices.

    Chains have weights of their own: `vmap` would make grouped convolutions of ordinary ones, which accelerators are
    slow at; of products of matrices it makes batches of them.
    """
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifts = [padded[:, i : i + height : stride, j : j + width : stride] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifts, -1) @ layer["w"] + layer["b"]
