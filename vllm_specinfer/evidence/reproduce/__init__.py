"""The tables of the SpecInfer paper (arXiv 2305.09781) in kind, on any models."""
