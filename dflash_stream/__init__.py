"""Stream a language model's hidden states through an object store, and train DFlash drafters from them."""

__version__ = "0.1.0"
