"""Callbacks that write what other tools show. About 5 s."""

from __future__ import annotations

import builtins
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import hookean as hk
from hookean.integrations.tensorboard import TensorBoard

TARGET = hk.Target.from_log_density(lambda x: -jnp.sum(x**2) / 2)


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What was written, by name and step."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = defaultdict(dict)
    for file in sorted(folder.glob("events.*")):
        data = file.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            for value in event.summary.value:
                found[value.tag][event.step] = value.simple_value
    return found


@pytest.mark.parametrize("engine", [hk.Vectorised(), hk.Threads()], ids=["vectorised", "threads"])
def test_tensorboard_shows_chains_at_their_steps_and_counts(engine: hk.Engine, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="needs the extra tensorboard")
    board, windows = TensorBoard(tmp_path / "logs"), []
    settings: dict[str, Any] = {"dynamics": hk.SGHMC(0.1), "coupling": hk.Elastic(every=8), "chains": 2}
    run = hk.sample(
        TARGET,
        jnp.zeros(3),
        num_steps=200,
        engine=engine,
        callbacks=[board, windows.append],
        progress=False,
        **settings,
    )
    board.close()
    found = scalars(tmp_path / "logs")
    for chain in range(2):
        own = [window for window in windows if window.chain == chain]
        assert own[-1].step == 200
        for name in ("potential", "temperature"):
            told = {w.step: np.float32(getattr(w, name)) for w in own if np.isfinite(getattr(w, name))}
            assert found[f"{name}/chain_{chain}"] == told
    counts = {name.removeprefix("counts/") for name in found if name.startswith("counts/")}
    assert {"exchanges", "restarts", "bytes", "goodput"} <= counts
    assert 0 < max(found["counts/steps"].values()) <= run.info["telemetry"].steps


def test_without_its_extra_tensorboard_says_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    really = builtins.__import__

    def without(name: str, *arguments: Any, **others: Any) -> Any:
        if name.startswith("tensorboardX"):
            raise ImportError(name)
        return really(name, *arguments, **others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(hk.HookeanError, match=r"tensorboardX is not installed.*extra `tensorboard`"):
        TensorBoard(tmp_path)
    assert list(tmp_path.iterdir()) == []
