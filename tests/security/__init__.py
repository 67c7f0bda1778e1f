"""Attacks on the boundaries of a stack, each on the real process or program that defends it."""
