"""The one config file: its sections as frozen models, and how it is read."""
