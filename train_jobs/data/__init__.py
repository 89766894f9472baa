"""The text a job trains on: documents, tokenizer, packed samples and their order."""
