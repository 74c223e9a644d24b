"""How transformers models are called: attention, compilation, exceptions by model type."""
