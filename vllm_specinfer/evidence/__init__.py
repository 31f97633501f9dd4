"""What a sceptic can run again: traces, simulated trees, comparisons."""
