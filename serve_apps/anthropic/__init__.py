"""The words of Anthropic's API: requests, answers and errors of /v1/messages; plain data."""
