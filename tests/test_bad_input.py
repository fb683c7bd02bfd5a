"""What a user may do wrong: named, with the remedy, before anything is compiled; and what a user may well do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hookean as hk
from hookean.engines import Engine
from hookean.job import Job
from hookean.preparation import prepare

X = np.linspace(-1, 1, 24).reshape(12, 2)
Y = np.arange(12) % 2 == 0
INIT = {"w": np.zeros(2), "b": np.zeros(())}


def log_likelihood(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jax.nn.log_sigmoid(jnp.where(y, 1.0, -1.0) * (x @ params["w"] + params["b"]))


def log_prior(params: Any) -> jax.Array:
    return -0.5 * (jnp.sum(params["w"] ** 2) + params["b"] ** 2)


class Stub(Engine):
    """Compiles and runs nothing."""

    summary = "nothing is run"

    def run(self, job: Job, recorder: Any, saved: Any = None) -> dict[str, Any]:
        return {"steps": 0}


TARGET = hk.Target(log_likelihood, log_prior, (X, Y), batch_size=4)
GOOD: dict[str, Any] = {
    "init": INIT,
    "dynamics": hk.SGHMC(0.1),
    "chains": 3,
    "num_steps": 100,
    "warmup": 20,
    "thin": 5,
    "progress": False,
    "engine": Stub(),
}


def sample(target: Any = TARGET, **changes: Any) -> hk.Run:
    arguments = {**GOOD, **changes}
    return hk.sample(target, arguments.pop("init"), **arguments)


def target(ll: Any = log_likelihood, lp: Any = log_prior, data: Any = (X, Y), **more: Any) -> hk.Target:
    return hk.Target(ll, lp, data, **more)


def with_target(*given: Any, **named: Any) -> hk.Run:
    return sample(target(*given, **named))


def spoilt(value: float) -> np.ndarray:
    x = X.copy()
    x[3, 1] = value
    return x


def batches(*shapes: int) -> list[Any]:
    return [(np.ones((n, 2)), np.ones(n)) for n in shapes]


def stream(given: Any, num_examples: Any = 100) -> hk.Target:
    return hk.Target.from_batches(log_likelihood, log_prior, given, num_examples)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of what is compiled from here on, nothing being in the caches."""
    names: list[str] = []

    def listen(event: str, duration: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(about.get("fun_name", event))

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_compilation_is_noticed(compiled: list[str]) -> None:
    jax.jit(lambda x: x + 1)(np.ones(3))
    assert compiled


TWO = jnp.ones(2)
sghmc = hk.SGHMC
falls = {"step": lambda step: 0.1 - 0.01 * step}["step"]  # below 0 from step 11 on
later_nan = {"step": lambda step: jnp.sqrt(60.0 - step)}["step"]
released = hk.Elastic(schedule=hk.release())

# What is done, the argument that the error names, what it says is wrong, what it says to do.
BAD: list[tuple[Callable[[], Any], str, str, str]] = [
    # data
    (lambda: with_target(data=()), "data", "has no arrays", "pair (x, y)"),
    (lambda: with_target(data=None), "data", "has no arrays", "Give a pytree of arrays"),
    (lambda: with_target(data=(X[:0], Y[:0])), "data", "is empty", "at least one example"),
    (lambda: with_target(data=(spoilt(np.nan), Y)), "data", "NaN or Inf in leaf '0'", "impute"),
    (lambda: with_target(data={"x": spoilt(np.inf)}), "data", "NaN or Inf in leaf 'x'", "Remove"),
    (lambda: with_target(data=(X, np.where(Y, 1, np.nan))), "data", "leaf '1'", "Remove or impute"),
    (lambda: with_target(data=np.full(3, np.nan, jnp.bfloat16)), "data", "NaN", "Remove"),
    (lambda: with_target(data=np.full(3, np.nan * 1j)), "data", "NaN", "Remove"),
    (lambda: with_target(data=np.ma.masked_less(X, 0)), "data", "masked entries", "Remove or impute"),
    (
        lambda: with_target(data=(X, Y[:7])),
        "data",
        "leaves differ in length: '0' has 12, '1' has 7",
        "one row per example",
    ),
    (lambda: with_target(data=(X, 3.0)), "data", "leaf '1' is a number", "leading axis"),
    (lambda: with_target(data=([0.1, 0.2], [1, 0])), "data", "leaf '0/0' is a number", "make lists arrays"),
    (lambda: with_target(data=(X, Y.astype(object))), "data", "has type object in leaf '1'", "numbers"),
    (lambda: with_target(data=np.array(["a", "b"])), "data", "has type <U1", "code categories"),
    (lambda: with_target(data=np.array(["2020-01-01"], "M8[D]")), "data", "datetime64[D]", "code"),
    (lambda: with_target(data=iter([X])), "data", "(a list_iterator)", "Target.from_batches"),
    (lambda: with_target(data=np.array([1, 2**40])), "data", "do not fit in int32", "Rescale"),
    (lambda: with_target(data=np.array([1, 1e300])), "data", "do not fit in float32", "Rescale"),
    (lambda: target(batch_size=13), "batch_size", "is 13, with 12 examples", "at most"),
    (lambda: target(batch_size=0), "batch_size", "is 0", "an integer of at least 1"),
    (lambda: target(batch_size=2.5), "batch_size", "is 2.5", "an integer of at least 1"),
    (lambda: target(batch_size=4.0), "batch_size", "is 4.0", "an integer of at least 1"),
    (lambda: target(batch_size=True), "batch_size", "is True", "an integer of at least 1"),
    (lambda: target(batching="epoch"), "batching", "is 'epoch'", '"replacement" or "epochs"'),
    # functions
    (
        lambda: with_target(lambda p, b: jnp.mean(log_likelihood(p, b)), batch_size=4),
        "log_likelihood",
        "one number for the whole batch, not one for each of its 4 examples",
        "leave out the mean or sum: the factor N/|B| is the library's",
    ),
    (
        lambda: with_target(lambda p, b: log_likelihood(p, b)[:, None]),
        "log_likelihood",
        "gives shape (12, 1) for a batch of 12",
        "an array of shape (12,)",
    ),
    (
        lambda: with_target(lambda p, b: log_likelihood(p, b)[:, None] + b[1]),
        "log_likelihood",
        "gives shape (12, 12)",
        "an array of shape (12, 1) may have met one of shape (12,)",
    ),
    (
        lambda: with_target(lambda p, b: log_likelihood(p, (X, Y)), batch_size=4),
        "log_likelihood",
        "gives shape (12,) for a batch of 4",
        "one log-likelihood for each example",
    ),
    (lambda: with_target(lambda p, b: b[1] * 1), "log_likelihood", "type int32", "floating-point"),
    (lambda: with_target(lambda p, b: (b[0],)), "log_likelihood", "gives tuple", "one array"),
    (lambda: target(None), "log_likelihood", "is NoneType and not a function", "Give a function"),
    (lambda: with_target(lambda p: 0.0), "log_likelihood", "TypeError", "Call it by hand"),
    (lambda: with_target(lambda p, b: p["v"]), "log_likelihood", "KeyError: 'v'", "Call it by hand"),
    (lambda: with_target(lambda p, b: b[0].T @ p["w"]), "log_likelihood", "TypeError", "by hand"),
    (lambda: with_target(lambda p, b: np.exp(p["b"])), "log_likelihood", "TracerArray", "use jax.numpy"),
    (lambda: with_target(lp=lambda p: p["w"]), "log_prior", "gives shape (2,)", "Return the sum"),
    (lambda: target(lp=0.0), "log_prior", "is float and not a function", "Give a function"),
    (
        lambda: sample(hk.Target.from_log_density(lambda p: -p["w"])),
        "log_density",
        "gives shape (2,)",
        "Return the sum",
    ),
    (lambda: hk.Target.from_log_density(3), "log_density", "is int", "Give a function"),
    # batches of one's own
    (lambda: stream(iter(batches(4))), "batches", "only once", "a function chain -> iterable"),
    (lambda: stream(b for b in batches(4)), "batches", "only once", "a function chain -> iterable"),
    (lambda: stream(3), "batches", "is int", "Give an iterable"),
    (lambda: stream([]), "batches", "yields nothing", "at least one batch"),
    (lambda: stream(lambda: batches(4)), "batches", "TypeError", "error above"),
    (lambda: stream([np.array([np.nan])]), "batches", "NaN or Inf", "Remove or impute"),
    (lambda: stream([np.array([None])]), "batches", "type object", "numbers"),
    (lambda: stream(batches(4), 3), "num_examples", "is 3, with batches of 4", "not the number of"),
    (lambda: stream(batches(4), 1e5), "num_examples", "is 100000.0", "an integer"),
    (
        lambda: sample(hk.Target.from_batches(lambda p, b: 0.0 * p["b"], log_prior, batches(4), 9)),
        "log_likelihood",
        "one number for the whole batch",
        "leave out the mean or sum",
    ),
    # start
    (lambda: sample(init={"w": np.zeros(2), "b": 0}), "init", "leaf 'b' has type int32", "1.0, not 1"),
    (lambda: sample(init=[1, 2]), "init", "leaf '0' has type int32", "floating-point"),
    (lambda: sample(init=Y), "init", "leaf 'params' has type bool", "floating-point"),
    (lambda: sample(init=np.ones(2) * 1j), "init", "type complex64", "floating-point"),
    (lambda: sample(init={"w": "zeros"}), "init", "has a str among", "floating-point arrays"),
    (lambda: sample(init=None), "init", "has no parameters", "a function key -> pytree"),
    (lambda: sample(init=np.zeros((0, 3))), "init", "has no parameters", "Give a pytree"),
    (
        lambda: sample(init={"w": np.array([0, np.nan]), "b": 0.0}),
        "init",
        "NaN or Inf in leaf 'w'",
        "Start from finite values",
    ),
    (lambda: sample(init={"w": np.full(2, 1e200), "b": 0.0}), "init", "NaN or Inf in leaf 'w'", "finite"),
    (lambda: sample(init=lambda key: jnp.arange(3)), "init", "has type int32", "1.0, not 1"),
    (lambda: sample(init=lambda key: {}), "init", "has no parameters", "Give a pytree"),
    # what is given
    (lambda: sample(dynamics=hk.SGLD), "dynamics", "not a Dynamics", "SGLD is a class: call it"),
    (lambda: sample(coupling=hk.Elastic), "coupling", "not a Coupling", "Elastic is a class: call it"),
    (lambda: sample(engine=hk.Vectorised), "engine", "not a Engine", "Vectorised is a class: call it"),
    (lambda: sample(coupling="elastic"), "coupling", "is 'elastic'", "Give a Coupling"),
    (lambda: sample(log_prior), "target", "not a Target", "Give a Target"),
    (lambda: sample(dynamics=hk.Elastic(), coupling=hk.SGLD(0.1)), "dynamics", "Elastic(", "Give a Dynamics"),
    # counts
    (lambda: sample(chains=0), "chains", "is 0", "an integer of at least 1"),
    (lambda: sample(chains=4.0), "chains", "is 4.0", "an integer of at least 1"),
    (lambda: sample(chains=True), "chains", "is True", "an integer of at least 1"),
    (lambda: sample(num_steps=0), "num_steps", "is 0", "an integer of at least 1"),
    (lambda: sample(num_steps=2**31), "num_steps", "is 2147483648", "at most 2147483647"),
    (lambda: sample(num_steps=1e4), "num_steps", "is 10000.0", "an integer"),
    (lambda: sample(warmup=-1), "warmup", "is -1", "an integer of at least 0"),
    (lambda: sample(warmup=100), "warmup", "is 100 of 100 steps", "Leave steps"),
    (lambda: sample(warmup=101), "warmup", "is 101 of 100 steps", "Leave steps"),
    (lambda: sample(thin=0), "thin", "is 0", "an integer of at least 1"),
    (lambda: sample(thin=81), "thin", "is 81, with 80 steps after", "thin less"),
    (lambda: sample(seed=-1), "seed", "is -1", "an integer of at least 0"),
    (lambda: sample(seed=2**32), "seed", "is 4294967296", "at most 4294967295"),
    (lambda: sample(seed=0.5), "seed", "is 0.5", "an integer"),
    (lambda: sample(seed=np.zeros(2, np.uint32)), "seed", "is array([0, 0]", "an integer"),
    # dynamics
    (lambda: sample(dynamics=hk.SGLD(0.0)), "step_size", "is 0", "greater than 0"),
    (lambda: sample(dynamics=sghmc(-0.1)), "step_size", "is -0.1", "greater than 0"),
    (lambda: sample(dynamics=hk.SGNHT(np.nan)), "step_size", "is nan", "a finite number"),
    (lambda: sample(dynamics=hk.PSGLD(np.inf)), "step_size", "is inf", "a finite number"),
    (lambda: sample(dynamics=sghmc(None)), "step_size", "is None", "a number or a schedule"),
    (lambda: sample(dynamics=sghmc("0.1")), "step_size", "is '0.1'", "a number or a schedule"),
    (lambda: sample(dynamics=sghmc(True)), "step_size", "is True", "a number or a schedule"),
    (lambda: sample(dynamics=sghmc([0.1, 0.2])), "step_size", "is [0.1, 0.2]", "a number or a schedule"),
    (lambda: sample(dynamics=sghmc(TWO)), "step_size", "is Array([1., 1.]", "a number or a"),
    (lambda: sample(dynamics=hk.ScaleAdaptedSGHMC(0)), "step_size", "is 0", "greater than 0"),
    (lambda: sample(dynamics=sghmc(0.1, -1.0)), "friction", "is -1", "at least 0"),
    (lambda: sample(dynamics=hk.SGNHT(0.1, -1.0)), "friction", "is -1", "at least 0"),
    (lambda: sample(dynamics=hk.SGLD(0.1, temperature=-1)), "temperature", "is -1", "at least 0"),
    (lambda: sample(dynamics=sghmc(0.1, mass=0)), "mass", "is 0", "greater than 0"),
    (
        lambda: sample(dynamics=sghmc(0.1, mass={"w": np.array([1.0, -2.0]), "b": 1.0})),
        "mass",
        "is -2",
        "greater than 0",
    ),
    (lambda: sample(dynamics=sghmc(0.1, mass=falls)), "mass", "cannot change in time", "pytree"),
    (
        lambda: sample(dynamics=sghmc(0.1, mass={"w": np.ones((3, 2)), "b": 1.0})),
        "dynamics",
        "turns leaf 'position/w' from float32[2] into float32[3, 2]",
        "mass=, must be like the parameters",
    ),
    (
        lambda: sample(dynamics=sghmc(0.1, mass={"v": 1.0})),
        "dynamics",
        "SGHMC cannot step on these parameters",
        "mass=, must be like the parameters",
    ),
    (lambda: sample(dynamics=sghmc(0.1, noise_estimate=-1)), "noise_estimate", "is -1", "least 0"),
    (
        lambda: sample(dynamics=sghmc(0.1, noise_estimate=0.1, integrator="obabo")),
        "noise_estimate",
        "no place in the exact O step",
        "semi_implicit",
    ),
    (lambda: sample(dynamics=sghmc(0.1, integrator="euler")), "integrator", "is 'euler'", "obabo"),
    (lambda: sample(dynamics=sghmc(0.1, refresh_every=0)), "refresh_every", "is 0", "at least 1"),
    (lambda: sample(dynamics=sghmc(0.1, refresh_every=2)), "refresh_every", "is 2", "obabo"),
    (lambda: sample(dynamics=hk.SGNHT(0.1, inertia=0)), "inertia", "is 0", "greater than 0"),
    (lambda: sample(dynamics=hk.PSGLD(0.1, decay=1.0)), "decay", "is 1", "at least 0 and less than 1"),
    (lambda: sample(dynamics=hk.PSGLD(0.1, scale=-1)), "scale", "is -1", "greater than 0"),
    (lambda: sample(dynamics=hk.PSGLD(0.1, damping="1")), "damping", "is '1'", "Give a number"),
    (
        lambda: sample(dynamics=hk.ScaleAdaptedSGHMC(0.1, momentum_decay=1)),
        "momentum_decay",
        "is 1",
        "greater than 0 and less than 1",
    ),
    (lambda: sample(dynamics=hk.ScaleAdaptedSGHMC(0.1, adapt_steps=-1)), "adapt_steps", "is -1", "least 0"),
    # learning rates
    (lambda: sghmc.from_learning_rate(-0.1, target=TARGET), "learning_rate", "is -0.1", "greater than 0"),
    (lambda: hk.SGLD.from_learning_rate(0, target=TARGET), "learning_rate", "is 0", "greater than 0"),
    (lambda: hk.SGLD.from_learning_rate("a", target=TARGET), "learning_rate", "is 'a'", "Give a number"),
    (lambda: sghmc.from_learning_rate(0.1, 1.0, target=TARGET), "momentum", "is 1", "at least 0 and less than 1"),
    (lambda: sghmc.from_learning_rate(0.1, mass=-1, target=TARGET), "mass", "is -1", "greater than 0"),
    (lambda: sghmc.from_learning_rate(0.1, target=X), "target", "no number of examples", "to sample"),
    # couplings
    (lambda: sample(coupling=hk.Elastic(-1.0)), "alpha", "is -1", "at least 0"),
    (lambda: sample(coupling=hk.Elastic("strong")), "alpha", "is 'strong'", "a number or a schedule"),
    (lambda: sample(coupling=hk.Elastic(every=0)), "every", "is 0", "at least 1"),
    (lambda: sample(coupling=hk.Elastic(every=0.5)), "every", "is 0.5", "at least 1"),
    (lambda: sample(coupling=hk.StaleGradient(every=0)), "every", "is 0", "at least 1"),
    (lambda: sample(coupling=hk.EASGD(every=-1), dynamics=hk.SGLD(0.1, temperature=0)), "every", "is -1", "at least 1"),
    (lambda: sample(coupling=hk.StaleGradient(wait_for=4)), "wait_for", "is 4, with 3 chains", "at most one from each"),
    (lambda: sample(coupling=hk.StaleGradient(wait_for=0)), "wait_for", "is 0", "at least 1"),
    (
        lambda: sample(coupling=hk.Elastic(friction=1.0), dynamics=hk.SGLD(0.1)),
        "friction",
        "SGLD has none to set for the centre",
        "Leave it out",
    ),
    (lambda: sample(coupling=hk.Elastic(friction=-1.0)), "friction", "is -1", "at least 0"),
    (lambda: sample(coupling=hk.Elastic(mass=0.0)), "mass", "is 0", "greater than 0"),
    (lambda: sample(coupling=hk.ElasticAsPrinted(), dynamics=hk.SGLD(0.1)), "coupling", "SGLD has none", "Use SGHMC"),
    (lambda: sample(coupling=hk.ElasticAsPrinted(noise="big")), "noise", "is 'big'", "printed, sde, chain"),
    (lambda: sample(coupling=hk.EASGD()), "coupling", "is an optimiser, but the temperature is 1", "temperature=0"),
    (
        lambda: sample(coupling=hk.EAMSGD(), dynamics=hk.SGLD(0.1, temperature=0)),
        "coupling",
        "EAMSGD needs momentum, SGLD has none",
        "Use SGHMC",
    ),
    (
        lambda: sample(coupling=hk.EASGD(-0.5), dynamics=hk.SGLD(0.1, temperature=0)),
        "moving_rate",
        "is -0.5",
        "at least 0",
    ),
    (
        lambda: sample(coupling=hk.StaleGradient(), dynamics=hk.PSGLD(0.1)),
        "coupling",
        "needs curvature at the server",
        "gamma=False",
    ),
    # coupling schedules
    (lambda: sample(coupling=hk.Elastic(schedule="release")), "schedule", "is 'release'", "hk.hold()"),
    (lambda: sample(coupling=hk.Elastic(schedule=hk.release)), "schedule", "function", "called"),
    (lambda: sample(coupling=released, warmup=0), "schedule", "warmup is 0", "Give a warmup"),
    (lambda: hk.release(0.8, 0.2), "release", "hold=0.8 and end=0.2", "hold < end <= 1"),
    (lambda: hk.release(end=1.5), "release", "end=1.5", "hold < end <= 1"),
    (lambda: hk.release(over=0), "over", "is 0", "at least 1"),
    (lambda: hk.cycle(1), "period", "is 1", "at least 2"),
    (lambda: hk.cycle(10.5), "period", "is 10.5", "an integer"),
    (lambda: hk.cycle(10, 0.5, 0.5), "cycle", "coupled=0.5 and settle=0.5", "leave room"),
    (lambda: hk.cycle(10, 0.0), "coupled", "is 0", "greater than 0"),
    (
        lambda: sample(coupling=hk.Elastic(schedule=hk.cycle(5)), thin=5, warmup=21),
        "schedule",
        "lets no draw be kept",
        "Thin less",
    ),
    # engines
    (lambda: sample(engine=hk.Simulated(hk.Scenario(latency=-1))), "latency", "is -1", "not negative"),
    (
        lambda: sample(engine=hk.Simulated(hk.Scenario(step_time=[1.0, 2.0]))),
        "step_time",
        "has shape (2,)",
        "Give one number, or 3",
    ),
]


def names(cases: list[tuple[Callable[[], Any], str, str, str]]) -> list[str]:
    return [f"{argument} {problem}" for _, argument, problem, _ in cases]


@pytest.mark.parametrize(("act", "argument", "problem", "remedy"), BAD, ids=names(BAD))
def test_the_error_names_the_argument_and_the_remedy(
    act: Callable[[], Any], argument: str, problem: str, remedy: str, compiled: list[str]
) -> None:
    with pytest.raises(hk.ArgumentError) as caught:
        act()
    error = caught.value
    assert isinstance(error, ValueError) and isinstance(error, hk.HookeanError)
    assert error.argument == argument
    assert str(error).startswith(f"{argument}: ")
    assert problem in str(error)
    assert remedy in str(error).split(problem)[1]
    assert len(str(error)) < 400 and "\n" not in str(error)
    assert not compiled


# Here functions of the user's own have to be called with numbers, and JAX compiles their operations; no more than that.
BAD_FUNCTIONS: list[tuple[Callable[[], Any], str, str, str]] = [
    (lambda: sample(dynamics=hk.SGLD(falls)), "step_size", "at step 11", "greater than 0"),
    (lambda: sample(dynamics=sghmc(0.1, falls)), "friction", "at step 11", "at least 0"),
    (lambda: sample(dynamics=hk.SGLD(0.1, temperature=falls)), "temperature", "step 11", "least 0"),
    (lambda: sample(dynamics=hk.SGLD(later_nan)), "step_size", "is nan at step 61", "finite"),
    (
        lambda: sample(dynamics=hk.SGLD(optax.linear_schedule(0.1, 0.0, 50))),
        "step_size",
        "is 0 at 50% of all steps, first at step 50",
        "end later",
    ),
    (lambda: sample(coupling=hk.Elastic(falls)), "alpha", "at step 11", "at least 0"),
    (lambda: sample(coupling=hk.Elastic(friction=falls)), "friction", "step 11", "least 0"),
    (
        lambda: sample(coupling=hk.EASGD(falls), dynamics=hk.SGLD(0.1, temperature=0)),
        "moving_rate",
        "at step 11",
        "at least 0",
    ),
    (
        lambda: sample(dynamics=sghmc.from_learning_rate(falls, target=TARGET)),
        "learning_rate",
        "at step 11",
        "greater than 0",
    ),
    (
        lambda: sample(dynamics=hk.SGLD.from_learning_rate(falls, target=TARGET)),
        "learning_rate",
        "at step 11",
        "greater than 0",
    ),
    (
        lambda: sample(dynamics=sghmc.from_learning_rate(0.1, falls, target=TARGET)),
        "momentum",
        "at step 11",
        "at least 0 and less than 1",
    ),
    (
        lambda: sample(dynamics=hk.SGLD(lambda step: 0.1 if step < 10 else 0.01)),
        "step_size",
        "cannot be compiled (TracerBool",
        "jnp.where in place of if",
    ),
    (lambda: sample(dynamics=hk.SGLD(lambda step: jnp.ones(3) * step)), "step_size", "gives shape (3,)", "one number"),
    (lambda: sample(init=lambda: INIT), "init", "failed (TypeError: ", "a function key -> pytree"),
    (
        lambda: sample(init=lambda key: {**INIT, "b": jnp.log(-jax.random.uniform(key))}),
        "init",
        "NaN or Inf in leaf 'b' of chain 0",
        "finite",
    ),
    (
        lambda: sample(init=lambda key: {**INIT, "u": np.zeros(int(jax.random.randint(key, (), 1, 9)))}),
        "init",
        "different structure or shapes",
        "the same for all keys",
    ),
    (
        lambda: sample(coupling=hk.Elastic(alpha=1e4), dynamics=hk.SGLD(0.1)),
        "alpha",
        "the centre explodes (it grows 999-fold each step)",
        "Take a smaller alpha",
    ),
    (lambda: sample(coupling=hk.ElasticAsPrinted(), dynamics=sghmc(0.1, 0.0)), "friction", "is 0", "greater than 0"),
]


@pytest.mark.parametrize(("act", "argument", "problem", "remedy"), BAD_FUNCTIONS, ids=names(BAD_FUNCTIONS))
def test_the_error_is_found_by_calling_the_function(
    act: Callable[[], Any], argument: str, problem: str, remedy: str, compiled: list[str]
) -> None:
    with pytest.raises(hk.ArgumentError) as caught:
        act()
    assert caught.value.argument == argument
    assert problem in str(caught.value) and remedy in str(caught.value)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    assert not [name for name in compiled if "program" in name or "begin" in name]


def test_a_check_of_its_own_finds_the_same() -> None:
    with pytest.raises(hk.ArgumentError, match="friction: is -1"):
        hk.SGHMC(0.1, -1.0).check(10)
    with pytest.raises(hk.ArgumentError, match="wait_for: is 9, with 3 chains"):
        hk.StaleGradient(wait_for=9).check(hk.SGHMC(0.1), 3, 10)
    with pytest.raises(hk.ArgumentError, match="init: leaf 'w' has type int32"):
        TARGET.check({"w": np.zeros(2, np.int32), "b": np.zeros(())})


# -- what is not wrong -------------------------------------------------------------------------------------------------


class Frame:
    """As much of a data frame as an array can be made of."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.values, dtype)


def test_integers_of_any_library_and_arrays_as_settings() -> None:
    three = [np.int64(3), np.uint8(3), np.array(3), jnp.asarray(3)]
    for number in three:
        settings = dict(dynamics=hk.SGHMC(0.1), engine=Stub(), seed=number)
        job = prepare(
            target(batch_size=number),
            INIT,
            coupling=hk.StaleGradient(number, number),
            chains=number,
            num_steps=number * 5,
            warmup=number,
            thin=number,
            **settings,
        )
        assert (job.chains, job.num_steps, job.warmup, job.thin) == (3, 15, 3, 3)
        assert job.target.batch_size == 3 and isinstance(job.target.batch_size, int)
        assert stream(batches(2), number).num_examples == 3
        assert hk.cycle(number).period == 3 and hk.release(over=number).period == 3
    for setting in (np.float64(0.25), np.float32(0.25), np.array(0.25), jnp.asarray(0.25)):
        hk.SGHMC(setting, setting, setting, noise_estimate=setting, temperature=setting).check(10)
        hk.SGLD.from_learning_rate(setting, target=TARGET).check(10)
        found = hk.SGHMC.from_learning_rate(setting, setting, target=TARGET, mass=setting)
        assert float(found.step_size) == pytest.approx((0.25 * 0.25 / 12) ** 0.5)
        hk.Elastic(setting, friction=setting, mass=setting).check(hk.SGHMC(0.1), 3, 10)


@pytest.mark.parametrize(
    "schedule",
    [
        optax.constant_schedule(0.1),
        optax.cosine_decay_schedule(0.1, 100),
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 20, 100),  # 0 at the first step
        optax.exponential_decay(0.1, 10, 0.9),
        optax.polynomial_schedule(0.1, 0.01, 0.55, 100),
        optax.piecewise_constant_schedule(0.1, {50: 0.1}),
        lambda step: 0.1 * (1 + step) ** -0.55,
    ],
)
def test_schedules_of_optax_fit_as_they_are(schedule: Any) -> None:
    hk.SGLD(schedule, temperature=schedule).check(100)
    hk.SGLD.from_learning_rate(schedule, target=TARGET).check(100)
    hk.SGHMC.from_learning_rate(schedule, optax.linear_schedule(0.5, 0.9, 50), target=TARGET).check(100)
    hk.Elastic(schedule, friction=schedule).check(hk.SGHMC(0.1), 3, 100)


def test_a_cosine_that_is_rounded_to_0_at_its_end() -> None:
    schedule = optax.cosine_decay_schedule(0.1, 50_000)
    assert float(schedule(49_999)) == 0
    found = hk.SGHMC.from_learning_rate(schedule, target=TARGET)
    found.check(50_000)
    assert float(found.friction(49_999)) == 0  # where the step is 0, nothing moves
    with pytest.raises(hk.ArgumentError, match=r"learning_rate: is 0 at 17% of all steps, first at step 49"):
        found.check(60_000)


def test_everything_at_once_runs() -> None:
    """Arrays of other libraries, boolean labels, other integers, float64, schedules: one run of it all."""
    given = hk.Target(log_likelihood, log_prior, (Frame(X), Frame(Y)), batch_size=np.int64(4), batching="epochs")
    run = hk.sample(
        given,
        {"w": np.zeros(2, np.float64), "b": 0.5},
        dynamics=hk.SGHMC(optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 20), np.float64(1.0), mass=jnp.asarray(2.0)),
        coupling=hk.Elastic(optax.constant_schedule(1.0), every=np.int32(2), friction=np.float32(0.5)),
        chains=np.int64(2),
        num_steps=np.int64(20),
        warmup=np.int16(4),
        thin=np.array(4),
        seed=np.uint32(2**32 - 1),
        progress=False,
    )
    assert run.draws["w"].shape == (2, 4, 2) and run.draws["w"].dtype == np.float32
    assert np.all(np.isfinite(run.draws["w"])) and np.ptp(run.draws["w"]) > 0
    assert "COUPLED" in run.summary()


# -- settings known beforehand to be unstable --------------------------------------------------------------------------


def test_the_explicit_order_warns_with_numbers_where_it_explodes() -> None:
    steep = hk.Target.from_log_density(lambda x: -0.5 * (12.0 * x[0] ** 2 + x[1] ** 2))
    with pytest.warns(hk.HookeanWarning) as caught:
        sample(steep, init=np.ones(2), dynamics=hk.SGHMC(0.1, 1.0, integrator="explicit"))
    (warning,) = caught
    text = str(warning.message)
    assert warning.filename == __file__
    assert "friction / step_size = 10" in text and "at the start it is 12 (12 measured, 0 springs)" in text
    assert 'integrator="semi_implicit"' in text and "below 0.83 of this one" in text


def test_springs_count_as_curvature() -> None:
    flat = hk.Target.from_log_density(lambda x: -0.5 * (8.0 * x[0] ** 2 + x[1] ** 2))
    explicit = {"init": np.ones(2), "dynamics": hk.SGHMC(0.1, 1.0, integrator="explicit")}
    sample(flat, **explicit)  # 8 < 10: no warning, or this would fail
    with pytest.warns(hk.HookeanWarning, match=r"11 \(8 measured, 3 springs\)"):
        sample(flat, **explicit, coupling=hk.Elastic(9.0))


def test_curvature_is_measured_on_the_data_and_a_good_order_does_not_warn() -> None:
    x = np.linspace(-1, 1, 3000)  # more than the measurement takes: its estimate is scaled up
    curvature = 1 + np.sum(x**2)
    line = hk.Target(lambda p, b: -0.5 * (b * p) ** 2, lambda p: -0.5 * p**2, x, batch_size=10)
    for limit, warns in ((0.95 * curvature, True), (1.05 * curvature, False)):
        for integrator in ("explicit", "semi_implicit", "obabo"):
            settings = dict(init=0.0, dynamics=hk.SGHMC(1 / limit, 1.0, integrator=integrator))
            if warns and integrator == "explicit":
                with pytest.warns(hk.HookeanWarning, match="explodes"):
                    sample(line, **settings)
            else:
                sample(line, **settings)


def test_a_start_without_curvature_is_left_to_the_run() -> None:
    edge = hk.Target.from_log_density(lambda x: jnp.sqrt(-1 - x**2))
    sample(edge, init=1.0, dynamics=hk.SGHMC(0.1, integrator="explicit"))


def test_a_noise_estimate_above_the_noise_warns_with_numbers() -> None:
    with pytest.warns(
        hk.HookeanWarning, match=r"eps\^2 B = 0\.3 exceeds .* 2 eps T V = 0\.2; .* clipped to 0"
    ) as caught:
        sample(dynamics=hk.SGHMC(0.1, noise_estimate=30.0))
    assert caught[0].filename == __file__
    sample(dynamics=hk.SGHMC(0.1, noise_estimate=19.0))


def test_a_release_after_the_warmup_warns() -> None:
    with pytest.warns(hk.HookeanWarning, match="let go at step 45, but draws are kept from step 20 on"):
        sample(coupling=hk.Elastic(schedule=hk.release(over=60)))
    sample(coupling=hk.Elastic(schedule=hk.release(over=26)))


# -- chains that break -------------------------------------------------------------------------------------------------

EDGE, SLOPE = 1.0, 0.02


def cliff(kind: str) -> hk.Target:
    """`b` climbs by SLOPE each step of size 1 (at temperature 0) until it is beyond EDGE, where something breaks.

    "gradient": the gradient is NaN, but the potential is finite; "potential": the potential is NaN.
    """

    def log_density(p: Any) -> jax.Array:
        root = jnp.sqrt(EDGE - p["b"])
        beyond = 0.0 * jnp.where(p["b"] > EDGE, 0.0, root) if kind == "gradient" else 0.0 * root
        return SLOPE * p["b"] - 0.5 * jnp.sum(p["a"] ** 2) - 1e-6 * p["b"] * jnp.sum(p["a"]) + beyond

    return hk.Target.from_log_density(log_density)


def cliff_start(key: jax.Array) -> Any:
    return {"a": jnp.ones(2), "b": jax.random.uniform(key, (), minval=0.0, maxval=0.6)}


def steps_until_beyond(start: Any) -> int:
    b, steps = np.float32(start), 0
    while b <= EDGE:
        b, steps = np.float32(b + np.float32(SLOPE)), steps + 1
    return steps


WARMUP, THIN = 4, 3


def break_it(kind: str, engine: Engine, coupling: Any = None, chains: int = 4) -> tuple[Any, np.ndarray]:
    """The error, and after how many steps each chain goes beyond the edge."""
    with pytest.raises(hk.DivergenceError) as caught:
        hk.sample(
            cliff(kind),
            cliff_start,
            dynamics=hk.SGLD(1.0, temperature=0),
            coupling=coupling,
            chains=chains,
            num_steps=500,
            warmup=WARMUP,
            thin=THIN,
            engine=engine,
            progress=False,
        )
    error = caught.value
    assert isinstance(error, FloatingPointError) and isinstance(error, hk.HookeanError)
    assert isinstance(error.run, hk.Run)
    beyond = np.array([steps_until_beyond(b) for b in error.run.job.starts["b"]])
    assert len(set(beyond)) == chains
    return error, beyond


def kept_until(step: int) -> int:
    return max(0, (step - WARMUP) // THIN)


def test_a_broken_chain_is_named_with_step_and_leaf() -> None:
    error, beyond = break_it("gradient", hk.Vectorised())
    chain = int(np.argmin(beyond))
    step = beyond[chain] + 1  # beyond the edge the gradient is NaN, and b one step later
    assert (error.chain, error.step, error.leaf) == (chain, step, "b")
    assert f"chain {chain} turned NaN or Inf at step {step}, in leaf 'b'" in str(error)
    assert "smaller step_size" in str(error)
    run = error.run
    for leaf in (*jax.tree.leaves(run.draws), run.stats["potential"]):
        assert leaf.shape[:2] == (4, kept_until(step - 1)) and np.all(np.isfinite(leaf))
    assert f"{kept_until(step - 1)} draws of each kept" in run.summary()


def test_a_potential_alone_can_break() -> None:
    error, beyond = break_it("potential", hk.Vectorised(), hk.Elastic(0.0, every=4))
    chain = int(np.argmin(beyond))
    assert (error.chain, error.step, error.leaf) == (chain, beyond[chain], None)
    assert re.search(f"chain {chain} .* at step {beyond[chain]}, in its potential", str(error))
    assert error.run.draws["b"].shape == (4, kept_until(beyond[chain]))
    assert "draws of each kept" in error.run.summary()


@pytest.mark.parametrize("kind", ["gradient", "potential"])
def test_a_broken_chain_on_the_simulated_clock(kind: str) -> None:
    """Asynchronous: the chain that breaks first is the one whose clock comes there first."""
    scenario = hk.Scenario(step_time=(1.0, 1.3, 1.7, 2.9), latency=0.4)
    error, beyond = break_it(kind, hk.Simulated(scenario), hk.Elastic(0.0, every=3))
    step = beyond + 1 if kind == "gradient" else beyond
    first = int(np.argmin(np.ceil(step / 3) * 3 * scenario.step_time))  # in the round of 3 steps in which it happens
    assert (error.chain, error.step) == (first, step[first])
    assert error.leaf == ("b" if kind == "gradient" else None)
    run = error.run
    there = np.isfinite(run.draws["b"])
    assert there.any(0).all() and there[first].sum() == kept_until(beyond[first])
    assert np.array_equal(there, np.sort(there, 1)[:, ::-1])  # each chain's draws from the first one on
    assert np.array_equal(there, np.isfinite(run.stats["potential"]))
    assert ("missing" in run.summary()) == (not there.all())


@pytest.mark.parametrize("engine", [hk.Vectorised(), hk.Simulated()])
def test_a_server_whose_gradient_breaks(engine: Engine) -> None:
    error, _ = break_it("gradient", engine, hk.StaleGradient(1, 2), chains=2)
    beyond = steps_until_beyond(error.run.job.starts["b"][0])
    assert (error.chain, error.leaf) == (0, "b") and "the server's chain turned NaN or Inf" in str(error)
    assert beyond <= error.step <= beyond + 2
    draws = error.run.draws["b"]
    assert draws.shape == (1, kept_until(beyond)) and np.all(np.isfinite(draws))
    assert "draws of each kept" in error.run.summary()
