"""Models by name, version and alias."""
