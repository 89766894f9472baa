"""The torch engine: continuous batching over transformers' own models, tensor-parallel by their own plan."""
