"""The sections of the config file, as frozen models."""
