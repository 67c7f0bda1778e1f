"""What the service, the infrastructure program and the Ray job agree on. Imports the standard library only."""
