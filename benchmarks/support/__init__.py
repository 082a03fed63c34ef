"""What the benchmarks share: the work, its peers, the clock, results files."""
