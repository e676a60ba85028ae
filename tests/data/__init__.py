"""Tests of the order of samples, the shares of the ranks, seeds and batches."""
