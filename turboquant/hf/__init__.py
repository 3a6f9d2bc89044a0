"""What meets transformers: the cache and its layers, attention, patches, files, evaluation."""
