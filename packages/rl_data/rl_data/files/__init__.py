"""Readers of data files: parquet, folders that Hugging Face `datasets` saved, JSON lines and CSV."""
