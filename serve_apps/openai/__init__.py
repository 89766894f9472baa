"""The words of the OpenAI API: requests, answers and errors; plain data, and nothing that waits."""
