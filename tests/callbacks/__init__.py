"""Tests of the callbacks, with a fake of what they see of the trainer."""
