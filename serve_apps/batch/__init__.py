"""Offline inference: the rows of Parquet files through an app's engine, resumable shard by shard."""
