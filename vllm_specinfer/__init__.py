"""Tree-based speculative inference (SpecInfer) for stock vLLM."""

__version__ = "0.1.0"
