"""What a run says while it goes on, and how much memory it says it will take, and takes."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hookean as hk
from hookean import progress
from hookean.engines import Engine
from hookean.engines.base import carry_out
from hookean.job import Job, Progress
from hookean.preparation import prepare
from hookean.progress import Display
from hookean.recorder import Recorder
from hookean.telemetry import Telemetry
from hookean.tree import num_bytes

TARGET = hk.Target.from_log_density(lambda p: -0.5 * sum(jnp.sum(leaf**2) for leaf in p.values()))
INIT = {"a": np.zeros((3, 2)), "b": np.zeros(())}
SETTINGS: dict[str, Any] = {"dynamics": hk.SGHMC(0.1), "chains": 3, "num_steps": 60, "warmup": 10, "thin": 5}


# -- a real run --------------------------------------------------------------------------------------------------------


class Noting(io.StringIO):
    """Notes what had been compiled when it was first written to."""

    def __init__(self, compiled: list[str]) -> None:
        super().__init__()
        self.compiled, self.before = compiled, None

    def write(self, text: str) -> int:
        if self.before is None:
            self.before = list(self.compiled)
        return super().write(text)


def test_a_run_forecasts_its_memory_before_it_compiles_and_ends_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled: list[str] = []

    def listen(event: str, duration: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(about.get("fun_name", "?"))

    stream = Noting(compiled)
    monkeypatch.setattr("sys.stderr", stream)
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run = hk.sample(TARGET, INIT, coupling=hk.Elastic(every=5), engine=hk.Vectorised(), **SETTINGS)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    programs = {"jit(begin)", "jit(program)"}
    assert programs <= set(compiled) and not programs & set(stream.before)
    # 3 chains x 10 draws x (7 parameters + 6 statistics) x 4 bytes
    headline, memory, *_, end = stream.getvalue().splitlines()  # a slow machine has time to show progress between
    assert headline.startswith("SGHMC x Elastic: 3 chains x 60 steps, 3 x 10 draws kept; Vectorised: ")
    assert memory.startswith("memory: 1.5 KiB for the draws, ")
    number = r"[\d,]+\.?\d*"
    assert re.fullmatch(
        rf"60 steps in {number} s, {number} s of them to compile: ({number} steps/s, ({number} exchanges/s, )?)?"
        rf"potential {number}, temperature {number}",
        end,
    )
    draws = num_bytes((run.draws, run.stats))
    workers = num_bytes((run.info["final"], run.job.starts))
    assert (draws, workers) == run.job.forecast_bytes()
    assert draws == 3 * 10 * (7 + 6) * 4
    assert capsys.readouterr().out == ""  # which is for data


def test_a_silent_run_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    hk.sample(TARGET, INIT, progress=False, **SETTINGS)
    assert capfd.readouterr() == ("", "")


# -- memory ------------------------------------------------------------------------------------------------------------

ENGINES = {"vectorised": hk.Vectorised(), "simulated": hk.Simulated()}
SIZE = 5000


@pytest.mark.parametrize("coupling", [hk.Elastic(every=25), hk.StaleGradient(5, 2)], ids=["elastic", "stale"])
@pytest.mark.parametrize("engine", ENGINES)
def test_memory_holds_only_what_is_kept(engine: str, coupling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By XLA's own account of the compiled loop: draws are written in place, and beside them only states are needed."""
    analysed: list[Any] = []
    jit = jax.jit

    def analysing(function: Any, **options: Any) -> Any:
        def call(*arguments: Any) -> Any:
            compiled = jit(function, **options).lower(*arguments).compile()
            analysed.append((function.__name__, compiled.memory_analysis()))
            return compiled(*arguments)

        return call if getattr(function, "__name__", "") == "program" else jit(function, **options)

    class All(Engine):
        """Runs at once all that the tested engine would run piece by piece."""

        summary = "all at once"

        def run(self, job: Job, recorder: Any, saved: Any = None) -> Any:
            with monkeypatch.context() as patched:
                patched.setattr(jax, "jit", analysing)
                return ENGINES[engine].run(job, recorder)

    settings = {"chains": 2, "num_steps": 100, "thin": 50, "progress": False}
    init = {"a": np.zeros(SIZE)}
    run = hk.sample(TARGET, init, dynamics=hk.SGLD(0.1), coupling=coupling, engine=All(), **settings)
    name, memory = analysed[0]
    assert name == "program"
    draws, states = run.job.forecast_bytes()
    assert draws == num_bytes((run.draws, run.stats))
    assert memory.alias_size_in_bytes >= draws  # in place
    everything = 2 * 100 * SIZE * 4
    assert memory.temp_size_in_bytes < 6 * states < everything / 4


# -- what an engine tells ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coupling", [hk.Independent(), hk.StaleGradient(2, 2)], ids=["independent", "stale"])
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_tell_step_potential_and_temperature(engine: str, coupling: Any) -> None:
    job = prepare(TARGET, INIT, coupling=coupling, engine=ENGINES[engine], seed=0, **SETTINGS)
    told: list[Progress] = []
    result = carry_out(ENGINES[engine], job, Recorder(job, told.append))
    steps = [news.step for news in told]
    assert steps == sorted(steps) and 0 <= steps[0] and steps[-1] == 60 and len(told) > 1
    assert all(isinstance(value, int | float) for value in told[-1])
    workers, centre = result.info["final"]
    momentum = (centre if job.coupling.server_owns_chain else workers).state.momentum
    mean = np.mean(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(momentum)]) ** 2)
    assert told[-1].temperature == pytest.approx(mean, rel=1e-5)
    assert 0 < told[-1].potential < 30


# -- the display -------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time stands still unless told."""
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: found.now))
    for name in ("TERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    return found


def show(stream: io.StringIO, clock: SimpleNamespace, news: list[tuple[float, Progress]], shown: bool = True) -> str:
    with Display(shown, "what is run", 1000, stream) as display:
        for seconds, one in news:
            clock.now = 100.0 + seconds
            display.update(one)
    return stream.getvalue()


NEWS = [(5.0, Progress(100, 1234.5, 2.0)), *((5.0 + k, Progress(100 + 30 * k, 50.0, 1.01)) for k in range(1, 31))]


def test_no_terminal_gets_a_line_now_and_then(clock: SimpleNamespace) -> None:
    lines = show(io.StringIO(), clock, NEWS).splitlines()
    assert lines == [
        "what is run",
        "step 280 of 1,000, 30 steps/s, potential 50, temperature 1.01, 24 s left",
        "step 610 of 1,000, 30 steps/s, potential 50, temperature 1.01, 13 s left",
        "step 940 of 1,000, 30 steps/s, potential 50, temperature 1.01, 2 s left",
        "1,000 steps in 35.0 s, 5.0 s of them to compile: 30 steps/s, potential 50, temperature 1.01",
    ]


def test_what_is_not_known_is_not_said(clock: SimpleNamespace) -> None:
    """No pace from one piece of news, no temperature of a dynamics without momenta, no NaN."""
    nan = float("nan")
    lines = show(io.StringIO(), clock, [(20.0, Progress(10, nan, nan)), (40.0, Progress(20, 3.0, nan))]).splitlines()
    assert lines[1] == "step 10 of 1,000"
    assert lines[2] == "step 20 of 1,000, 0.50 steps/s, potential 3, 1,960 s left"


def test_exchanges_and_faults_are_counted_where_there_are_some(clock: SimpleNamespace) -> None:
    stream = io.StringIO()
    with Display(True, "what is run", 1000, stream) as display:
        display.telemetry = Telemetry(exchanges=100)  # of a run that goes on
        for seconds, one in NEWS:
            clock.now = 100.0 + seconds
            display.telemetry.exchanges += 60
            display.update(one)
            display.telemetry.lost = 3
        display.telemetry.rolled_back = 20
    *_, line, end = stream.getvalue().splitlines()
    assert line.startswith(
        "step 940 of 1,000, 30 steps/s, 60 exchanges/s, potential 50, temperature 1.01, faults: lost 3, "
    )
    assert end.endswith("30 steps/s, 60 exchanges/s, potential 50, temperature 1.01, faults: lost 3 rolled back 20")


def test_a_terminal_gets_a_bar(clock: SimpleNamespace) -> None:
    shown = show(Terminal(), clock, NEWS[:16])
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    frames = [frame.strip() for frame in re.split(r"[\r\n]", text) if frame.strip()]
    assert frames[0] == "what is run"
    assert frames[1].startswith("compiling ━") and "0/1,000" in frames[1]
    assert frames[-2].startswith("sampling ━") and "550/1,000" in frames[-2]
    assert frames[-2].endswith("30 steps/s, potential 50, temperature 1.01")
    assert re.search(r" \d+:\d\d:\d\d ", frames[-2])  # time left
    assert frames[-1] == "550 steps in 20.0 s, 5.0 s of them to compile: 30 steps/s, potential 50, temperature 1.01"
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is back


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_silence(stream: type[io.StringIO], clock: SimpleNamespace) -> None:
    assert show(stream(), clock, NEWS, shown=False) == ""


def test_an_error_ends_the_bar_and_no_success_is_claimed(clock: SimpleNamespace) -> None:
    stream = Terminal()
    with pytest.raises(hk.HookeanError), Display(True, "what is run", 1000, stream) as display:
        display.update(NEWS[0][1])
        raise hk.HookeanError
    assert "to compile" not in stream.getvalue()
    assert stream.getvalue().count("\x1b[?25h") == 1
