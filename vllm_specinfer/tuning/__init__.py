"""Collective boost-tuning of an SSM pool (SpecInfer, arXiv 2305.09781, section 3)."""
