"""Images and their classes out of Parquet in the Hugging Face layout."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from cluster.config.sections.data import AugmentConfig, DataConfig
from cluster.config.sections.train import BUILT_IN_SOURCES, TrainJobConfig
from cluster.errors import RequestError
from cluster.files.backend import StorageError
from cluster.files.retries import patiently, tells_of_the_storage
from train_jobs.data.arrangements import Arrangement, Windowed
from train_jobs.data.identity import digest
from train_jobs.data.parquet import ParquetRows, open_rows
from train_jobs.data.source import Batch

if TYPE_CHECKING:
    from PIL import Image

FACTS = "images.json"
DIGITS = "digits.parquet"
_MEASURED = 2048
"""Training images from which mean and standard deviation are taken."""


@dataclass(frozen=True)
class ImageFacts:
    """What is known of a job's images once they were looked through.

    Attributes:
        labels: name of every class.
        mode: Pillow's: L (one channel) or RGB.
        size: height and width that images are scaled to.
        mean, std: of each channel, on a scale of 0 to 1.
        content: a digest of which images there are to train on, wherever their files lie and whatever these
            are called: of how long they are in each row group, of their classes, and of those images that
            mean and standard deviation are taken from.
    """

    labels: tuple[str, ...]
    mode: str
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    content: str = ""

    @classmethod
    def read(cls, directory: Path) -> ImageFacts:
        facts: dict[str, Any] = json.loads((directory / FACTS).read_text())
        mean, std = tuple(facts["mean"]), tuple(facts["std"])
        labels = tuple(facts["labels"])
        return cls(labels, facts["mode"], facts["size"], mean, std, facts.get("content", ""))


class RowsOfPart:
    """Which rows belong to one part of the data, by the rule of `is_held_out`.

    Args:
        every: of so many rows in order the last is held out.
        held_out: None takes all rows, else those that are held out, or the others.
    """

    def __init__(self, every: int, held_out: bool | None) -> None:
        self._every = every
        self._held_out = held_out

    def before(self, row: Any) -> Any:
        """How many of the part come before a row (or each of many)."""
        if self._held_out is None:
            return row
        held_out = row // self._every
        return held_out if self._held_out else row - held_out

    def row(self, index: int) -> int:
        """Which row is one of the part, by its index in it."""
        if self._held_out is None:
            return index
        if self._held_out:
            return index * self._every + self._every - 1
        return index + index // (self._every - 1)


class ImageSamples:
    """The images of one part of the data, decoded, scaled, changed at random and normalised.

    Args:
        rows: all images of a source.
        held_out: None takes all of them, else those that are kept for evaluation, or the others.
    """

    targets_per_sample = 1

    def __init__(
        self, rows: ParquetRows, facts: ImageFacts, data: DataConfig, held_out: bool | None = None
    ) -> None:
        self.rows = rows
        self.facts = facts
        self.data = data
        self.augment = data.augment
        self.part = RowsOfPart(data.held_out_every, held_out)
        self.mean = np.asarray(facts.mean, dtype=np.float32)[:, None, None]
        self.std = np.asarray(facts.std, dtype=np.float32)[:, None, None]

    def __len__(self) -> int:
        return self.part.before(len(self.rows))

    def arrangement(self) -> Arrangement:
        ends = self.part.before(self.rows.ends)
        return Windowed(np.diff(ends, prepend=0).tolist(), self.data.shuffle_row_groups)

    def batch(self, indices: Sequence[int], keys: Sequence[Sequence[int]] | None) -> Batch:
        """`pixel_values` [samples, channels, size, size] and `labels` [samples]."""
        images = np.empty((len(indices), len(self.facts.mean), self.facts.size, self.facts.size), np.float32)
        labels = np.empty(len(indices), dtype=np.int64)
        for place, index in enumerate(indices):
            image, labels[place] = self.sample(index)
            if keys is not None:
                image = augmented(image, self.augment, np.random.default_rng(list(keys[place])))
            images[place] = (image.astype(np.float32) / 255 - self.mean) / self.std
        return {"pixel_values": torch.from_numpy(images), "labels": torch.from_numpy(labels)}

    def sample(self, index: int) -> tuple[np.ndarray, int]:
        """One image, [channels, size, size] from 0 to 255, and its class."""
        row, values = self.stored(index)
        return self.pixels(row, values), values[self.data.label_column]

    def stored(self, index: int) -> tuple[int, dict[str, Any]]:
        """One image's row, and what is stored there."""
        row = self.part.row(int(index))
        return row, self.rows.row(row)

    def pixels(self, row: int, values: dict[str, Any]) -> np.ndarray:
        """What is stored in a row as an image, [channels, size, size] from 0 to 255."""
        image = decoded(values[self.data.image_column], self.facts.mode, self.rows, row)
        if image.size != (self.facts.size, self.facts.size):
            from PIL import Image

            image = image.resize((self.facts.size, self.facts.size), Image.Resampling.BILINEAR)
        pixels = np.asarray(image, dtype=np.uint8)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def augmented(image: np.ndarray, augment: AugmentConfig, generator: np.random.Generator) -> np.ndarray:
    """A random crop of the padded image, and its mirror image in half of the cases."""
    if augment.crop_padding:
        pad, size = augment.crop_padding, image.shape[1]
        whole = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
        top, left = generator.integers(0, 2 * pad + 1, 2)
        image = whole[:, top : top + size, left : left + size]
    if augment.flip and generator.random() < 0.5:
        image = image[:, :, ::-1]
    return image


def decoded(value: Any, mode: str | None, rows: ParquetRows, row: int) -> Image.Image:
    """An image of the Hugging Face layout: its bytes, or the path of its file.

    Raises:
        RequestError: there is no image, or it cannot be decoded; the message says where.
        StorageError: its file cannot be read now.
    """
    from PIL import Image, UnidentifiedImageError

    place = f"{rows.place_of(row)}: column {rows.columns[0]!r}"
    if not isinstance(value, dict) or not (value.get("bytes") or value.get("path")):
        raise RequestError(f"{place} holds no image")

    def decode() -> Image.Image:
        image = Image.open(io.BytesIO(value["bytes"]) if value.get("bytes") else value["path"])
        image.load()
        return image.convert(mode or ("L" if image.mode in ("1", "L", "I", "I;16", "F") else "RGB"))

    try:
        return patiently(decode, local=True)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if tells_of_the_storage(error):
            raise StorageError(f"{place} names an image that cannot be read: {error}") from error
        # Pillow names the object it read from, not what was wrong.
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "its format is none that Pillow knows" if unknown else error
        raise RequestError(f"{place} holds an image that cannot be decoded: {reason}") from error


def open_images(config: TrainJobConfig, directory: Path, held_out: bool) -> ImageSamples:
    """One part of a job's images, which `prepare_images` has looked through."""
    facts, data = ImageFacts.read(directory), config.data
    if data.held_out_source is None:
        return ImageSamples(_rows(_source(config, directory), data), facts, data, held_out)
    if held_out:
        return ImageSamples(_rows(data.held_out_source, data, "data.held_out_source"), facts, data)
    return ImageSamples(_rows(_source(config, directory), data), facts, data)


def prepare_images(config: TrainJobConfig, directory: Path) -> bool:
    """Look through a job's images and leave what was found in the directory.

    Returns:
        whether that is another than before.

    Raises:
        RequestError: there are none, a label is no class, or an image cannot be decoded.
    """
    directory.mkdir(parents=True, exist_ok=True)
    source, data = _source(config, directory), config.data
    if source == str(directory / DIGITS) and not Path(source).exists():
        _write_digits(Path(source))
    rows = _rows(source, data)
    seen = hashlib.blake2b(digest_size=16)
    labels = _labels(rows, data.label_column, seen)
    first = decoded(rows.row(0)[data.image_column], None, rows, 0)
    facts = ImageFacts(labels, first.mode, data.image_size or _square(first, rows), (0.0,), (1.0,))
    if data.held_out_source is not None:
        apart = _rows(data.held_out_source, data, "data.held_out_source")
        known = _labels(apart, data.label_column, hashlib.blake2b())
        if len(known) > len(labels):
            raise RequestError(
                f"data.held_out_source {data.held_out_source!r} has {len(known)} classes, the training data "
                f"only {len(labels)}"
            )
    samples = ImageSamples(rows, facts, data, False if data.held_out_source is None else None)
    mean, std = _measure(samples, seen)
    channels = len(mean)
    for key, given in (("mean", data.mean), ("std", data.std)):
        if given is not None and len(given) != channels:
            raise RequestError(f"data.{key} has {len(given)} numbers; the images have {channels} channels")
    files = [rows.files.chunks(index) for index in range(len(rows.files.fragments))]
    every = data.held_out_every if data.held_out_source is None else None
    content = digest([files, rows.group_sizes(), every, seen.hexdigest()])
    facts = ImageFacts(labels, first.mode, facts.size, data.mean or mean, data.std or std, content)
    text, target = json.dumps(asdict(facts)), directory / FACTS
    if target.exists() and target.read_text() == text:
        return False
    staged = directory / f"{FACTS}.tmp"
    staged.write_text(text)
    staged.replace(target)
    return True


def _source(config: TrainJobConfig, directory: Path) -> str:
    source = config.source
    assert source is not None
    return str(directory / DIGITS) if source == BUILT_IN_SOURCES["image_classification"] else source


def _rows(source: str, data: DataConfig, key: str = "data.source") -> ParquetRows:
    rows = open_rows("image_classification", data, source, key, kept=2 * data.shuffle_row_groups)
    if not len(rows):
        raise RequestError(f"{key} {source!r} holds no images")
    return rows


def _labels(rows: ParquetRows, column: str, seen: hashlib.blake2b) -> tuple[str, ...]:
    """The names of the classes: those that the file knows (as datasets writes them), else their numbers.

    Args:
        seen: takes the class of every image.
    """
    most = 0
    for place, table in rows.walk([column]):
        values = table.column(column)
        if values.null_count:
            raise RequestError(f"{place}: column {column!r} holds {values.null_count} rows without a class")
        span = pc.min_max(values).as_py()
        low, high = span["min"], span["max"]
        if low < 0:
            raise RequestError(f"{place}: column {column!r} holds {low}; classes count from 0")
        most = max(most, high)
        seen.update(values.to_numpy().astype("<i8").tobytes())
    try:
        written = json.loads((rows.files.schema.metadata or {})[b"huggingface"])
        names = tuple(written["info"]["features"][column]["names"])
    except (KeyError, TypeError, ValueError):
        names = ()
    return names if len(names) > most else tuple(str(index) for index in range(most + 1))


def _square(image: Image.Image, rows: ParquetRows) -> int:
    if image.width != image.height:
        raise RequestError(
            f"the first image of {rows.source!r} has {image.width} × {image.height} pixels; data.image_size "
            "says what all are scaled to"
        )
    return image.width


def _measure(samples: ImageSamples, seen: hashlib.blake2b) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, on a scale of 0 to 1.

    Args:
        seen: takes the images that are looked at, as they are stored.
    """
    if not len(samples):
        raise RequestError(f"data.source {samples.rows.source!r} leaves no image to train on")
    step = -(-len(samples) // _MEASURED)
    measured = []
    for index in range(0, len(samples), step):
        row, values = samples.stored(index)
        measured.append(samples.pixels(row, values))
        image = values[samples.data.image_column]
        seen.update(image.get("bytes") or image["path"].encode())
    images = np.stack(measured) / 255
    mean, std = images.mean(axis=(0, 2, 3)), images.std(axis=(0, 2, 3))
    return tuple(mean.tolist()), tuple(np.maximum(std, 1e-6).tolist())


def _write_digits(target: Path) -> None:
    """scikit-learn's 1,797 handwritten digits, 8 × 8 pixels, as Parquet in the Hugging Face layout."""
    import pyarrow.parquet as pq
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = []
    for pixels in digits.images:
        stream = io.BytesIO()
        Image.fromarray((pixels * 255 / 16).round().astype(np.uint8)).save(stream, "PNG")
        images.append({"bytes": stream.getvalue(), "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(images, kind), "label": pa.array(digits.target, pa.int64())})
    staged = target.with_suffix(".tmp")
    pq.write_table(table, staged, row_group_size=256)
    staged.replace(target)
