"""The ground floor: config, embedded cluster, storage, model registry and sharing."""
