"""Hugging Face transformers models on a sequence-sharded cache."""
