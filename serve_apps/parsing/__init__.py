"""What an answer's text holds besides words for the reader: the model's reasoning, and its calls of tools."""
