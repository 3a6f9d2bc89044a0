"""The integration with transformers: the cache and its layers, attention, patches, files."""
