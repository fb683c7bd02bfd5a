"""A Bayesian neural network in plain JAX on the digits of scikit-learn: one draw, one chain, all chains.

python examples/neural_network.py
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hookean as hk

WIDTHS = (64, 32, 10)


def start(key: jax.Array) -> list[dict]:
    """Where a chain starts: a draw from the prior. Each chain gets a key of its own."""
    layers = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        key, for_weight, for_bias = jax.random.split(key, 3)
        weight, bias = jax.random.normal(for_weight, (inputs, outputs)), jax.random.normal(for_bias, (outputs,))
        layers.append({"weight": weight, "bias": bias})
    return layers


def logits(layers: list[dict], pixels: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        pixels = jax.nn.relu(pixels @ layer["weight"] + layer["bias"])
    return pixels @ layers[-1]["weight"] + layers[-1]["bias"]


def log_likelihood(layers: list[dict], batch: tuple) -> jax.Array:
    pixels, digit = batch
    return jnp.take_along_axis(jax.nn.log_softmax(logits(layers, pixels)), digit[:, None], axis=1)[:, 0]


def log_prior(layers: list[dict]) -> jax.Array:
    """N(0, 1) on all weights and biases."""
    return -sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(layers)) / 2


def scores(each: jax.Array, digit: np.ndarray) -> tuple[float, float]:
    """Log-likelihood and accuracy of the mean of the predictions `each` [member, example, class]."""
    mean = jax.nn.logsumexp(each, axis=0) - np.log(len(each))
    return float(jnp.mean(mean[jnp.arange(len(digit)), digit])), float(jnp.mean(jnp.argmax(mean, 1) == digit))


def main(num_steps: int = 6_000) -> dict[str, tuple[float, float]]:
    """Test log-likelihood and accuracy of the last draw of a chain, of all its draws, and of all chains."""
    pixels, digit = load_digits(return_X_y=True)
    train, test, digit, test_digit = train_test_split(pixels / 16, digit, test_size=0.3, random_state=0)
    target = hk.Target(log_likelihood, log_prior, data=(train, digit), batch_size=100)
    run = hk.sample(
        target,
        start,
        dynamics=hk.SGHMC.from_learning_rate(0.1, momentum=0.9, target=target),
        coupling=hk.Elastic(alpha=400.0, every=10, schedule=hk.release()),
        chains=4,
        num_steps=num_steps,
        warmup=num_steps // 2,
        thin=num_steps // 120,
    )
    print(run.summary())

    predict = jax.jit(jax.vmap(jax.vmap(lambda layers: jax.nn.log_softmax(logits(layers, test)))))
    each = predict(run.draws)  # [chain, draw, example, class]
    found = {
        "last draw of a chain": scores(each[0, -1:], test_digit),
        "all draws of a chain": scores(each[0], test_digit),
        "all draws of all chains": scores(each.reshape(-1, *each.shape[2:]), test_digit),
    }
    print(f"\n{'prediction by':24} log-likelihood   accuracy")
    for name, (value, accuracy) in found.items():
        print(f"{name:24} {value:14.4f} {accuracy:10.1%}")
    return found


if __name__ == "__main__":
    main()
