"""Mutation tests of the pure core: change the code in small ways, and count the changes that unit tests notice."""
