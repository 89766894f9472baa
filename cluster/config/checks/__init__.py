"""What is wrong across sections, and with what the config names; one file a rule."""
