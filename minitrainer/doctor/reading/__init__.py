"""A Python script, read without running it: names, values, and the order in which it would run."""
