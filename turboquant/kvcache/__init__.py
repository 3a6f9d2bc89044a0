"""The packed keys and values of a cache: torch and this package's operators, nothing of transformers."""
