"""Images in the Hugging Face layout: reading, changing, and what is wrong with them."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cluster.config.sections.data import AugmentConfig
from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from train_jobs.data.documents import is_held_out
from train_jobs.data.images import (
    ImageFacts,
    ImageSamples,
    RowsOfPart,
    augmented,
    open_images,
    prepare_images,
)
from train_jobs.data.order import SampleOrder

CIFAR_LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def bmp(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "BMP")
    return stream.getvalue()


def write_images(path: Path, images: list[Any], labels: list[Any], **names: str) -> Path:
    """A file as the datasets library writes CIFAR-10, class names and all."""
    image, label = names.get("image", "img"), names.get("label", "label")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = {
        image: {"_type": "Image"},
        label: {"names": list(CIFAR_LABELS), "_type": "ClassLabel"},
    }
    schema = pa.schema([(image, kind), (label, pa.int64())]).with_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    rows = [image if isinstance(image, dict | None) else {"bytes": image, "path": None} for image in images]
    pq.write_table(pa.table([pa.array(rows, kind), labels], schema=schema), path, row_group_size=7)
    return path


def cifar(path: Path, number: int = 40, seed: int = 0) -> tuple[Path, np.ndarray]:
    pixels = np.random.default_rng(seed).integers(0, 256, (number, 32, 32, 3), dtype=np.uint8)
    return write_images(path, [png(each) for each in pixels], [index % 10 for index in range(number)]), pixels


def job(source: Path | None, **data: Any) -> TrainJobConfig:
    data = {"image_column": "img", **data, **({} if source is None else {"source": str(source)})}
    return TrainJobConfig.model_validate({"task": "image_classification", "data": data})


def test_cifar_10_as_the_hub_has_it_is_read_whole(tmp_path: Path) -> None:
    source, pixels = cifar(tmp_path / "train.parquet")
    config = job(source, held_out_every=4)
    prepare_images(config, tmp_path / "data")
    facts = ImageFacts.read(tmp_path / "data")
    assert (facts.labels, facts.mode, facts.size) == (CIFAR_LABELS, "RGB", 32)
    kept = [index for index in range(40) if index % 4 == 3]
    rest = [index for index in range(40) if index % 4 != 3]
    assert facts.mean == pytest.approx((pixels[rest] / 255).mean(axis=(0, 1, 2)))
    assert facts.std == pytest.approx((pixels[rest] / 255).std(axis=(0, 1, 2)))
    for held_out, indices in ((False, rest), (True, kept)):
        samples = open_images(config, tmp_path / "data", held_out)
        assert len(samples) == len(indices)
        batch = samples.batch(range(len(indices)), None)
        assert batch["labels"].tolist() == [index % 10 for index in indices]
        expected = (pixels[indices].transpose(0, 3, 1, 2) / 255 - facts_column(facts.mean)) / facts_column(
            facts.std
        )
        assert torch.allclose(batch["pixel_values"], torch.from_numpy(expected).float(), atol=1e-5)
        order = np.asarray(list(samples.arrangement().epoch(1, 0)))
        assert sorted(order.tolist()) == list(range(len(indices)))


def facts_column(values: tuple[float, ...]) -> np.ndarray:
    return np.asarray(values)[:, None, None]


def test_a_file_of_its_own_may_be_what_is_evaluated_on(tmp_path: Path) -> None:
    train, _ = cifar(tmp_path / "train.parquet", 20)
    test, pixels = cifar(tmp_path / "test.parquet", 12, seed=1)
    config = job(train, held_out_source=str(test), image_size=16, mean=[0.0] * 3, std=[1.0] * 3)
    prepare_images(config, tmp_path / "data")
    assert len(open_images(config, tmp_path / "data", False)) == 20
    samples = open_images(config, tmp_path / "data", True)
    assert len(samples) == 12
    small = Image.fromarray(pixels[5]).resize((16, 16), Image.Resampling.BILINEAR)
    expected = np.asarray(small).transpose(2, 0, 1) / 255
    assert np.allclose(samples.batch([5], None)["pixel_values"][0].numpy(), expected, atol=1e-6)


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(2, 9))
def test_a_part_holds_the_rows_of_its_rule(rows: int, every: int) -> None:
    held_out = np.asarray([bool(is_held_out(row, every)) for row in range(rows)], dtype=bool)
    for wanted in (True, False, None):
        part = RowsOfPart(every, wanted)
        expected = np.flatnonzero(held_out == wanted) if wanted is not None else np.arange(rows)
        assert part.before(rows) == len(expected)
        assert [part.row(index) for index in range(len(expected))] == expected.tolist()
        ends = np.arange(rows + 1)
        assert np.asarray(part.before(ends)).tolist() == np.searchsorted(expected, ends).tolist()


class ManyRows:
    """As many images as no test could write."""

    ends = np.arange(10_000, 50_000_001, 10_000)

    def __len__(self) -> int:
        return int(self.ends[-1])


@pytest.mark.parametrize("held_out", [True, False, None])
def test_samples_of_many_images_take_no_memory(held_out: bool | None) -> None:
    config = job(None, held_out_every=4)
    facts = ImageFacts(CIFAR_LABELS, "RGB", 32, (0.5,), (0.5,))
    tracemalloc.start()
    samples = ImageSamples(ManyRows(), facts, config.data, held_out)  # type: ignore[arg-type]
    order = SampleOrder(samples.arrangement(), seed=3)
    index = order.at(len(samples) - 1)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    rows = samples.part.row(index)
    assert held_out is None or is_held_out(rows, 4) == held_out
    assert most < 10e6, "it was eight bytes an image"


def content(config: TrainJobConfig, directory: Path) -> str:
    prepare_images(config, directory)
    return ImageFacts.read(directory).content


def test_images_are_known_by_what_they_are_wherever_they_lie(tmp_path: Path) -> None:
    """Raw pixels of one size: their files have the same name, rows and lengths."""

    def source(name: str, seed: int, first_label: int = 0) -> Path:
        pixels = np.random.default_rng(seed).integers(0, 256, (20, 8, 8), dtype=np.uint8)
        labels = [(first_label + index) % 10 for index in range(20)]
        (tmp_path / name).mkdir()
        path = write_images(tmp_path / name / "train.parquet", [bmp(each) for each in pixels], labels)
        table = pq.read_table(path)
        pq.write_table(table, path, row_group_size=7, compression="none", use_dictionary=False)
        return path

    fixed = {"mean": [0.5], "std": [0.5], "held_out_every": 4}
    first = source("first", 0)
    known = content(job(first, **fixed), tmp_path / "data")
    for name, seed, first_label in (("images", 1, 0), ("classes", 0, 1)):
        other = source(name, seed, first_label)
        assert other.stat().st_size == first.stat().st_size
        assert content(job(other, **fixed), tmp_path / "data") != known, name
    assert content(job(first, **{**fixed, "held_out_every": 5}), tmp_path / "data") != known
    moved = first.rename(tmp_path / "moved.parquet")
    assert content(job(moved, **fixed), tmp_path / "data") == known
    assert content(job(moved, **fixed), tmp_path / "elsewhere") == known


def test_one_image_among_many_tells_two_sources_apart(tmp_path: Path) -> None:
    """Not all images are looked at when a job starts; how long they are is known of all."""
    pixels = np.random.default_rng(0).integers(0, 256, (2200, 4, 4), dtype=np.uint8)
    images = [png(each) for each in pixels]
    labels = [index % 10 for index in range(2200)]
    first = write_images(tmp_path / "first.parquet", images, labels)
    images[1001] = png(np.zeros((4, 4), dtype=np.uint8))
    other = write_images(tmp_path / "other.parquet", images, labels)
    assert content(job(first), tmp_path / "data") != content(job(other), tmp_path / "data")


def test_digits_come_with_scikit_learn(tmp_path: Path) -> None:
    config = TrainJobConfig.model_validate({"task": "image_classification"})
    prepare_images(config, tmp_path)
    facts = ImageFacts.read(tmp_path)
    assert (facts.labels, facts.mode, facts.size) == (tuple("0123456789"), "L", 8)
    parts = [open_images(config, tmp_path, held_out) for held_out in (False, True)]
    assert [len(part) for part in parts] == [1708, 89]


def test_random_changes_follow_from_their_key() -> None:
    image = np.arange(2 * 5 * 5, dtype=np.uint8).reshape(2, 5, 5)
    augment = AugmentConfig(crop_padding=2, flip=True)

    def change(seed: int) -> np.ndarray:
        return augmented(image, augment, np.random.default_rng([1, seed]))

    seen = {change(seed).tobytes() for seed in range(400)}
    assert all(change(seed).tobytes() == change(seed).tobytes() for seed in range(5))
    whole = np.pad(image, ((0, 0), (2, 2), (2, 2)))
    crops = [whole[:, i : i + 5, j : j + 5] for i in range(5) for j in range(5)]
    assert seen == {each.tobytes() for crop in crops for each in (crop, crop[:, :, ::-1])}
    unchanged = augmented(image, AugmentConfig(), np.random.default_rng(0))
    assert np.array_equal(unchanged, image)


def read_all(config: TrainJobConfig, directory: Path) -> None:
    prepare_images(config, directory)
    samples = open_images(config, directory, False)
    samples.batch(range(len(samples)), None)


def fails(config: TrainJobConfig, directory: Path) -> str:
    with pytest.raises(RequestError) as caught:
        read_all(config, directory / "data")
    return str(caught.value)


def test_what_is_wrong_with_images_is_named_with_its_place(tmp_path: Path) -> None:
    source, path = tmp_path / "x.parquet", str(tmp_path / "x.parquet")
    good = [png(np.full((8, 8), index, dtype=np.uint8)) for index in range(20)]
    labels = list(range(10)) * 2

    write_images(source, [*good[:9], b"not an image", *good[10:]], labels)
    message = fails(job(source), tmp_path)
    assert f"{path} (data.source), row group 1, row 2: column 'img' holds an image that cannot be" in message
    write_images(source, [*good[:9], None, *good[10:]], labels)
    assert "row group 1, row 2: column 'img' holds no image" in fails(job(source), tmp_path)
    write_images(source, good, [*labels[:-1], -1])
    assert "row group 2: column 'label' holds -1" in fails(job(source), tmp_path)
    write_images(source, good, [*labels[:-1], None])
    assert "row group 2: column 'label' holds 1 rows without a class" in fails(job(source), tmp_path)
    write_images(source, [png(np.zeros((4, 8), dtype=np.uint8))], [0])
    assert "8 × 4 pixels; data.image_size says" in fails(job(source), tmp_path)
    write_images(source, good, labels)
    assert "data.mean has 3 numbers; the images have 1 channels" in fails(
        job(source, mean=[0.0] * 3, std=[1.0] * 3), tmp_path
    )
    assert "has no column 'image'; it has img, label" in fails(job(source, image_column="image"), tmp_path)
    assert "holds int64, not images in the Hugging Face layout" in fails(
        job(source, image_column="label"), tmp_path
    )
    assert "(data.label_column) holds struct" in fails(job(source, label_column="img"), tmp_path)
    write_images(source, [], [])
    assert "holds no images" in fails(job(source), tmp_path)
    more = write_images(tmp_path / "more.parquet", good[:1], [11])
    write_images(source, good, [0] * 20)
    message = fails(job(source, held_out_source=str(more)), tmp_path)
    assert "has 12 classes, the training data only 10" in message
