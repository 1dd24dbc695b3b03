"""Readers of the checkpoint forms that exist outside: Hugging Face directories and GGUF files."""
