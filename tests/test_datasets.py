"""Readers and downloads of real data sets: on files written here, on a server of one's own, and on the real ones."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import lzma
import os
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hookean import datasets
from hookean.datasets import (
    CIFAR,
    CIFAR_TRAIN,
    HOMES,
    NAMES,
    TEST,
    TEST_LABELS,
    TRAIN,
    TRAIN_LABELS,
    UCI,
    DataError,
    Home,
    Table,
    load,
    standard_splits,
)
from hookean.types import ArgumentError

SHARED = Path(os.environ.get("HOOKEAN_DATA_DIR", Path(__file__).resolve().parents[2] / "shared" / "data"))
BATCHES = (*CIFAR_TRAIN, "test_batch")
RANDOM = np.random.default_rng(0)


def real(folder: str) -> Path:
    if not (SHARED / folder).is_dir():
        pytest.skip(f"no folder {SHARED / folder}: set HOOKEAN_DATA_DIR to the folder that holds {folder}/")
    return SHARED


# -- small files of the same formats -----------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    magic = 2048 + array.ndim
    return np.array([magic, *array.shape], ">u4").tobytes() + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path) -> dict[str, np.ndarray]:
    """Seven images to learn from and three to test."""
    folder.mkdir(parents=True)
    arrays = {
        TRAIN: RANDOM.integers(0, 256, (7, 28, 28)),
        TRAIN_LABELS: RANDOM.integers(0, 10, 7),
        TEST: RANDOM.integers(0, 256, (3, 28, 28)),
        TEST_LABELS: RANDOM.integers(0, 10, 3),
    }
    for name, array in arrays.items():
        (folder / name).write_bytes(gzip.compress(idx(array)))
    return arrays


def cifar_rows() -> dict[str, np.ndarray]:
    """Four images a batch, as the public archive has them: label, red plane, green plane, blue plane."""
    rows = RANDOM.integers(0, 256, (len(BATCHES), 4, 3073)).astype(np.uint8)
    rows[:, :, 0] %= 10
    return dict(zip(BATCHES, rows, strict=True))


def write_tar(path: Path, rows: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in rows.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = content.nbytes
            archive.addfile(member, io.BytesIO(content.tobytes()))


def write_xz(folder: Path, rows: dict[str, np.ndarray]) -> None:
    """Labels, then differences along rows and columns of red - green, green, blue - green."""
    folder.mkdir(parents=True)
    for name, content in rows.items():
        planes = content[:, 1:].reshape(-1, 3, 32, 32).transpose(1, 0, 2, 3).copy()
        planes[0] -= planes[1]
        planes[2] -= planes[1]
        first = np.zeros_like(planes[..., :1])
        planes = np.diff(planes, axis=3, prepend=first)
        planes = np.diff(planes, axis=2, prepend=np.zeros_like(planes[:, :, :1]))
        (folder / f"{name}.xz").write_bytes(lzma.compress(content[:, 0].tobytes() + planes.tobytes()))


def test_idx_files_are_read(tmp_path: Path) -> None:
    arrays = write_mnist(tmp_path / "mnist")
    found = load("mnist", tmp_path)
    for given, array in zip(found, arrays.values(), strict=True):
        np.testing.assert_array_equal(given, array)
    assert (found.x_train.dtype, found.y_train.dtype) == (np.uint8, np.int32)


def test_a_set_without_training_images(tmp_path: Path) -> None:
    arrays = write_mnist(tmp_path / "notmnist")
    found = load("notmnist", str(tmp_path))
    assert found.x_train.shape == (0, 28, 28) and found.y_train.shape == (0,)
    np.testing.assert_array_equal(found.x_test, arrays[TEST])


@pytest.mark.parametrize("format", ["tar", "xz"])
def test_cifar_is_read_from_both_formats(tmp_path: Path, format: str) -> None:
    rows = cifar_rows()
    if format == "tar":
        write_tar(tmp_path / "cifar10" / CIFAR, rows)
    else:
        write_xz(tmp_path / "cifar10", rows)
    found = load("cifar10", tmp_path)
    assert found.x_train.shape == (20, 32, 32, 3) and found.x_test.shape == (4, 32, 32, 3)
    images, labels = np.concatenate([found.x_train, found.x_test]), np.concatenate([found.y_train, found.y_test])
    for image, label, row in zip(images, labels, np.concatenate(list(rows.values())), strict=True):
        assert label == row[0]
        assert image[3, 5, 1] == row[1 + 1024 + 3 * 32 + 5]  # green, row 3, column 5
        np.testing.assert_array_equal(image.transpose(2, 0, 1).ravel(), row[1:])


def test_a_table_is_read_from_both_formats(tmp_path: Path) -> None:
    (tmp_path / "uci").mkdir()
    data = RANDOM.normal(size=(31, 5))
    np.savetxt(tmp_path / "uci" / "yacht.txt", data, fmt="%.18g")
    from_text = load("yacht", tmp_path)
    columns = np.array([4, 0, 1, 3])
    np.savez(
        tmp_path / "uci" / "yacht.npz",
        data=data,
        index_features=columns,
        index_target=np.array(2),
        index_train=from_text.index_train[:3],
        index_test=from_text.index_test[:3],
    )
    from_npz = load("yacht", tmp_path)
    np.testing.assert_array_equal(from_text.x, data[:, :4])
    np.testing.assert_array_equal(from_text.y, data[:, 4])
    np.testing.assert_array_equal(from_npz.x, data[:, columns])
    np.testing.assert_array_equal(from_npz.y, data[:, 2])
    assert (from_text.num_splits, from_npz.num_splits) == (20, 3)
    split = from_npz.split(2)
    assert len(split.x_train) == 28 and len(split.y_test) == 3
    np.testing.assert_array_equal(split.x_test, data[from_text.index_test[2]][:, columns])
    with pytest.raises(ArgumentError, match="number: is 3"):
        from_npz.split(3)


def test_the_recipe_of_the_splits() -> None:
    """np.random.seed(1), then a permutation for each split in turn."""
    np.random.seed(1)
    orders = [np.random.choice(range(23), 23, replace=False) for _ in range(4)]
    train, test = standard_splits(23, 4)
    np.testing.assert_array_equal(np.concatenate([train, test], 1), orders)
    assert train.shape == (4, 21)  # round(20.7)


# -- broken files ------------------------------------------------------------------------------------------------------


def damage(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(change(path.read_bytes())), None)[1]


def unzipped(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return damage(lambda content: gzip.compress(change(gzip.decompress(content))))


@pytest.mark.parametrize(
    ("file", "how", "message"),
    [
        (TRAIN, unzipped(lambda c: b"\0\0\x08\x04" + c[4:]), "magic number is 2052, not 2049 or 2051"),
        (TRAIN, unzipped(lambda c: c[:-1]), "5503 bytes, where its header speaks of 5504"),
        (TEST, unzipped(lambda c: c + b"\0"), "2369 bytes, where its header speaks of 2368"),
        (TEST, unzipped(lambda c: c[:9]), "9 bytes, where its header"),
        (TEST, unzipped(lambda c: b""), "magic number is 0"),
        (TRAIN, damage(lambda c: c[:-20]), "EOFError"),
        (TRAIN, damage(lambda c: c[:500] + bytes(100) + c[600:]), "broken"),
        (TEST_LABELS, damage(lambda c: b"<html>"), "BadGzipFile"),
        (TRAIN_LABELS, unzipped(lambda c: c[:-1] + b"\x0a"), "a label is 10, not 0 to 9"),
        (TRAIN_LABELS, unzipped(lambda c: idx(np.zeros(6))), f"7 images, but 6 labels in {TRAIN_LABELS}"),
        (TEST, Path.unlink, "there is no such file"),
    ],
)
def test_a_broken_idx_file_is_named(tmp_path: Path, file: str, how: Callable[[Path], None], message: str) -> None:
    write_mnist(tmp_path / "mnist")
    how(tmp_path / "mnist" / file)
    with pytest.raises(DataError, match=message) as caught:
        load("mnist", tmp_path)
    blamed = TRAIN if "7 images" in message else file
    assert str(tmp_path / "mnist" / blamed) in str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (damage(lambda c: c[: len(c) // 2]), "EOFError|ReadError"),
        (damage(lambda c: b"no archive"), "ReadError"),
        (lambda path: write_tar(path, dict(list(cifar_rows().items())[:3])), "KeyError"),
        (
            lambda path: write_tar(path, {name: rows.ravel()[:-1] for name, rows in cifar_rows().items()}),
            r"data_batch_1\.bin has 12291 bytes",
        ),
    ],
    ids=["cut", "html", "members", "rows"],
)
def test_a_broken_archive_is_named(tmp_path: Path, how: Callable[[Path], Any], message: str) -> None:
    path = tmp_path / "cifar10" / CIFAR
    write_tar(path, cifar_rows())
    how(path)
    with pytest.raises(DataError, match=message) as caught:
        load("cifar10", tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("change", [lambda c: c[:-30], lambda c: b"\0" + c, lambda c: lzma.compress(bytes(3072))])
def test_a_broken_batch_is_named(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    write_xz(tmp_path / "cifar10", cifar_rows())
    damage(change)(tmp_path / "cifar10" / "data_batch_4.xz")
    with pytest.raises(DataError, match=r"data_batch_4\.xz: is broken"):
        load("cifar10", tmp_path)
    (tmp_path / "cifar10" / "data_batch_4.xz").unlink()
    with pytest.raises(DataError, match=r"data_batch_4\.xz: there is no such file"):
        load("cifar10", tmp_path)


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "uci").mkdir()
    text, packed = tmp_path / "uci" / "yacht.txt", tmp_path / "uci" / "yacht.npz"
    for content in ("1 2 3\n4 5\n", "1 nan\n2 3\n", "<html>", "1 2\n"):
        text.write_text(content)
        with pytest.raises(DataError, match=r"yacht\.txt: is broken"):
            load("yacht", tmp_path)
    whole: dict[str, Any] = {"data": np.ones((5, 2)), "index_features": np.array([0]), "index_target": np.array(1)}
    index = np.array([[0, 1, 2, 3]])
    for arrays in (
        whole,  # no splits
        whole | {"index_train": index, "index_test": np.array([[3]])},  # a row twice
        whole | {"index_train": index, "index_test": np.array([[4]]), "index_target": np.array(7)},
        whole | {"index_train": index, "index_test": np.array([[4]]), "data": np.array([None])},  # pickled
    ):
        np.savez(packed, **arrays)
        with pytest.raises(DataError, match=r"yacht\.npz: is broken"):
            load("yacht", tmp_path)
    packed.write_bytes(packed.read_bytes()[:100])
    with pytest.raises(DataError, match=r"yacht\.npz: is broken"):
        load("yacht", tmp_path)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"name: is 'cifar100'\. Choose one of mnist"):
        load("cifar100")
    with pytest.raises(DataError, match="--data-dir"):
        load("mnist", tmp_path / "nowhere")
    for name in NAMES:
        with pytest.raises(DataError, match="--data-dir") as caught:
            load(name, tmp_path)
        folder = "uci" if name in UCI else name
        assert str(tmp_path / folder) in str(caught.value)


# -- downloads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hookean"


class Handler(SimpleHTTPRequestHandler):
    """Files of a folder; keeps what was asked for."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/short/"):  # promises more than it sends
            content = Path(self.directory, self.path.removeprefix("/short/")).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:-10])
        else:
            super().do_GET()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    handler = type("Kept", (Handler,), {"asked": []})
    with HTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}/", handler.asked
        finally:
            running.shutdown()
            thread.join()


def md5_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_a_download_is_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    arrays = write_mnist(tmp_path / "home")
    with server(tmp_path / "home") as (address, asked):
        monkeypatch.setitem(HOMES, "mnist", Home(address, md5_of(tmp_path / "home")))
        for _ in range(2):
            np.testing.assert_array_equal(load("mnist").x_test, arrays[TEST])
    assert sorted(asked) == sorted(f"/{name}" for name in arrays)  # once each
    assert names_in(cache) == set(arrays)
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("downloading") == 4


def test_archives_and_tables_are_downloaded(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    write_tar(home / CIFAR, cifar_rows())
    monkeypatch.setitem(HOMES, "cifar10", Home(home.as_uri() + "/", md5_of(home)))
    assert load("cifar10").x_train.shape == (20, 32, 32, 3)
    data = RANDOM.normal(size=(12, 3))
    (home / "yacht" / "data").mkdir(parents=True)
    np.savetxt(home / "yacht" / "data" / "data.txt", data, fmt="%.18g")
    monkeypatch.setattr(datasets, "UCI_HOME", home.as_uri() + "/")
    monkeypatch.setitem(UCI, "yacht", Table((12, 3), 4, hashlib.sha256(data.tobytes()).hexdigest()))
    for _ in range(2):
        found = load("yacht")
        np.testing.assert_array_equal(found.y, data[:, 2])
        np.testing.assert_array_equal(found.index_test, standard_splits(12, 4)[1])
        (cache / "uci" / "yacht.txt").write_text("1 2 3\n")  # damaged, and fetched again
    monkeypatch.setitem(UCI, "yacht", Table((12, 3), 4, "0" * 64))
    with pytest.raises(DataError, match="not the table"):
        load("yacht")


def test_a_damaged_cache_is_mended(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = write_mnist(tmp_path / "home")
    monkeypatch.setitem(HOMES, "mnist", Home((tmp_path / "home").as_uri() + "/", md5_of(tmp_path / "home")))
    whole = (tmp_path / "home" / TRAIN).read_bytes()
    (cache / "mnist").mkdir(parents=True)
    (cache / "mnist" / TRAIN).write_bytes(whole[: len(whole) // 2])
    (cache / "mnist" / f".{TEST}.killed").write_bytes(b"left by a process that was killed")
    np.testing.assert_array_equal(load("mnist").x_train, arrays[TRAIN])
    assert (cache / "mnist" / TRAIN).read_bytes() == whole


@pytest.mark.parametrize("how", ["changed", "short", "missing", "refused", "cannot write"])
def test_a_failed_download_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    write_mnist(tmp_path / "home")
    sums = md5_of(tmp_path / "home")
    with server(tmp_path / "home") as (address, _):
        message = "md5 sum"
        if how == "changed":
            (tmp_path / "home" / TRAIN).write_bytes(b"a page that asks for a password")
        elif how == "short":
            address += "short/"
        elif how == "missing":
            (tmp_path / "home" / TRAIN).unlink()
            message = "HTTP Error 404"
        elif how == "refused":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                address = f"http://127.0.0.1:{free.getsockname()[1]}/"
            message = "refused"
        else:
            cache.parent.mkdir()
            cache.write_text("a file where the folder should be")
            message = "could not be downloaded"
        monkeypatch.setitem(HOMES, "mnist", Home(address, sums))
        with pytest.raises(DataError, match=message) as caught:
            load("mnist")
    assert "--data-dir" in str(caught.value) and address + TRAIN in str(caught.value)
    assert names_in(cache) == set()


def test_homes_are_https_and_say_what_they_should_give() -> None:
    addresses = [home.address for home in HOMES.values()] + [datasets.UCI_HOME]
    assert all(address.startswith("https://") and address.endswith("/") for address in addresses)
    sums = [md5 for home in HOMES.values() for md5 in home.md5.values()]
    assert len(set(sums)) == len(sums) == 11 and all(len(md5) == 32 for md5 in sums)


# -- the real files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "notmnist"])
def test_the_real_files_have_the_sums_that_downloads_must_have(name: str) -> None:
    assert md5_of(real(name) / name) == HOMES[name].md5


@pytest.mark.parametrize(
    ("name", "per_class", "mean", "sd"),
    [("mnist", None, 0.1307, 0.3081), ("fashion_mnist", 6000, 0.2860, 0.3530)],
)
def test_the_real_images(name: str, per_class: int | None, mean: float, sd: float) -> None:
    """Numbers that are known of the training images."""
    found = load(name, real(name))
    assert isinstance(found, datasets.Images)
    assert found.x_train.shape == (60_000, 28, 28) and found.x_test.shape == (10_000, 28, 28)
    counts = np.bincount(found.y_train)
    assert counts.tolist() == (
        [per_class] * 10 if per_class else [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    )
    values, weights = np.arange(256) / 255, np.bincount(found.x_train.ravel(), minlength=256)
    average = np.average(values, weights=weights)
    assert average == pytest.approx(mean, abs=5e-5)
    assert np.sqrt(np.average((values - average) ** 2, weights=weights)) == pytest.approx(sd, abs=5e-5)


def test_the_real_letters() -> None:
    found = load("notmnist", real("notmnist"))
    assert len(found.x_train) == 0 and np.bincount(found.y_test).tolist() == [1000] * 10
    assert found.x_test.shape == (10_000, 28, 28)


def test_a_real_batch_of_cifar_is_the_published_one() -> None:
    """Put back into the binary version it has the md5 sum that is published for test_batch.bin."""
    x, y = datasets._read_cifar_xz(real("cifar10") / "cifar10" / "test_batch.xz")
    rows = np.concatenate([y[:, None].astype(np.uint8), x.transpose(0, 3, 1, 2).reshape(-1, 3072)], 1)
    assert hashlib.md5(rows.tobytes()).hexdigest() == "803d5f7f4d78ea53de84dbe85f74fb6d"


@pytest.mark.parametrize("name", UCI)
def test_the_real_tables(name: str) -> None:
    """The table and the splits are those that a download would give."""
    found = load(name, real("uci"))
    assert isinstance(found, datasets.Regression)
    data = np.column_stack([found.x, found.y])
    assert data.shape == UCI[name].shape and found.num_splits == UCI[name].splits
    assert hashlib.sha256(data.tobytes()).hexdigest() == UCI[name].sha256
    train, test = standard_splits(len(data), found.num_splits)
    np.testing.assert_array_equal(found.index_train, train)
    np.testing.assert_array_equal(found.index_test, test)
