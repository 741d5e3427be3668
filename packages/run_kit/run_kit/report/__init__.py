"""HTML reports: one self-contained page about a run, or comparing several, made from run folders."""
