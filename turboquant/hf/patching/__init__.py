"""Patching a model: `llama` for decoders, `esm` for ESM-2, with the same functions. `turboquant.patching` chooses."""
