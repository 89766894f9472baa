"""What a model directory tells the checks: its files, its sizes, the memory it takes."""
