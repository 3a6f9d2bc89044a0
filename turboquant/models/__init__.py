"""A model as it is: what identifies it, where its weights are, what wraps it. With torch and transformers."""
