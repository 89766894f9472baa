"""What a run leaves behind: its files, who writes them, and how they are read."""
