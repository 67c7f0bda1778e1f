"""Node pools, the sizes of a job's pods, and the check that a model fits its accelerator. Pure."""
