"""The stack file: its sections, its rules, and one parse into types."""
