"""The ``cloister`` command. ``app`` assembles the commands of the other modules."""
