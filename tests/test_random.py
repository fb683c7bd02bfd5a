"""Noise and batches are functions of (seed, chain, step): the same again, no key twice, and of good quality.

False alarms: each statistical check fails by chance once in 10^6; there are fewer than 60.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import hookean as hk
from hookean import dynamics as dynamics_of
from hookean.dynamics import Dynamics
from hookean.random import Noise, Stream, shuffled, stream_key

FALSE_ALARM = 1e-6

# -- the same run again ------------------------------------------------------------------------------------------------


def log_likelihood(params: Any, batch: Any) -> jax.Array:
    return -0.5 * (batch - params["a"][0] - params["b"]) ** 2


def log_prior(params: Any) -> jax.Array:
    return -0.5 * (jnp.sum(params["a"] ** 2) + params["b"] ** 2)


def start(key: jax.Array) -> Any:
    return {"a": jax.random.normal(key, (2,)), "b": jnp.zeros(())}


TARGET = hk.Target(log_likelihood, log_prior, np.linspace(-1, 2, 20), batch_size=3)
STEPS = 60


def run(**changes: Any) -> dict[tuple[int, int], bytes]:
    """The bits of all parameters of (chain, step)."""
    settings: dict[str, Any] = {"dynamics": hk.SGHMC(0.05), "chains": 3, "warmup": 12, "thin": 6, "seed": 4}
    settings |= {"engine": hk.Vectorised(), **changes}
    found = hk.sample(TARGET, start, num_steps=STEPS, progress=False, **settings)
    return {
        (chain, int(step)): b"".join(np.asarray(leaf)[chain, draw].tobytes() for leaf in jax.tree.leaves(found.draws))
        for chain in range(found.job.num_sampled)
        for draw, step in enumerate(found.job.kept_steps)
    }


def same(left: dict, right: dict, pairs: int) -> bool:
    both = left.keys() & right.keys()
    assert len(both) == pairs
    return all(left[key] == right[key] for key in both)


@pytest.fixture(scope="module")
def reference() -> dict:
    found = run()
    assert len(set(found.values())) == len(found) == 3 * 8  # nothing is alike
    return found


def test_the_same_seed_gives_the_same_bits(reference: dict) -> None:
    assert same(run(), reference, 24)


def test_another_seed_gives_others(reference: dict) -> None:
    assert not set(run(seed=5).values()) & set(reference.values())


def test_adding_chains_changes_no_other(reference: dict) -> None:
    assert same(run(chains=5), reference, 24)


def test_adding_workers_changes_no_other_on_the_simulated_clock(reference: dict) -> None:
    """Nor does the engine, nor the workers' speed, as long as they do not act on each other."""
    scenario = hk.Scenario(step_time=(1.0, 3.0, 0.7, 2.0), stragglers=[hk.Straggler(0, 5.0)], jitter=0.3)
    assert same(run(chains=4, engine=hk.Simulated(scenario)), reference, 24)


def test_warmup_thinning_and_segments_do_not_change_the_trajectory(reference: dict) -> None:
    """Segments of 1 step in place of 6, where 60 steps are 12 segments; 7 and 53 in place of 12 and 48."""
    assert same(run(warmup=7, thin=1), reference, 24)


# -- no key twice ------------------------------------------------------------------------------------------------------

DRAWING = ("normal", "randint", "bits", "rademacher", "uniform", "bernoulli", "choice", "permutation")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Every key that anything is drawn from, in whatever compiled code, as it is drawn from."""
    keys: list[tuple[int, ...]] = []

    def recording(draw: Any) -> Any:
        def wrapped(key: jax.Array, *arguments: Any, **named: Any) -> Any:
            data = jax.random.key_data(key)
            jax.debug.callback(lambda data: keys.append(tuple(np.ravel(data).tolist())), data)
            return draw(key, *arguments, **named)

        return wrapped

    for name in DRAWING:
        monkeypatch.setattr(jax.random, name, recording(getattr(jax.random, name)))
    yield keys


def twice(keys: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    jax.effects_barrier()
    return [key for key, count in Counter(keys).items() if count > 1]


def test_a_key_used_twice_is_noticed(drawn: list) -> None:
    key = jax.random.key(0)
    for _ in range(2):
        jax.jit(lambda key: jax.random.normal(jax.random.fold_in(key, 1), (3,)))(key)
    jax.jit(jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i))))(jnp.arange(2))
    assert len(twice(drawn)) == 1 and len(drawn) == 4


@pytest.mark.parametrize(
    ("dynamics", "coupling", "draws"),
    # Of 3 chains in 6 steps, with 2 leaves: starts, momenta (the centre's too), batches, steps, 3 exchanges.
    [
        (hk.SGHMC(0.05), hk.Elastic(every=2), 3 + 4 * 2 + 18 + 18 * 2 + 3 * 2 * 2),  # a leap: two normals each
        (hk.PSGLD(0.05), hk.Elastic(every=2), 3 + 18 + 18 * 2 * 2 + 3 * 2 * 2 * 2),  # signs and normals; 2 x 2 steps
        (hk.SGNHT(0.05), hk.StaleGradient(2, 2), 3 + 2 + 18 + 9 * 2),  # 18 gradients, 9 steps of the server
    ],
    ids=["leap", "walk", "server"],
)
def test_no_key_is_used_twice_in_a_run(drawn: list, dynamics: Dynamics, coupling: Any, draws: int) -> None:
    """Not by two chains, steps, purposes, leaves, or draws of a step."""
    settings = {"chains": 3, "num_steps": 6, "warmup": 2, "thin": 2, "engine": hk.Vectorised()}
    hk.sample(TARGET, start, dynamics=dynamics, coupling=coupling, progress=False, **settings)
    assert not twice(drawn)
    assert len(drawn) == draws


ALL_DYNAMICS = [variant for kind in dynamics_of.ALL.values() for variant in kind.variants(0.1)]


@pytest.mark.parametrize("dynamics", ALL_DYNAMICS, ids=[type(d).__name__ for d in ALL_DYNAMICS])
def test_no_dynamics_uses_a_key_twice(drawn: list, dynamics: Dynamics) -> None:
    position = {"a": jnp.ones(3), "b": jnp.ones(3)}
    key = jax.random.key(1)
    state = dynamics.init(position, Noise(stream_key(key, Stream.MOMENTUM)))
    for step in range(5):
        noise = Noise(stream_key(key, Stream.NOISE), step)
        state = dynamics.step(state, position, noise, jnp.asarray(step), lambda vector: vector)
    assert not twice(drawn)
    assert len(drawn) >= 4


def test_streams_counters_substeps_and_leaves_have_keys_of_their_own(drawn: list) -> None:
    leaves = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    for stream, chain, step in itertools.product(Stream, range(3), range(3)):
        noise = Noise(stream_key(jax.random.key(0), stream, chain), step)
        for source in (noise, noise.substep(0), noise.substep(1)):
            source.normal(leaves)
            source.signs(leaves)
    assert not twice(drawn)
    assert len(drawn) == len(Stream) * 3 * 3 * 3 * 2 * 2


# -- quality -----------------------------------------------------------------------------------------------------------


def normals(chains: int, steps: int) -> np.ndarray:
    """[chain, step, call, leaf, place]."""
    like = [jnp.zeros(4), jnp.zeros((2, 2))]

    def one(chain: Any, step: Any) -> jax.Array:
        noise = Noise(stream_key(jax.random.key(11), Stream.NOISE, chain), step)
        return jnp.stack([jnp.stack([leaf.ravel() for leaf in noise.normal(like)]) for _ in range(2)])

    over_steps = jax.vmap(one, (None, 0))
    return np.asarray(jax.jit(jax.vmap(over_steps, (0, None)))(jnp.arange(chains), jnp.arange(steps)), float)


def test_noise_is_normal_and_independent() -> None:
    found = normals(chains=4, steps=4000)
    assert stats.kstest(found.ravel(), "norm").pvalue > FALSE_ALARM
    half = found.shape[1] // 2
    pairs = {
        "chains": (found[:2], found[2:]),
        "steps": (found[:, ::2], found[:, 1::2]),
        "far steps": (found[:, :half], found[:, half:]),
        "calls": (found[:, :, 0], found[:, :, 1]),
        "leaves": (found[:, :, :, 0], found[:, :, :, 1]),
        "places": (found[..., :2], found[..., 2:]),
    }
    for name, (left, right) in pairs.items():
        for power in (1, 2):  # the numbers, and their sizes
            a, b = left.ravel() ** power - (power - 1), right.ravel() ** power - (power - 1)
            z = np.sum(a * b) / np.sqrt(np.sum(a**2 * b**2))  # standard normal, if independent
            assert abs(z) < stats.norm.isf(FALSE_ALARM / 2), (name, power)


def test_noise_has_the_shapes_and_types_of_the_parameters() -> None:
    like = {"a": jnp.zeros((2, 3), jnp.bfloat16), "b": jnp.zeros(())}
    for found in (Noise(jax.random.key(0)).normal(like), Noise(jax.random.key(0)).signs(like)):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), like)


def test_signs_are_fair() -> None:
    found = np.asarray(Noise(jax.random.key(2)).signs(jnp.zeros(100_000)))
    assert set(np.unique(found)) == {-1.0, 1.0}
    assert stats.binomtest(int(np.sum(found > 0)), found.size).pvalue > FALSE_ALARM


PLACES = 256
look_up = jax.jit(jax.vmap(shuffled, (0, None, None)))  # many shuffles of one length, which is an argument


def test_a_shuffle_is_a_permutation() -> None:
    keys = jax.random.split(jax.random.key(7), 20)
    for count in range(1, 201):
        found = np.asarray(look_up(keys, jnp.arange(PLACES), count))[:, :count]
        assert np.array_equal(np.sort(found, 1), np.broadcast_to(np.arange(count), (20, count)))
        assert count < 9 or len({row.tobytes() for row in found}) == 20  # 9! is large: no two alike


@pytest.mark.parametrize("count", [2, 3, 5, 16, 17, 100])
def test_a_shuffle_takes_every_place_everywhere(count: int) -> None:
    """Each place goes everywhere equally often, and neighbours to all pairs of places."""
    shuffles = 40 * max(count, 50)
    keys = jax.random.split(jax.random.key(count), 5000)[:shuffles]
    found = np.asarray(look_up(keys, jnp.arange(PLACES), count))[:, :count]
    counts = np.array([np.bincount(column, minlength=count) for column in found.T])
    # Rows and columns of this table have fixed sums: of its count^2 cells (count - 1)^2 are free.
    expected = len(keys) / count
    statistic = np.sum((counts - expected) ** 2) / expected * (count - 1) / count
    assert expected >= 20 and stats.chi2.sf(statistic, (count - 1) ** 2) > FALSE_ALARM
    if count in (3, 5):  # all orders of three places are as likely as each other
        orders = Counter(map(tuple, found[:, :3]))
        assert len(orders) == len(list(itertools.permutations(range(count), 3)))
        assert stats.chisquare(list(orders.values())).pvalue > FALSE_ALARM


def test_a_large_shuffle_is_quick() -> None:
    """All places of a large data set at once, which is 600 times what a step of a hundred examples asks for."""
    count = 60_000
    shuffle = jax.jit(lambda key: shuffled(key, jnp.arange(count), count))
    for number in range(2):  # the first time it is compiled
        began = time.perf_counter()
        found = np.asarray(shuffle(jax.random.key(number)))
        seconds = time.perf_counter() - began
        assert np.array_equal(np.sort(found), np.arange(count))
    assert seconds < 5  # a tenth of a second where nothing else runs
    assert np.mean(found == np.arange(count)) < 1e-3
