"""What elastic coupling does to a law, and how to get the law back, on a Gaussian where all is known.

    python examples/toy_gaussian.py

Three ways of sampling one 2-D Gaussian: independent chains; elastic chains that stay coupled, whose draws are too
narrow by a known amount; elastic chains that are let go before draws are kept.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import hookean as hk
from hookean.diagnostics import mean_and_error

COVARIANCE = np.array([[1.0, 0.6], [0.6, 0.8]])
CHAINS = 4
COUPLINGS = {
    "independent": hk.Independent(),
    "elastic, hold": hk.Elastic(alpha=1.0),
    "elastic, release": hk.Elastic(alpha=1.0, schedule=hk.release()),
}


def main(num_steps: int = 60_000) -> list[tuple[str, float, float, float]]:
    """Rows of (coupling, measured variance, its Monte-Carlo error, exact variance) along the long axis."""
    precision = jnp.asarray(np.linalg.inv(COVARIANCE))
    target = hk.Target.from_log_density(lambda x: -x @ precision @ x / 2)
    variances, axes = np.linalg.eigh(COVARIANCE)
    variance, long_axis = variances[-1], axes[:, -1]

    rows = []
    for name, coupling in COUPLINGS.items():
        run = hk.sample(
            target,
            jnp.zeros(2),
            dynamics=hk.SGHMC(step_size=0.1, friction=1.0),
            coupling=coupling,
            chains=CHAINS,
            num_steps=num_steps,
            warmup=num_steps // 6,
            thin=5,
            engine=hk.Vectorised(),  # for a model as small as this, the fastest by far
            progress=False,
        )
        along = np.asarray(run.draws) @ long_axis  # [chain, draw]
        measured, error = mean_and_error(along**2)
        law = coupling.covariance(1 / variance, CHAINS, temperature=1.0)
        exact = float("nan") if law is None else law[0, 0]
        rows.append((name, measured, error, exact))

    print(f"{'variance of one chain':24} measured           exact   posterior")
    for name, measured, error, exact in rows:
        print(f"{name:24} {measured:.3f} +- {error:.3f}   {exact:7.3f}   {variance:9.3f}")
    return rows


if __name__ == "__main__":
    main()
