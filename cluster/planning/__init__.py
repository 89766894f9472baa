"""What devices can do, and how ranks are laid out over them; pure."""
