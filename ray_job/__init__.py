"""The Ray job of cloister: a job spec in, part objects out."""
