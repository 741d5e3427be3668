"""The registry of rewards: GSM8K, equivalence of mathematical answers, multiple choice, format, length, code."""
