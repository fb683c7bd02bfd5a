"""The command line as a person meets it: what is printed where, what is saved, and what errors say. About 40 s."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import hookean as hk
from hookean import cli, coupling, demo, dynamics, engines

MODEL = '''\
"""A model."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import hookean as hk

x = np.linspace(-1, 1, 20)
target = hk.Target.from_log_density(lambda p: -(jnp.sum(p["slope"] ** 2) + p["level"] ** 2) / 2)
regression = hk.Target(lambda p, batch: -((batch[0] - p["level"]) ** 2) / 2, lambda p: 0.0, data=(x,), batch_size=5)
steep = hk.Target.from_log_density(lambda p: -p["level"] ** 4 + 0 * jnp.sum(p["slope"]))
init = {"slope": np.zeros(2), "level": np.array(1.0)}
far = {"slope": np.zeros(2), "level": np.array(3.0)}
slack = hk.Elastic(0.5, 3)


def decay(step):
    return 0.1 / (1 + step / 100)


@dataclasses.dataclass(frozen=True)
class Lazy(hk.SGLD):
    """SGLD whose steps are halved."""

    def step(self, state, gradient, noise, step, curvature=None):
        halved = hk.SGLD(lambda step: self.step_size(step) / 2, temperature=self.temperature)
        return halved.step(state, gradient, noise, step, curvature)
'''
SHORT = ["--chains", "3", "--num-steps", "60", "--warmup", "20", "--thin", "5", "--seed", "7"]


@pytest.fixture(autouse=True)
def imports_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's file is imported, and its folder searched; not for longer than a test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop(cli.USER_MODULE, None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def hookean(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def refused(result: Any, code: int = 2) -> str:
    """The error that a command ends with: one line on stderr that closes with a hint, and no data."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert re.search(r"[.:;] \S.*\.$", last), f"no hint: {last}"
    assert "Traceback" not in result.stderr
    return last.removeprefix("error: ")


# -- help and list -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help_names_the_commands(arguments: list[str]) -> None:
    result = hookean(*arguments)
    assert result.exit_code == 0
    assert result.stderr == ""
    for command in cli.app.registered_commands:
        name = command.name or command.callback.__name__
        assert re.search(rf"^  {name} ", result.stdout, flags=re.MULTILINE)
        about = hookean(name, "--help")
        assert about.exit_code == 0
        assert "--" in about.stdout


def test_list_names_all_there_is_with_laws_and_settings() -> None:
    result = hookean("list")
    assert result.exit_code == 0
    assert result.stderr == ""
    shown = " ".join(result.stdout.split())
    for name, kind in {**dynamics.ALL, **coupling.ALL}.items():
        assert name in shown
        assert kind.law.split()[0] in shown
    assert set(engines.ALL) <= set(re.findall(r"\w+", shown))
    assert "SGHMC(step_size, friction=1.0" in shown
    assert "SGLD.from_learning_rate(learning_rate" in shown
    assert "cycle(period" in shown


def test_a_real_process_keeps_data_and_messages_apart() -> None:
    command = [sys.executable, "-m", "hookean", "sample", "absent.py:target", "--dynamics", "SGLD(0.1)"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr == "error: absent.py: no such file. Give a Python file that defines a target and an init.\n"


# -- sample ------------------------------------------------------------------------------------------------------------


def saved_as(run: hk.Run, path: Path) -> None:
    """The file holds the run, and nothing else."""
    with np.load(path) as saved:
        wanted = {f"draws/{name}": leaf for name, leaf in run.draws.items()}
        wanted |= {f"stats/{name}": values for name, values in run.stats.items()} | {"steps": run.job.kept_steps}
        assert set(saved) == set(wanted)
        for name, values in wanted.items():
            assert saved[name].shape == np.shape(values)
            np.testing.assert_array_equal(saved[name], values)


def test_sample_saves_what_the_function_gives_and_prints_its_summary(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "draws.npz"
    result = hookean(
        "sample", f"{model}:target", "--dynamics", "SGHMC(step_size=0.1, friction=2)",
        "--coupling", "Elastic(1, every=4, schedule=release())", *SHORT, "--out", out,
        "--engine", "Vectorised",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    defined = cli._load(model)
    run = hk.sample(
        defined["target"],
        defined["init"],
        dynamics=hk.SGHMC(step_size=0.1, friction=2),
        coupling=hk.Elastic(1, every=4, schedule=hk.release()),
        engine=hk.Vectorised(),
        chains=3,
        num_steps=60,
        warmup=20,
        thin=5,
        seed=7,
        progress=False,
    )
    saved_as(run, out)
    assert run.draws["slope"].shape == (3, 8, 2)
    assert result.stdout == run.summary() + "\n"
    assert f"3 x 8 draws are in {out}" in result.stderr
    assert "SGHMC x Elastic: 3 chains x 60 steps" in result.stderr, "no progress"


def test_dynamics_and_schedules_of_the_users_own(model: Path, tmp_path: Path) -> None:
    """And a start of another name, a coupling that is an object, and silence where it is asked for."""
    out = tmp_path / "draws.npz"
    result = hookean(
        "sample", f"{model}:target", "--init", "far", "--dynamics", "Lazy(decay)", "--coupling", "slack", *SHORT,
        "--out", out, "--no-progress", "--engine", "Vectorised",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Lazy x Elastic: 3 chains")
    assert "steps/s" not in result.stderr
    assert "warning: " not in result.stdout
    defined = cli._load(model)
    same = {"chains": 3, "num_steps": 60, "warmup": 20, "thin": 5, "seed": 7, "progress": False}
    run = hk.sample(
        defined["target"],
        defined["far"],
        dynamics=defined["Lazy"](defined["decay"]),
        coupling=hk.Elastic(0.5, 3),
        engine=hk.Vectorised(),
        **same,
    )
    saved_as(run, out)


def test_a_run_that_diverges_keeps_its_draws_and_exits_with_1(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "draws.npz"
    command = ["sample", f"{model}:steep", "--init", "far", "--dynamics", "SGLD(0.08)", "--num-steps", 50, "--out", out]
    result = hookean(*command)
    message = refused(result, code=1)
    assert re.search(r"chain \d", message)
    assert re.search(r"step \d", message)
    with np.load(out) as saved:
        chains, kept, _ = saved["draws/slope"].shape
        assert (chains, kept) == saved["stats/potential"].shape
        assert kept == len(saved["steps"]) < 50
    assert f"{chains} x {kept} draws kept until then are in {out}" in result.stderr


# -- notation ----------------------------------------------------------------------------------------------------------


def read(option: str, text: str, model: Path, name: str = "target") -> Any:
    known = {"--dynamics": dynamics.ALL, "--coupling": coupling.ALL, "--engine": engines.ALL}[option]
    defined = cli._load(model)
    return cli.Notation(option, {**known, **defined}, defined, defined[name]).read(text)


@pytest.mark.parametrize(
    ("option", "text", "wanted"),
    [
        ("--dynamics", "SGLD(0.1)", hk.SGLD(0.1)),
        ("--dynamics", " sgld( step_size = 1e-1, temperature=0 ) ", hk.SGLD(0.1, temperature=0)),
        ("--dynamics", "SGHMC(0.1, integrator='obabo')", hk.SGHMC(0.1, integrator="obabo")),
        ("--coupling", "Independent", hk.Independent()),
        ("--coupling", "Elastic()", hk.Elastic()),
        ("--coupling", "Elastic(2, schedule=cycle(100))", hk.Elastic(2, schedule=hk.cycle(100))),
        ("--coupling", "Elastic(2, schedule=release)", hk.Elastic(2, schedule=hk.release())),
        ("--engine", "Vectorised", hk.Vectorised()),
        (
            "--engine",
            "Simulated(Scenario(latency=0.5, crashes=[Crash(1, 20)]))",
            hk.Simulated(hk.Scenario(latency=0.5, crashes=[hk.Crash(1, 20)])),
        ),
    ],
)
def test_what_is_written_becomes_what_python_would_make(option: str, text: str, wanted: Any, model: Path) -> None:
    assert read(option, text, model) == wanted


def test_a_learning_rate_knows_the_target(model: Path) -> None:
    made = read("--dynamics", "SGHMC.from_learning_rate(0.2, momentum=0.5)", model, "regression")
    target = cli._load(model)["regression"]
    assert made == hk.SGHMC.from_learning_rate(0.2, momentum=0.5, target=target)
    assert made.step_size == pytest.approx((0.2 / 20) ** 0.5)


def test_names_of_the_file_stand_for_what_they_are(model: Path) -> None:
    defined = cli._load(model)
    notation = cli.Notation("--dynamics", dynamics.ALL, defined, defined["target"])
    assert notation.read("SGLD(decay)").step_size is defined["decay"]
    assert cli.Notation("--coupling", {"slack": defined["slack"]}, defined, None).read("slack") is defined["slack"]
    mapped = notation.read("SGHMC(0.1, mass={'slope': 2.0, 'level': (1, -2.5)})")
    assert mapped.mass == {"slope": 2.0, "level": (1, -2.5)}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "__import__('os').mkdir('MARK')",
        "SGLD(__import__('os').mkdir('MARK'))",
        "SGLD(step_size=open('MARK', 'w'))",
        "SGLD([jnp.zeros(1) for _ in 'a'])",
        "SGLD((lambda: 0.1)())",
        "SGLD(decay(0))",
        "SGLD(0.1 + 0.1)",
        "SGLD(*[0.1])",
        "SGLD(**{'step_size': 0.1})",
        "SGLD.law",
        "SGLD.__class__('MARK')",
        "SGLD.__init__.__globals__",
        "Lazy.step(1)",
        "Path('MARK').touch()",
        "SGLD(0.1); SGLD(0.2)",
        "0.1",
        "",
    ],
)
def test_nothing_is_evaluated_as_code(text: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(hookean("sample", f"{model}:target", "--dynamics", text))
    assert message.startswith("--dynamics")
    assert not Path("MARK").exists()


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "options", "messages"),
    [
        ("absent.py:target", [], ["absent.py: no such file"]),
        ("model.py:targte", [], ["model.py: defines no 'targte'", "Its targets: target, regression, steep"]),
        ("model.py:x", [], ["has a ndarray as 'x', not a Target", "Its targets: target, regression, steep"]),
        ("model.py:target", ["--init", "start"], ["defines no 'start'", "--init: a pytree"]),
        ("model.py:target", ["--dynamics", "SGMHC(0.1)"], ["--dynamics: knows no 'SGMHC'", "Did you mean", "SGHMC"]),
        ("model.py:target", ["--dynamics", "Lasy(0.1)"], ["Did you mean Lazy?"]),
        ("model.py:target", ["--dynamics", "SGLD.from_learnign_rate(1)"], ["Did you mean from_learning_rate?"]),
        (
            "model.py:target",
            ["--dynamics", "SGLD(stepsize=0.1)"],
            ["'step_size'", "SGLD(step_size, *, temperature=1.0)"],
        ),
        ("model.py:target", ["--dynamics", "SGLD"], ["'step_size'", "Its settings are SGLD(step_size"]),
        ("model.py:target", ["--dynamics", "SGLD(-0.1)"], ["step_size: is -0.1", "greater than 0"]),
        ("model.py:target", ["--dynamics", "SGLD(dekay)"], ["knows no 'dekay'", "Did you mean decay?"]),
        ("model.py:target", ["--coupling", "elastik"], ["--coupling: knows no 'elastik'", "Did you mean Elastic"]),
        ("model.py:target", ["--coupling", "Elastic(every=0)"], ["every: is 0"]),
        (
            "model.py:target",
            ["--engine", "Cluster"],
            ["--engine: knows no 'Cluster'", "There is Simulated, Threads, Vectorised"],
        ),
        ("model.py:target", ["--warmup", "10000"], ["warmup: is 10000 of 10000 steps"]),
        ("model.py:target", ["--chains", "0"], ["chains: is 0"]),
        ("model.py:target", ["--out", "draws.csv"], ["--out: is draws.csv", "ends in .npz"]),
        ("model.py:target", ["--out", "no/folder/draws.npz"], ["--out: cannot be written", "a folder that exists"]),
        ("absent.py", ["--out", "folder.npz"], ["--out: cannot be written: folder.npz"]),
    ],
)
def test_errors_name_the_culprit_and_the_remedy(
    where: str, options: list[str], messages: list[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    Path("folder.npz").mkdir()
    given = options if "--dynamics" in options else [*options, "--dynamics", "SGLD(0.1)"]
    said = refused(hookean("sample", where, *given))
    for message in messages:
        assert message in said


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("import hookean as hk\n\ntarget = hk.Target(\n  1 2)\n", ["line 4: SyntaxError"]),
        ("import jax\n\n\nx = 1 / 0\n", ["line 4: ZeroDivisionError: division by zero"]),
        ("def one():\n    return absent\n\none()\n", ["line 2: NameError: name 'absent' is not defined"]),
        ("import absent_package\n", ["line 1: ModuleNotFoundError: No module named 'absent_package'"]),
    ],
)
def test_an_error_in_the_users_file_is_told_with_its_line(source: str, messages: list[str], tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    result = hookean("sample", f"{path}:target", "--dynamics", "SGLD(0.1)")
    said = refused(result)
    for message in (str(path), *messages, "--traceback"):
        assert message in said
    traced = hookean("sample", f"{path}:target", "--dynamics", "SGLD(0.1)", "--traceback")
    assert traced.exit_code == 2
    assert "Traceback" in traced.stderr


def test_a_file_that_ends_python_is_an_error(tmp_path: Path) -> None:
    """A script without a guard would otherwise look like a run without draws."""
    path = tmp_path / "script.py"
    path.write_text("import sys\nsys.exit(0)\n")
    said = refused(hookean("sample", f"{path}:target", "--dynamics", "SGLD(0.1)"))
    assert "ends Python when it is imported" in said
    assert '__name__ == "__main__"' in said


def test_what_a_users_file_prints_is_no_data(tmp_path: Path) -> None:
    path = tmp_path / "talkative.py"
    path.write_text("print('hello')\n")
    result = hookean("sample", f"{path}:target", "--dynamics", "SGLD(0.1)")
    assert "defines no 'target'. Define an hk.Target there" in refused(result)
    assert "hello" in result.stderr


def test_an_out_that_may_not_be_written_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere, so the answer of the system is feigned."""
    monkeypatch.setattr(cli.os, "access", lambda path, mode: False)
    said = refused(hookean("sample", f"{model}:target", "--dynamics", "SGLD(0.1)", "--out", tmp_path / "draws.npz"))
    assert "--out: may not be written" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smaple"], "No such command 'smaple'"),
        (["sample", "model.py"], "Missing option '--dynamics'"),
        (["sample", "model.py", "--dynamics", "SGLD(1)", "--chain", "3"], "No such option: --chain"),
        (["sample", "model.py", "--dynamics", "SGLD(1)", "--chains", "many"], "Invalid value for '--chains'"),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str], message: str) -> None:
    result = hookean(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


# -- runs on disk ------------------------------------------------------------------------------------------------------

STORED = ["--dynamics", "Lazy(decay)", "--coupling", "slack", "--engine", "Vectorised", *SHORT, "--no-progress"]


@pytest.fixture
def stored(model: Path, tmp_path: Path) -> Path:
    """A finished run that the command line made."""
    result = hookean("sample", f"{model}:regression", "--init", "far", *STORED, "--store", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert f"3 x 8 draws are in {tmp_path / 'run'}" in result.stderr
    return tmp_path / "run"


def test_a_stored_run_is_that_of_the_function_and_knows_where_it_is_from(stored: Path, model: Path) -> None:
    run = hk.load(stored)
    note = {"file": str(model), "target": "regression", "init": "far"}
    assert run.stored.description["note"] == {"source": note}
    defined = cli._load(model)
    again = hk.sample(
        defined["regression"],
        defined["far"],
        dynamics=defined["Lazy"](defined["decay"]),
        coupling=defined["slack"],
        engine=hk.Vectorised(),
        chains=3,
        num_steps=60,
        warmup=20,
        thin=5,
        seed=7,
        progress=False,
    )
    np.testing.assert_array_equal(run.draws["slope"][:], again.draws["slope"])
    assert run.draws["slope"].dtype == np.float32


def test_store_options_are_handed_on(stored: Path, model: Path) -> None:
    where = ["sample", f"{model}:target", *STORED]
    assert "holds a run already" in refused(hookean(*where, "--store", stored))
    result = hookean(*where, "--store", stored, "--overwrite", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert hk.load(stored).draws["slope"].dtype == jnp.bfloat16
    assert "float32, bfloat16, float64" in refused(hookean(*where, "--store", stored.parent / "n", "--dtype", "int8"))
    for option in (["--overwrite"], ["--dtype", "bfloat16"]):
        assert "Give --store DIR too" in refused(hookean(*where, *option))


def test_resume_makes_a_run_longer_and_replay_compares_it(stored: Path) -> None:
    summary = hk.load(stored).summary()
    finished = hookean("resume", stored)
    assert finished.exit_code == 0 and finished.stdout == summary + "\n"
    assert "60 steps in" not in finished.stderr, "sampled"
    result = hookean("resume", stored, "--num-steps", 90)
    assert result.exit_code == 0, result.output
    assert "90 steps" in result.stdout and "60 x" not in result.stdout
    assert "90 steps in" in result.stderr, "no progress"
    assert hk.load(stored).draws["slope"].shape == (3, 14, 2)
    assert "It can only grow" in refused(hookean("resume", stored, "--num-steps", 80))
    result = hookean("replay", stored, "--no-progress")
    assert (result.exit_code, result.stdout) == (0, "42 draws are the same, bit for bit\n")


def test_a_changed_target_is_refused_unless_forced(stored: Path, model: Path) -> None:
    model.write_text(MODEL.replace('(batch[0] - p["level"])', '(2 * batch[0] - p["level"])'))
    for command in ("resume", "replay"):
        said = refused(hookean(command, stored, "--no-progress"))
        assert said.startswith("target: is not the one") and "--force" in said
    forced = hookean("replay", stored, "--no-progress", "--force")
    assert forced.exit_code == 1
    assert re.fullmatch(r"\d+ of 24 draws differ; first: chain \d, draw 0 \(step 25\), leaf '\w+'; .*\n", forced.stdout)
    assert "warning: target: is not the one" in forced.stderr
    assert hookean("resume", stored, "--no-progress", "--force", "--num-steps", 90).exit_code == 0


def test_settings_of_the_file_are_those_of_before(stored: Path, model: Path) -> None:
    """A schedule that the file defines otherwise by now is not the run's."""
    model.write_text(MODEL.replace("return 0.1 /", "return 0.05 /"))
    result = hookean("replay", stored, "--no-progress")
    assert (result.exit_code, result.stdout) == (0, "24 draws are the same, bit for bit\n")


def test_a_file_that_is_gone_or_broken_is_an_error(stored: Path, model: Path) -> None:
    text = model.read_text()
    model.write_text(text.replace("regression = ", "other = "))
    assert "defines no 'regression'" in refused(hookean("resume", stored))
    model.write_text("import jax\n1 / 0\n")
    assert "line 2: ZeroDivisionError" in refused(hookean("resume", stored))
    model.unlink()
    for command in ("resume", "replay"):
        said = refused(hookean(command, stored))
        assert "is no longer there" in said and f"hk.{command}({str(stored)!r}, target)" in said


def test_a_run_of_a_script_is_sent_back_there(tmp_path: Path) -> None:
    target = hk.Target.from_log_density(lambda x: -jnp.sum(x**2) / 2)
    settings: dict[str, Any] = {"chains": 2, "num_steps": 8, "progress": False, "engine": hk.Vectorised()}
    hk.sample(target, jnp.zeros(2), dynamics=hk.SGLD(0.1), store=tmp_path / "run", **settings)
    for command in ("resume", "replay"):
        said = refused(hookean(command, tmp_path / "run"))
        assert "was made by a script" in said and f"hk.{command}({str(tmp_path / 'run')!r}, target)" in said


@pytest.mark.parametrize("command", ["resume", "replay", "status"])
def test_what_is_no_run_is_said_to_be_none(command: str, tmp_path: Path) -> None:
    assert "does not exist" in refused(hookean(command, tmp_path / "absent"))
    assert "is not a run of hookean" in refused(hookean(command, tmp_path))


def test_status_shows_where_a_run_stands(stored: Path) -> None:
    result = hookean("status", stored)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    for words in (
        "finished ",
        "dynamics Lazy(step_size=<function decay>)",
        "coupling Elastic(alpha=0.5, every=3)",
        "chains 3, num_steps 60, warmup 20, thin 5, seed 7",
        "step 60 of 60",
        "chain step draws potential temperature 0 60 8 ",
        "goodput 100.00%",
        "exchanges 60 ",
        "staleness of the copy of the centre, in steps 2-3 100.0%",
    ):
        assert words in shown, shown
    assert hookean("status", stored, "--watch").stdout == result.stdout  # it is not running


def test_status_has_json_for_machines(stored: Path) -> None:
    def never(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    known = json.loads(hookean("status", stored, "--json").stdout, parse_constant=never)
    assert known["state"] == "finished" and known["step"] == 60
    assert [chain["draws"] for chain in known["chains"]] == [8, 8, 8]
    assert [chain["step"] for chain in known["chains"]] == [60, 60, 60]
    assert known["telemetry"]["exchanges"] == 60 and known["telemetry"]["goodput"] == 1.0


def test_status_tells_a_killed_run_from_one_that_runs(stored: Path) -> None:
    """As a SIGKILL leaves it: it says that it is running, and nobody holds its lock."""
    progress = json.loads((stored / "progress.json").read_text())
    (stored / "progress.json").write_text(json.dumps({**progress, "state": "running", "facts": {}}))
    result = hookean("status", stored)
    assert result.stdout.startswith("killed ")
    import fcntl

    with (stored / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert hookean("status", stored).stdout.startswith("running ")


def test_ctrl_c_exits_with_130_and_says_how_to_go_on(model: Path, tmp_path: Path) -> None:
    path, steps = tmp_path / "run", ["--num-steps", "100000000", "--thin", "1000000", "--warmup", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}

    def interrupted(*arguments: str) -> str:
        command = [sys.executable, "-m", "hookean", *arguments, "--no-progress"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            facts = hk.load(path).stored.progress if path.exists() else {"pid": None}
            if facts["pid"] == process.pid and facts["facts"].get("chains") and facts["state"] == "running":
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (130, ""), errors
        assert "Ctrl-C again stops now" in errors
        return errors.strip().splitlines()[-1]

    wanted = f"interrupted: stopped at a window, with a checkpoint. Go on with: hookean resume {path}"
    dynamics = ["--dynamics", "SGLD(0.1)", "--engine", "Vectorised", "--store", str(path)]
    assert interrupted("sample", f"{model}:target", *dynamics, *steps) == wanted
    first = hk.load(path).info["steps"]
    assert interrupted("resume", str(path)) == wanted
    assert hk.load(path).info["steps"] > first > 0
    assert hk.load(path).stored.state == "stopped"


# -- demo --------------------------------------------------------------------------------------------------------------


def test_demo_hands_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "compare", lambda seed: f"seed {seed}")
    monkeypatch.setattr(demo, "show", lambda result, path: print(result, path))
    result = hookean("demo", "--out", tmp_path / "x.png", "--seed", 5)
    assert result.exit_code == 0
    assert result.stdout == f"seed 5 {tmp_path / 'x.png'}\n"


@pytest.mark.parametrize("out", ["x.jpg", "no/folder/x.png"])
def test_demo_refuses_a_bad_out_before_it_samples(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(seed: int) -> None:
        raise AssertionError("sampled")

    monkeypatch.setattr(demo, "compare", sampled)
    assert refused(hookean("demo", "--out", out)).startswith("--out: ")


def test_bfloat16_draws_are_saved_as_float32(tmp_path: Path) -> None:
    """NumPy's files know no bfloat16."""
    target = hk.Target.from_log_density(lambda x: -jnp.sum(x.astype(jnp.float32) ** 2) / 2)
    run = hk.sample(target, jnp.zeros(2, jnp.bfloat16), dynamics=hk.SGLD(0.1), chains=2, num_steps=8, progress=False)
    cli._save(run, tmp_path / "draws.npz")
    with np.load(tmp_path / "draws.npz") as saved:
        (name,) = (name for name in saved if name.startswith("draws/"))
        assert saved[name].dtype == np.float32
        np.testing.assert_array_equal(saved[name], run.draws.astype(jnp.float32))
