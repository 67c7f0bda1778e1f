"""The RayJob templates of a stack: pods, model weights, deadlines."""
