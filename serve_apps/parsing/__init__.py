"""What an answer's text holds besides words for the reader: the model's reasoning, and its calls of tools.

By hand, for the torch engine: vLLM's parsers come with all of vLLM. An app with `engine: vllm` has those, and
the tests compare the two where vLLM is installed.
"""
