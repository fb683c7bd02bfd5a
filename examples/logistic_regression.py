"""Bayesian logistic regression on the breast-cancer data of scikit-learn: how sure is the sign of a slope?

python examples/logistic_regression.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import hookean as hk


def log_likelihood(weights: dict, batch: tuple) -> jax.Array:
    """One number for each example: the sum over the batch and the factor N/|B| are the library's."""
    features, label = batch
    score = features @ weights["slope"] + weights["constant"]
    return jax.nn.log_sigmoid(jnp.where(label == 1, score, -score))


def log_prior(weights: dict) -> jax.Array:
    """N(0, 1) on each slope; a wide one on the constant."""
    return -jnp.sum(weights["slope"] ** 2) / 2 - weights["constant"] ** 2 / 200


def main(num_steps: int = 30_000) -> tuple[hk.Run, LogisticRegression]:
    """The posterior, and the point where it is highest."""
    cells = load_breast_cancer()
    train, test, label, test_label = train_test_split(cells.data, cells.target, test_size=0.3, random_state=0)
    scaler = StandardScaler().fit(train)
    train, test = scaler.transform(train), scaler.transform(test)

    target = hk.Target(log_likelihood, log_prior, data=(train, label), batch_size=50)
    start = {"slope": jnp.zeros(train.shape[1]), "constant": jnp.zeros(())}
    run = hk.sample(
        target,
        start,
        dynamics=hk.SGHMC.from_learning_rate(0.1, momentum=0.9, target=target),
        coupling=hk.Elastic(alpha=20.0, every=10, schedule=hk.release()),
        chains=4,
        num_steps=num_steps,
        warmup=num_steps // 5,
        thin=20,
    )
    print(run.summary())

    slopes = np.asarray(run.draws["slope"]).reshape(-1, train.shape[1])
    best = LogisticRegression(C=1.0, max_iter=1000).fit(train, label)
    sure = np.maximum((slopes > 0).mean(0), (slopes < 0).mean(0))
    print(f"\n{'slope of':25} mean    sd   sure of its sign   best fit")
    for i in np.argsort(-sure)[:5]:
        mean, spread = slopes[:, i].mean(), slopes[:, i].std()
        print(f"{cells.feature_names[i]:23} {mean:6.2f} {spread:5.2f}   {sure[i]:16.1%}   {best.coef_[0, i]:8.2f}")

    # The prediction of a posterior is the mean of the probabilities, not of the weights: vmap over chains and draws.
    each = jax.vmap(jax.vmap(log_likelihood, (0, None)), (0, None))(run.draws, (test, test_label))
    predicted = jax.nn.logsumexp(each, axis=(0, 1)) - np.log(each.shape[0] * each.shape[1])
    right = np.mean(predicted > np.log(0.5))
    print(f"log-likelihood of a test example: {float(jnp.mean(predicted)):.3f}; {right:.1%} of them right")
    return run, best


if __name__ == "__main__":
    main()
