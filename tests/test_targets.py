"""Batches: which examples they hold, that they are unbiased, and a user's own, read in the background.

False alarms: each statistical check fails by chance once in 10^6; there are fewer than 40.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import hookean as hk
from hookean.engines import Engine
from hookean.random import Stream, stream_key

FALSE_ALARM = 1e-6


def no_likelihood(params: Any, batch: Any) -> jax.Array:
    return jnp.zeros(len(jax.tree.leaves(batch)[0]))


def chosen(count: int, size: int, batching: Any, chains: int, steps: int, first_step: int = 0) -> np.ndarray:
    """Which examples the batches hold: [chain, step, place]."""
    target = hk.Target(no_likelihood, lambda p: 0.0, np.arange(count), size, batching)
    seed = jax.random.key(5)

    def one(chain: Any, step: Any) -> Any:
        return target.batch(target.data, stream_key(seed, Stream.BATCH, chain), chain, step)

    over_steps = jax.vmap(one, (None, 0))
    return np.asarray(
        jax.jit(jax.vmap(over_steps, (0, None)))(np.arange(chains), np.arange(first_step, first_step + steps))
    )


def looks_uniform(counts: Any) -> bool:
    """Chi-square of counts of equally likely outcomes."""
    counts = np.ravel(counts)
    assert counts.mean() > 10
    return stats.chisquare(counts).pvalue > FALSE_ALARM


def table(left: np.ndarray, right: np.ndarray, size: int) -> np.ndarray:
    """How often each pair occurs."""
    return np.bincount(np.ravel(left) * size + np.ravel(right), minlength=size * size)


def test_with_replacement_all_examples_are_equally_likely_and_all_draws_independent() -> None:
    size = 7
    found = chosen(size, 3, "replacement", chains=4, steps=3000)
    assert found.shape == (4, 3000, 3)
    assert looks_uniform(np.bincount(found.ravel(), minlength=size))
    assert looks_uniform(table(found[:, :, 0], found[:, :, 1], size))  # places of a batch
    assert looks_uniform(table(found[:, :-1, 0], found[:, 1:, 0], size))  # steps
    assert looks_uniform(table(found[:2, :, 2], found[2:, :, 2], size))  # chains


def test_an_epoch_has_every_example_once_up_to_the_remainder() -> None:
    count, size, per_epoch, epochs = 11, 3, 3, 2000
    found = chosen(count, size, "epochs", chains=2, steps=per_epoch * epochs).reshape(2, epochs, per_epoch * size)
    ordered = np.sort(found, -1)
    assert np.all(np.diff(ordered, axis=-1) > 0) and ordered.min() == 0 and ordered.max() == count - 1
    # Every place holds every example equally often, so that all are left over equally often.
    for place in range(per_epoch * size):
        assert looks_uniform(np.bincount(found[:, :, place].ravel(), minlength=count))
    # Epochs are shuffled anew, and chains differ: places of equal number agree once in `count`.
    for left, right in ((found[:, :-1], found[:, 1:]), (found[0], found[1])):
        assert looks_uniform(table(left[..., 0], right[..., 0], count))
        assert looks_uniform(table(left[..., 4], right[..., 4], count))


def test_an_epoch_of_a_large_set() -> None:
    count, size = 60_000, 100
    found = chosen(count, size, "epochs", chains=1, steps=600, first_step=600 * 7)
    assert np.array_equal(np.sort(found.ravel()), np.arange(count))
    # Neighbours in the epoch are not so in the data. |U - V| has mean 1/3 and variance 1/18, and covariance 1/180
    # with |V - W|.
    steps = np.abs(np.diff(found.ravel().astype(float))) / count
    assert abs(steps.mean() - 1 / 3) < stats.norm.isf(FALSE_ALARM / 2) * np.sqrt((1 / 18 + 2 / 180) / len(steps))


def test_a_whole_batch_is_the_data_itself() -> None:
    for size in (None, 6):
        target = hk.Target(no_likelihood, lambda p: 0.0, np.arange(6), size, "epochs")
        assert target.is_exact and target.batch(target.data, jax.random.key(0), 0, 3) is target.data


DATA = {
    "image": np.arange(4 * 2 * 3, dtype=np.float64).reshape(4, 2, 3) / 10,
    "label": np.array([0, 1, 1, 0]),
    "more": [np.array([True, False, True, True]), np.linspace(0, 1, 4, dtype=np.float16)],
}


def on_pytree(params: Any, batch: Any) -> jax.Array:
    logits = jnp.einsum("bij,ij->b", batch["image"], params) + batch["more"][1]
    return jnp.where(
        batch["more"][0], jax.nn.log_sigmoid(jnp.where(batch["label"] == 1, logits, -logits)), -(logits**2)
    )


def log_prior(params: Any) -> jax.Array:
    return -0.7 * jnp.sum(params**2)


def rows(tree: Any, chosen: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[np.array(chosen)], tree)


def test_a_batch_of_any_pytree_has_the_same_rows_of_all_leaves() -> None:
    target = hk.Target(on_pytree, log_prior, DATA, batch_size=3)
    assert [leaf.dtype for leaf in jax.tree.leaves(target.data)] == [np.float32, np.int32, bool, np.float16]
    batch = target.batch(target.data, jax.random.key(1), 0, 0)
    picked = np.argmin(np.abs(batch["image"][:, 0, 0, None] - DATA["image"][:, 0, 0]), 1)
    jax.tree.map(lambda leaf, all_rows: np.testing.assert_allclose(leaf, all_rows[picked], 1e-6), batch, DATA)


@pytest.mark.parametrize("batching", ["replacement", "epochs"])
def test_the_potential_is_unbiased(batching: Any) -> None:
    """The mean over all batches, each as likely as the next, is the whole potential; gradients too. Exactly."""
    params = np.linspace(-0.3, 0.4, 6).reshape(2, 3)
    target = hk.Target(on_pytree, log_prior, DATA, batch_size=2, batching=batching)
    whole = float(-np.sum(on_pytree(params, DATA)) - log_prior(params))
    assert target.potential(params, DATA) == pytest.approx(whole, rel=1e-6)
    every = itertools.product(range(4), repeat=2) if batching == "replacement" else itertools.permutations(range(4), 2)
    both = jax.jit(jax.value_and_grad(target.potential))
    exact = jax.jit(jax.grad(lambda p: -jnp.sum(on_pytree(p, DATA)) - log_prior(p)))(params)
    values, gradients = zip(*(both(params, rows(DATA, pair)) for pair in every), strict=True)
    assert np.ptp(values) > 0.5
    assert np.mean(values, dtype=float) == pytest.approx(whole, rel=1e-5)
    np.testing.assert_allclose(np.mean(gradients, 0, dtype=float), exact, rtol=1e-4, atol=1e-5)


def test_a_large_batch_is_spread_evenly() -> None:
    target = hk.Target(no_likelihood, lambda p: 0.0, np.arange(100), 2)
    assert np.array_equal(target.large_batch(), np.arange(100))
    assert np.array_equal(target.large_batch(4), [0, 33, 66, 99])


# -- a user's own batches ----------------------------------------------------------------------------------------------
# At temperature 0 and with the potential theta - sum of what was seen, the draws tell which batches were read.

ROUND = 5


def reads(params: Any, batch: Any) -> jax.Array:
    return batch * params


def source(chain: int) -> Iterator[np.ndarray]:
    """Batches of 2 examples: 1000 * chain + number of the batch, both alike."""
    for number in range(ROUND):
        yield np.full(2, 1000.0 * chain + number + 1)


def run_stream(batches: Any, engine: Engine, num_steps: int = 12, chains: int = 3, **settings: Any) -> hk.Run:
    """U~ = -5 * 2 * value * theta / 2, step 0.1: each step adds the value of its batch."""
    target = hk.Target.from_batches(reads, lambda p: 0.0, batches, num_examples=10)
    assert not target.is_exact
    dynamics = hk.SGLD(0.1, temperature=0)
    return hk.sample(
        target, 0.0, dynamics=dynamics, chains=chains, num_steps=num_steps, engine=engine, progress=False, **settings
    )


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches of chain")]


@pytest.fixture(autouse=True)
def no_reader_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while readers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not readers()


ENGINES = {"vectorised": hk.Vectorised(), "simulated": hk.Simulated(hk.Scenario(step_time=(1.0, 1.5, 2.2)))}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_chain_reads_its_own_batches_in_order_and_again_from_the_start(engine: str) -> None:
    run = run_stream(source, ENGINES[engine])
    values = np.array([[1000.0 * chain + step % ROUND + 1 for step in range(12)] for chain in range(3)])
    np.testing.assert_allclose(run.draws, np.cumsum(values, 1), rtol=1e-6)
    assert "N = 10, batch 2" in run.summary()  # of a stream too, and starts no reader


def test_a_crashed_worker_reads_again_what_it_had_read() -> None:
    scenario = hk.Scenario(crashes=[hk.Crash(1, 8, restart_after=3.0)], latency=0.1)
    run = run_stream(source, hk.Simulated(scenario), coupling=hk.Elastic(0.0, every=3))
    values = np.array([[1000.0 * chain + step % ROUND + 1 for step in range(12)] for chain in range(3)])
    np.testing.assert_allclose(run.draws, np.cumsum(values, 1), rtol=1e-6)


def test_a_list_serves_all_chains() -> None:
    run = run_stream([np.full(2, 1.0), np.full(2, 4.0)], hk.Vectorised(), num_steps=3, chains=2)
    np.testing.assert_allclose(run.draws, [[1, 5, 6]] * 2, rtol=1e-6)


def test_a_new_run_opens_its_batches_anew() -> None:
    number = 0.0
    target = hk.Target.from_batches(reads, lambda p: 0.0, lambda chain: [np.full(2, number)], num_examples=10)
    for number in (1.0, 2.0):  # what was read ahead does not count
        assert float(target.batch(None, jax.random.key(0), 0, 0).batch[0]) == number
        target.close()


class Loader:
    """A data loader that fails, or spoils a batch, in a later round."""

    def __init__(self, third_round: Any) -> None:
        self.rounds, self.third_round = 0, third_round

    def __iter__(self) -> Iterator[Any]:
        self.rounds += 1  # the first is the look at the shapes
        yield np.full(2, 1.0)
        if self.rounds < 3:
            yield np.full(2, 2.0)
        elif isinstance(self.third_round, BaseException):
            raise self.third_round
        elif self.third_round is not None:
            yield self.third_round


def once() -> Callable[[int], Any]:
    """A generator, the same at every call, so that it is at its end when gone through again."""
    given = (np.full(2, 1.0) for _ in range(5))
    return lambda chain: given


SPOILT: dict[str, tuple[Callable[[], Any], int, str]] = {
    "smaller": (
        lambda: Loader(np.ones(1)),
        3,
        "leaf 'batches' has shape (1,), in the first batch (2,). All batches must have",
    ),
    "NaN": (lambda: Loader(np.full(2, np.nan)), 3, "has NaN or Inf in leaf 'batches'. Remove or impute"),
    "type": (lambda: Loader(np.full(2, 1j)), 3, "has type complex64, in the first batch float32"),
    "structure": (lambda: Loader([np.ones(2)]), 3, "differ in structure. Give every batch the structure of the first"),
    "objects": (lambda: Loader(np.array([None, None])), 3, "has type object"),
    "failure": (lambda: Loader(OSError("the disk is gone")), 3, "OSError: the disk is gone"),
    "empty": (once, 4, "yield nothing when gone through again. Give a new iterable for every round"),
}


def says(error: hk.BatchError | None, name: str) -> None:
    _, step, message = SPOILT[name]
    assert isinstance(error, hk.HookeanError) and message in str(error) and "\n" not in str(error)
    assert (error.chain, error.step) == (0, step) and f"Chain 0 wanted a batch for step {step}" in str(error)
    assert isinstance(error.__cause__, OSError if name == "failure" else hk.ArgumentError)


@pytest.mark.parametrize("name", SPOILT)
def test_a_batch_that_went_wrong_is_an_alarm(name: str) -> None:
    batches, step, _ = SPOILT[name]
    target = hk.Target.from_batches(reads, lambda p: 0.0, batches(), num_examples=10)
    for at in range(step + 3):
        fetched = target.batch(None, jax.random.key(0), 0, at)
        assert np.isnan(fetched.alarm) == (at >= step)
        assert np.isnan(target.potential(jnp.ones(()), fetched)) == (at >= step)
    says(target.close(), name)
    assert target.close() is None


@pytest.mark.parametrize(("name", "engine"), [("failure", "vectorised"), ("empty", "vectorised"), ("NaN", "simulated")])
def test_what_goes_wrong_later_reaches_the_user(name: str, engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    batches, step, _ = SPOILT[name]
    began = time.monotonic()
    with pytest.raises(hk.BatchError) as caught:
        run_stream(batches(), hk.Vectorised() if engine == "vectorised" else hk.Simulated(), num_steps=400, chains=1)
    assert time.monotonic() - began < 60  # of which nearly all goes into compilation
    error = caught.value
    says(error, name)
    assert error.__suppress_context__  # no word of the NaN by which the run was stopped
    assert error.run.draws.shape == (1, step) and np.all(np.isfinite(error.run.draws))
    assert f"{step} draws of each kept" in error.run.summary()
    assert capfd.readouterr() == ("", "")


def test_only_the_chain_whose_batches_fail_is_named() -> None:
    def one_fails(chain: int) -> Iterator[np.ndarray]:
        yield from source(chain)
        if chain == 2:
            raise KeyError("shard 7")

    with pytest.raises(hk.BatchError, match=r"KeyError: 'shard 7'\. Chain 2 wanted a batch for step 5") as caught:
        run_stream(one_fails, hk.Vectorised(), num_steps=400, thin=2)
    assert caught.value.chain == 2
    assert caught.value.run.draws.shape == (3, 2)


def test_readers_end_when_the_run_fails() -> None:
    """A chain diverges, while its loader would go on for ever."""

    def endless(chain: int) -> Iterator[np.ndarray]:
        for number in itertools.count():
            yield np.full(2, 1.0 if number < 5 else 3e38)

    with pytest.raises(hk.DivergenceError):
        run_stream(endless, hk.Vectorised(), num_steps=100)
