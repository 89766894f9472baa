"""A checkpoint's file that cannot be written says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.files.backend import StorageError
from cluster.files.storage import Storage
from tests.small_disk import only_small_files
from train_jobs.checkpoint.files import StorageFileSystem


@pytest.mark.parametrize("room_bytes", [100, 5_000, 70_000])
def test_a_disk_that_fills_up_in_the_middle_is_named_as_the_reason(room_bytes: int, tmp_path: Path) -> None:
    files = StorageFileSystem(Storage(tmp_path))
    files.storage.prepare()
    # torch's archive would speak of an unexpected position instead.
    with (
        only_small_files(room_bytes),
        pytest.raises(StorageError, match=r"cannot write .*: file too large"),
        files.create_stream("weights", "wb") as stream,
    ):
        torch.save({"weights": torch.zeros(100_000)}, stream)
    assert files.written == {}
