"""Training on the target's own texts: SSM pools by boost-tuning (SpecInfer, arXiv
2305.09781, section 3) and EAGLE-3 heads."""
