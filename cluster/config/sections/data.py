"""The `data` part of a training job."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from cluster.config.sections.section import Section


class AugmentConfig(Section):
    """Random changes to training images."""

    crop_padding: int = Field(default=0, ge=0)
    """Pixels of zeros around an image, out of which a random crop of its size is cut."""
    flip: bool = False
    """Mirror every other image, at random."""


class DataConfig(Section):
    """The data to train on."""

    source: str | None = Field(default=None, min_length=1)
    """`python-stdlib` (the sources of this Python's standard library), the default of causal_lm;
    `sklearn-digits` (images of digits), that of image_classification; or a Parquet file, directory or URI."""
    held_out_source: str | None = Field(default=None, min_length=1)
    """Parquet to evaluate on. Default: a part of the source, by held_out_every."""
    text_column: str = Field(default="text", min_length=1)
    """Column of the Parquet data that holds the text."""
    sequence_length: int = Field(default=256, ge=2)
    """Tokens in one sample."""
    tokenizer: str | None = None
    """Hugging Face tokenizer directory, or the URI of one. Default: the model directory's, else one is
    trained on the data."""
    packing: bool = True
    """Cut the text into samples of exactly sequence_length; false makes each document a sample (or several)
    and pads it."""
    group_by_length: bool = False
    """Without packing: put samples of similar length into a micro-batch."""
    workers: int = Field(default=0, ge=0)
    """Processes that load a worker's data ahead of its steps; with 0 the worker loads it itself."""
    held_out_every: int = Field(default=20, ge=2)
    """Every n-th document or image (in the order of their paths or rows) is kept for evaluation."""
    image_column: str = Field(default="image", min_length=1)
    """Column of the Parquet data that holds images in the Hugging Face layout (`{bytes, path}`)."""
    label_column: str = Field(default="label", min_length=1)
    """Column of the Parquet data that holds the class, a whole number from 0."""
    image_size: int | None = Field(default=None, ge=1)
    """Height and width that images are scaled to, in pixels. Default: that of the first image."""
    mean: tuple[float, ...] | None = Field(default=None, strict=False)
    """Mean of each channel (0 to 1), which is subtracted. Default: measured on training images."""
    std: tuple[PositiveFloat, ...] | None = Field(default=None, strict=False)
    """Standard deviation of each channel, which is divided by. Default: measured on training images."""
    augment: AugmentConfig = AugmentConfig()
    shuffle_row_groups: int = Field(default=8, ge=1)
    """Row groups of images that are shuffled together, and kept in memory for that."""
