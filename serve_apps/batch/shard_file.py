"""The file of one shard in the output, written at once, with its sums in its footer."""

from __future__ import annotations

import json
from dataclasses import asdict

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.errors import RequestError
from cluster.files.storage import Storage
from serve_apps.batch.manifest import Totals

_KEY = b"shoal.batch"


def write_shard(output: Storage, name: str, table: pa.Table, totals: Totals) -> None:
    """Write a shard's rows; the file is there whole or not at all."""
    metadata = {**(table.schema.metadata or {}), _KEY: json.dumps(asdict(totals)).encode()}
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd")
    output.write_bytes(name, sink.getvalue().to_pybytes())


def read_totals(output: Storage, name: str) -> Totals:
    """The sums of a shard that is done.

    Raises:
        RequestError: the file is not one that `write_shard` wrote.
    """
    with output.reader(name) as file:
        try:
            metadata = pq.read_schema(pa.PythonFile(file, mode="r")).metadata or {}
            return Totals(**json.loads(metadata[_KEY]))
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(
                f"{output.location}/{name} is no file of `shoal batch` ({error});"
                " delete it to have its rows done again"
            ) from error
